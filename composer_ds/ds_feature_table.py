"""The list of what a ds_config can ask DeepSpeed for beyond ZeRO, with what becomes of each.

``docs/deepspeed_features.md`` is its page for users. Written against deepspeed 0.19.8; a test walks over the
keys that the installed version knows, so that none slips through undecided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ['FEATURES', 'NO_NVME', 'Feature', 'feature_of']


@dataclass(frozen=True)
class Feature:
    """One feature of DeepSpeed and what becomes of it.

    Args:
        paths (tuple[str, ...]): Its keys in a ds_config, dotted. A section's key stands for all below it, unless keys
            below it are features of their own.
        verdict (Literal['passes', 'refused', 'owned']): ``'owned'`` keys are compared with the Trainer elsewhere.
        reason (str): Why it is refused, as the second half of a sentence; for the others, what happens.
        instead (str): What to write instead; the last part of the sentence.
        off (tuple[Any, ...]): Values with which nothing is asked for, besides None, 'auto', empty ones, and False
            unless True is one of them.
        switch (str | None): In a section, the key that switches it on.
        by_presence (bool): Whether DeepSpeed takes a section as switched on that does not say so.
        stages (tuple[int, ...]): The ZeRO stages that read it.
    """

    paths: tuple[str, ...]
    verdict: Literal['passes', 'refused', 'owned']
    reason: str
    instead: str = ''
    off: tuple[Any, ...] = ()
    switch: str | None = None
    by_presence: bool = False
    stages: tuple[int, ...] = (1, 2, 3)

    def asked_by(self, value: Any) -> bool:
        """Tell whether a value asks for the feature.

        Args:
            value (Any): What stands at one of the paths.

        Returns:
            bool: False for what switches it off or is DeepSpeed's default.
        """
        if isinstance(value, Mapping):
            if self.switch is not None:
                return self.asked_by(value.get(self.switch, self.by_presence))
            return self.by_presence or any(self.asked_by(below) for below in value.values())
        off = (
            (*self.off, None, 'auto', '', [])
            if any(one is True for one in self.off)
            else (*self.off, False, None, 'auto', '', [])
        )
        return not any(isinstance(one, bool) is isinstance(value, bool) and one == value for one in off)


def _zero(*keys: str) -> tuple[str, ...]:
    return tuple(f'zero_optimization.{key}' for key in keys)


def _stage3(*keys: str) -> tuple[str, ...]:
    return _zero(*(f'{prefix}{key}' for key in keys for prefix in ('stage3_', '')))


def _passes(paths: tuple[str, ...], reason: str, **settings: Any) -> Feature:
    return Feature(paths, 'passes', reason, **settings)


def _refused(paths: tuple[str, ...], reason: str, instead: str, **settings: Any) -> Feature:
    return Feature(paths, 'refused', reason, instead, **settings)


def _owned(paths: tuple[str, ...], reason: str) -> Feature:
    return Feature(paths, 'owned', reason)


_OUT = 'leave it out'
_CHECKPOINTS = "only DeepSpeed's own checkpoints would use it, and checkpoints are Composer's here"
NO_NVME = (
    'NVMe offload keeps master weights and optimizer state on disk between optimizer steps, but checkpoints read and '
    'write them in memory, and would get old values'
)
_NVME = 'only NVMe offload reads it, and that is not supported'
_OWN_BOUNDARY = (
    'ZenFlow and SuperOffload decide themselves when the accumulation of gradients ends, and bring an Adam of their '
    "own; here the batch ends it and the Trainer's optimizer runs"
)
_PARALLEL = (
    'the ranks would no longer all be data-parallel, but Composer gives each rank its own samples, weights its loss by '
    'them, and checkpoints are put together from data-parallel partitions'
)

FEATURES: tuple[Feature, ...] = (
    # The Trainer's, or decided by other modules.
    _owned(
        ('train_batch_size', 'train_micro_batch_size_per_gpu', 'gradient_accumulation_steps'),
        "must agree with the dataloader's batch, `device_train_microbatch_size` and the number of ranks",
    ),
    _owned(('gradient_clipping',), 'DeepSpeed clips; must agree with `GradientClipping`; 0.0 when nobody asks'),
    _owned(('optimizer.type', 'optimizer.params', 'zero_allow_untested_optimizer', 'zero_force_ds_cpu_optimizer'),
           "the Trainer's optimizer is run; the section builds one only where the Trainer was given none. Muon is "
           'refused: it needs whole matrices'),
    _owned(('scheduler',), "Composer's schedulers run"),
    _owned(('bf16.enabled', 'fp16.enabled', 'torch_autocast', 'data_types', 'fp16.loss_scale',
            'fp16.initial_scale_power', 'fp16.loss_scale_window', 'fp16.hysteresis', 'fp16.consecutive_hysteresis',
            'fp16.min_loss_scale'), "must agree with the Trainer's precision"),
    _owned(_zero('stage', 'overlap_comm'), 'must agree with `DeepSpeed(zero_stage=...)`; true with ZeRO 2 and 3 only'),
    _refused(_zero('offload_optimizer.device', 'offload_param.device'), NO_NVME, "write 'cpu'", off=('none', 'cpu')),
    # Numbers that change nothing about the weights.
    _passes(
        _zero('reduce_bucket_size', 'allgather_bucket_size', 'sub_group_size')
        + _stage3('prefetch_bucket_size', 'param_persistence_threshold', 'model_persistence_threshold',
                  'max_live_parameters', 'max_reuse_distance'),
        'sizes: they trade memory for speed',
    ),
    _passes(_zero('contiguous_gradients', 'reduce_scatter'), 'how gradients are stored and reduced'),
    _passes(_zero('use_multi_rank_bucket_allreduce'), 'how gradients are reduced', off=(True,), stages=(1, 2)),
    _passes(_zero('parameter_alignment'), 'padding between the parameters of a partition', stages=(1, 2)),
    _passes(_zero('offload_optimizer.pin_memory', 'offload_param.pin_memory'), 'page-locked memory; on a GPU only'),
    _passes(('prescale_gradients', 'gradient_predivide_factor'),
            'gradients are divided before they are summed over the ranks; under ZeRO 2 and 3 only with reduce_scatter '
            'false', off=(1,)),
    _passes(('communication_data_type',), 'gradients are rounded to this dtype for the reduction, so weights differ '
            'from plain Composer by that rounding'),
    _passes(_zero('compute_grad_norm'), 'the norm of the gradients is not computed if false; not together with '
            'clipping, offload, or bf16 and ZeRO 1', off=(True,), stages=(1, 2)),
    _passes(_zero('ignore_unused_parameters'), 'if false, training ends with an error when a parameter gets no '
            'gradient; DeepSpeed looks only with the optimizer offloaded', off=(True,), stages=(1, 2)),
    _passes(('bf16.immediate_grad_update',), 'gradients go into the fp32 buffer at once', stages=(1,)),
    # ZeRO 3.
    _passes(_zero('zero_hpz_partition_size'), 'hpZ: a second copy of the weights within each group of ranks spares '
            'the gathering in the backward pass; must divide the number of ranks', off=(0, 1), stages=(3,)),
    _passes(_stage3('gather_16bit_weights_on_model_save') + _zero('stage3_gather_fp16_weights_on_model_save'),
            '`ds_engine.save_16bit_model(folder)` works under ZeRO 3. Checkpoints of Composer are whole anyway'),
    _passes(_stage3('use_all_reduce_for_fetch_params', 'allgather_sequential'), 'how weights are gathered',
            stages=(3,)),
    _passes(_stage3('module_granularity_threshold') + _zero('leaf_module'), 'modules that are gathered as a whole. '
            'DeepSpeed itself fails when such a module is fed with inputs that need no gradient (the first layer)',
            off=(0,), stages=(3,)),
    _passes(_zero('memory_efficient_linear'), 'if false, torch.nn.functional.linear is left alone; only before any '
            'other ZeRO 3 engine of the process', off=(True,), stages=(3,)),
    _passes(_zero('enable_sanity_checks'), 'the ranks check that they reduce the same parameters', stages=(3,)),
    _passes(_zero('log_trace_cache_warnings'), 'prints when modules run in another order than before', stages=(3,)),
    # What is printed and measured.
    _passes(('log_level',), "of DeepSpeed's logger, which is kept at 'warning' otherwise", off=('warning',)),
    _passes(('steps_per_print',), 'printed every so many optimizer steps: the step, the number skipped, the learning '
            'rates'),
    _passes(('dump_state',), "printed at log level 'info': needs log_level 'info' or 'debug'"),
    _passes(('wall_clock_breakdown',), 'times of each optimizer step, added up over its microbatches, are printed'),
    _passes(('memory_breakdown',), 'memory in use before and after each part of an optimizer step is printed'),
    _passes(('vocabulary_size',), 'DeepSpeed warns if it is no multiple of 8'),
    _passes(('flops_profiler',), 'written to `output_file` or printed, for optimizer step `profile_step` counted from '
            '0. One microbatch per batch only; not under ZeRO 3, where DeepSpeed counts linear layers twice',
            switch='enabled', stages=(1, 2)),
    _passes(('disable_python_gc',), "Python's garbage collector is off until the Trainer is closed; collect with "
            '`ds_engine.collect_python_gc()`'),
    _refused(('comms_logger',), "DeepSpeed's latencies are wrong: each is the sum of all so far",
             "use CommunicationMonitor, or Composer's Profiler (TorchProfiler), which shows collectives with times and "
             'sizes', switch='enabled',
             by_presence=True),
    _refused(('tensorboard', 'wandb', 'csv_monitor', 'comet'),
             'it would log the learning rate only, and all at sample 0: DeepSpeed counts samples in its own backward()',
             'use Trainer(loggers=...) with TensorboardLogger, composer_ds.WandBLogger, CometMLLogger or FileLogger, '
             'and LRMonitor', switch='enabled'),
    _refused(('timers',), 'its samples per second would be wrong: it counts one microbatch per optimizer step',
             'use Trainer(callbacks=[SpeedMonitor()])'),
    # Other ways to reduce, store and offload.
    _refused(('gradient_allreduce_op',), 'gradients would be summed over the ranks, and plain Composer averages them',
             'multiply the learning rate by the number of ranks', off=('mean',)),
    _refused(_zero('round_robin_gradients'), 'DeepSpeed reorders the parameters of its partitions, but not its record '
             'of where each lies, so checkpoints would hold wrong weights', _OUT),
    _refused(_zero('zero_quantized_weights', 'zero_quantized_nontrainable_weights', 'zero_quantized_gradients'),
             'ZeRO++ rounds what is sent to 8 or 4 bits, in GPU code that this package has not been tested with',
             "leave it out; ds_config.communication_data_type='bf16' halves the gradients' traffic"),
    _refused(_zero('zenflow'), _OWN_BOUNDARY, "leave it out; offload_optimizer='cpu' is supported", by_presence=True),
    _refused(_zero('offload_optimizer.super_offload', 'offload_optimizer.cpuadam_cores_perc'), _OWN_BOUNDARY,
             "leave it out; offload_optimizer='cpu' is supported", off=(0.8,)),
    _refused(_zero('offload_optimizer.ratio'), 'partial offload would run the other part by a torch AdamW that '
             'DeepSpeed makes itself', "leave it out: offload_optimizer='cpu' offloads all", off=(1,)),
    _refused(_zero('offload_optimizer.nvme_path', 'offload_param.nvme_path', 'offload_optimizer.pipeline_read',
                   'offload_optimizer.pipeline_write', 'offload_optimizer.fast_init'), _NVME, _OUT),
    _refused(_zero('offload_optimizer.buffer_count'), _NVME, _OUT, off=(4,)),
    _refused(_zero('offload_param.buffer_count'), _NVME, _OUT, off=(5,)),
    _refused(_zero('offload_param.buffer_size'), _NVME, _OUT, off=(100_000_000,)),
    _refused(_zero('offload_param.max_in_cpu'), _NVME, _OUT, off=(1_000_000_000,)),
    _refused(('aio',), _NVME, _OUT),
    _refused(_zero('cpu_offload', 'cpu_offload_param', 'cpu_offload_use_pin_memory'),
             'DeepSpeed has replaced it', "write offload_optimizer: {'device': 'cpu'} or offload_param"),
    _refused(_zero('save_muon_momentum_buffer_in_memory'), 'only Muon reads it, which needs whole matrices', _OUT),
    _refused(('bf16.bf16_master_weights_and_grads', 'bf16.bf16_optimizer_states', 'fp16.fp16_master_weights_and_grads'),
             'master weights are fp32 here, and so are checkpoints', _OUT),
    _refused(('bf16.check_grad_overflow',), 'without it non-finite gradients would go into the weights', _OUT,
             off=(True,)),
    _refused(('fp16.auto_cast',), "Composer's precision runs the model under autocast, which casts inputs where needed",
             _OUT),
    _refused(('bfloat16',), 'an old name', 'write bf16', switch='enabled'),
    _refused(('optimizer.legacy_fusion',), 'only an optimizer that DeepSpeed builds reads it', _OUT),
    _refused(('managed_gradient_accumulation',), 'DeepSpeed would count microbatches, but Composer decides where a '
             'batch ends', _OUT),
    # Keys that do nothing, with any engine or with this one.
    _refused(_zero('allgather_partitions'), 'this DeepSpeed reads it nowhere', _OUT, off=(True,)),
    _refused(('disable_allgather',), 'this DeepSpeed reads it nowhere', _OUT),
    _refused(_zero('legacy_stage1'), 'this DeepSpeed does not have it any more', _OUT),
    _refused(_zero('override_module_apply'), 'only deepspeed.zero.Init reads it', 'give it to zero.Init', off=(True,)),
    _refused(('weight_quantization',), 'it is for inference', _OUT),
    _refused(('dataloader_drop_last',), "only DeepSpeed's own dataloader reads it", 'write DataLoader(drop_last=True)'),
    _refused(('activation_checkpointing',), "the engine does not read it: it is for models that call DeepSpeed's "
             'checkpoint function', 'call deepspeed.checkpointing.configure(None, partition_activations=...) before '
             "such a model runs, or use torch.utils.checkpoint or the model's gradient_checkpointing_enable()"),
    _refused(('data_efficiency',), "curriculum learning needs DeepSpeed's own dataloader, and random-LTD layers that "
             'DeepSpeed has replaced', "use a sampler of your own, or Composer's SeqLengthWarmup without DeepSpeed",
             switch='enabled'),
    # DeepSpeed's own checkpoints.
    _refused(('checkpoint.writer', 'checkpoint.load_universal', 'checkpoint.use_node_local_storage',
              'checkpoint.parallel_write', 'datastates_ckpt'), _CHECKPOINTS, 'write Trainer(save_folder=...)'),
    _refused(('checkpoint.tag_validation',), _CHECKPOINTS, _OUT, off=('Warn', 'WARN', 'warn')),
    _refused(('checkpoint.checkpoint_serialization',), _CHECKPOINTS, _OUT, off=(True,)),
    _refused(_zero('elastic_checkpoint', 'pipeline_loading_checkpoint'), _CHECKPOINTS,
             "leave it out; Composer's checkpoints load at any number of ranks"),
    _refused(_zero('load_from_fp32_weights'), _CHECKPOINTS, _OUT, off=(True,)),
    # Other ways to cut the model, other engines.
    _refused(('tensor_parallel',), _PARALLEL, "leave it out; ZeRO 3 cuts the weights, too", off=(0, 1)),
    _refused(('sequence_parallel_size', 'data_parallel_size'), _PARALLEL,
             'leave it out; for long sequences use activation checkpointing and smaller microbatches', off=(1,)),
    _refused(('seq_parallel_communication_data_type',), 'only sequence parallelism reads it', _OUT, off=('fp32',)),
    _refused(('expert_parallel', 'use_data_before_expert_parallelism'), _PARALLEL,
             _OUT, switch='enabled'),
    _refused(('pipeline',), "pipeline engines run whole batches themselves, in place of Composer's loop", _OUT),
    _refused(('hybrid_engine',), 'it is another engine, which also generates', 'generate with the model itself',
             switch='enabled'),
    _refused(('compile',), 'DeepCompile needs DeepSpeed to count microbatches', 'leave it out', switch='deepcompile'),
    _refused(('autotuning',), "it restarts the program from DeepSpeed's launcher and ends it",
             'try microbatch sizes and stages by hand', switch='enabled'),
)  # fmt: skip
"""The top-level sections and ``zero_optimization`` hold these; removed and unknown keys are those of ``ds_keys``."""


def feature_of(path: str) -> Feature | None:
    """Find the feature that a key of a ds_config belongs to.

    Args:
        path (str): The key, dotted, such as ``'zero_optimization.stage'``.

    Returns:
        Feature | None: None for a key that nobody has decided; a section whose keys are features has none itself.
    """
    decided = {one: feature for feature in FEATURES for one in feature.paths}
    while path:
        if path in decided:
            return decided[path]
        path = path.rpartition('.')[0]
    return None
