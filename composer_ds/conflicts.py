"""Settings that are wrong or disagree: every function yields one sentence for each problem.

Nothing wins silently: two sources that disagree are named with both places and both values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from packaging.version import Version

from composer_ds.facts import PRECISIONS, Settings, TrainerFacts, mapping, offload_device, precision_of

__all__ = ['PASSED_ON', 'problems_of_settings', 'problems_with_trainer']

ELEMENTWISE_OPTIMIZERS = frozenset({
    'ASGD', 'Adadelta', 'Adam', 'AdamW', 'Adamax', 'DecoupledAdamW', 'DecoupledSGDW', 'DeepSpeedCPUAdam',
    'DeepSpeedCPULion', 'FusedAdam', 'FusedLion', 'Lion', 'NAdam', 'RAdam', 'RMSprop', 'Rprop', 'SGD',
})  # fmt: skip
"""Optimizers whose update of an element depends on that element alone, so that ZeRO may flatten and cut parameters."""

PASSED_ON = frozenset({
    'communication_data_type', 'data_types', 'dump_state', 'gradient_predivide_factor', 'memory_breakdown',
    'prescale_gradients', 'steps_per_print', 'wall_clock_breakdown', 'zero_allow_untested_optimizer',
})  # fmt: skip
"""Top-level keys of a ds_config that concern nobody but DeepSpeed."""

READ_HERE = frozenset({
    'bf16', 'fp16', 'gradient_accumulation_steps', 'gradient_clipping', 'optimizer', 'scheduler', 'train_batch_size',
    'train_micro_batch_size_per_gpu', 'zero_force_ds_cpu_optimizer', 'zero_optimization',
})  # fmt: skip
"""Top-level keys of a ds_config that this module compares with the Trainer."""


_USES_THE_GRADIENTS = 'reads or changes p.grad of the parameters, which DeepSpeed has moved into partitions by then'
REFUSED_PARTS_OF_COMPOSER = {
    'GradientClipping': f"{_USES_THE_GRADIENTS}; write DeepSpeed(ds_config={{'gradient_clipping': 1.0}}) instead",
    'OptimizerMonitor': f'{_USES_THE_GRADIENTS}, and would log a norm of 0',
    'SAM': 'wraps the optimizer and needs two backward passes for each optimizer step',
    'SWA': 'averages a copy of state.model and writes weights that the next optimizer step would undo',
    'EMA': 'averages and swaps the weights of state.model, which are partitions or 16-bit copies of the master weights',
    'LayerFreezing': 'takes parameters out of the optimizer, which holds partitions',
    'SeqLengthWarmup': 'makes forward and backward passes of its own beside the engine',
    'ExportForInferenceCallback': 'copies state.model on one rank',
}
"""Algorithms and callbacks of Composer that would silently do nothing or something wrong, with the reason."""


def problems_of_settings(settings: Settings) -> Iterator[str]:
    """Find what is wrong with the settings by themselves.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.

    Yields:
        str: One problem each.
    """
    if isinstance(settings.zero_stage, bool) or settings.zero_stage not in (0, 1, 2, 3):
        yield f'zero_stage={settings.zero_stage!r}: allowed are 1, 2 and 3 (0 is run as 1)'
    for place in ('offload_optimizer', 'offload_param'):
        value = getattr(settings, place)
        if value not in (None, 'cpu'):
            yield f"{place}={value!r}: allowed are 'cpu' and None" + (
                '; NVMe offload is not supported yet' if value == 'nvme' else ''
            )
    if settings.offload_param is not None and settings.zero_stage in (0, 1, 2):
        yield (
            f'offload_param={settings.offload_param!r} with zero_stage={settings.zero_stage}: only ZeRO 3 partitions '
            'the weights, so only there can they be offloaded; write zero_stage=3, or offload_optimizer alone'
        )
    yield from _problems_of_ds_config(settings)


def _problems_of_ds_config(settings: Settings) -> Iterator[str]:
    for key in settings.ds_config:
        if key not in PASSED_ON | READ_HERE:
            near = difflib.get_close_matches(str(key), PASSED_ON | READ_HERE, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ''
            yield f'ds_config.{key}: unknown, or not supported by composer_ds yet{hint}'
    for section, instead in (('optimizer', 'optimizers'), ('scheduler', 'schedulers')):
        if settings.ds_config.get(section) not in (None, 'auto'):
            yield f'ds_config.{section}: the Trainer owns it; give Trainer({instead}=...) and leave the section out'
    zero = settings.ds_config.get('zero_optimization', {})
    if not isinstance(zero, Mapping):
        yield f'ds_config.zero_optimization={zero!r}: a mapping of settings is needed'
        return
    if zero.get('stage', settings.zero_stage) != settings.zero_stage:
        yield (
            f'DeepSpeed(zero_stage={settings.zero_stage}) and ds_config.zero_optimization.stage={zero["stage"]!r} '
            f'disagree; write zero_stage={zero["stage"]!r}, or leave the stage out of the ds_config'
        )
    for place in ('offload_optimizer', 'offload_param'):
        given, device = getattr(settings, place), offload_device(zero.get(place))
        if device not in ('none', 'cpu'):
            yield f"ds_config.zero_optimization.{place}.device={device!r}: only 'cpu' and 'none' are supported yet"
        elif given is not None and 'device' in mapping(zero.get(place)) and device != given:
            yield (
                f'DeepSpeed({place}={given!r}) and ds_config.zero_optimization.{place}.device={device!r} disagree; '
                'give one of them'
            )
    if zero.get('overlap_comm') and settings.zero_stage in (0, 1):
        yield 'ds_config.zero_optimization.overlap_comm=True: works with zero_stage 2 and 3 here; leave it out'
    clipping = settings.ds_config.get('gradient_clipping', 0.0)
    if clipping != 'auto' and (isinstance(clipping, bool) or not isinstance(clipping, int | float) or clipping < 0):
        yield f'ds_config.gradient_clipping={clipping!r}: a norm of 0 (no clipping) or more is needed'


def problems_with_trainer(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    """Find where the settings and the Trainer disagree, and what of the Trainer is not supported.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One problem each.
    """
    if facts.number_of_deepspeed_algorithms > 1:
        yield f'algorithms holds {facts.number_of_deepspeed_algorithms} DeepSpeed instances; a Trainer can have one'
    for name in facts.algorithms_and_callbacks:
        if name in REFUSED_PARTS_OF_COMPOSER:
            yield f'{name} does not work with DeepSpeed yet: it {REFUSED_PARTS_OF_COMPOSER[name]}; leave it out'
    for name in facts.parallelism:
        yield (
            f'Trainer(parallelism_config=...) asks for {name!r} beside DeepSpeed: both would shard the model; leave '
            'parallelism_config out, or leave DeepSpeed out'
        )
    if facts.precision not in PRECISIONS:
        reason = " (Composer's default on a GPU)" if facts.precision == 'amp_fp16' else ''
        yield (
            f"Trainer(precision='{facts.precision}'){reason} is not supported yet: allowed are "
            + ' and '.join(f"'{precision}'" for precision in PRECISIONS)
            + "; write Trainer(precision='amp_bf16')"
        )
    if facts.device_train_microbatch_size == 'auto':
        yield (
            "Trainer(device_train_microbatch_size='auto'): when memory runs out in the middle of a batch, DeepSpeed "
            'has already reduced part of its gradients and cannot start over; give a number'
        )
    if facts.optimizer_class is None:
        yield 'The Trainer has no optimizer; write Trainer(optimizers=torch.optim.AdamW(model.parameters()))'
    elif facts.optimizer_class not in ELEMENTWISE_OPTIMIZERS and not settings.ds_config.get(
        'zero_allow_untested_optimizer'
    ):
        yield (
            f'Trainer(optimizers={facts.optimizer_class}(...)): ZeRO flattens parameters and cuts them in pieces, '
            'which is right for optimizers that treat every element by itself, and silently wrong for those that need '
            f'the shape or the norm of a parameter (LAMB, LARS, Adafactor, Shampoo, Muon). Known to be right: '
            f'{", ".join(sorted(ELEMENTWISE_OPTIMIZERS))}. If yours is element-wise, too, say so with '
            "ds_config={'zero_allow_untested_optimizer': True}"
        )
    if facts.trained_without_optimizer:
        some = ', '.join(facts.trained_without_optimizer[:3])
        yield (
            f'{len(facts.trained_without_optimizer)} trainable parameters are not in the optimizer ({some}, ...); give '
            'them to it, or set requires_grad=False on them'
        )
    if facts.scalar_parameters:
        yield (
            f'{", ".join(facts.scalar_parameters)}: DeepSpeed cannot broadcast parameters of shape (); give them the '
            'shape (1,)'
        )
    yield from _precision_sections(settings, facts)
    yield from _batch_sizes(settings, facts)


def _precision_sections(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    before_0_19_8 = Version(facts.deepspeed_version) < Version('0.19.8')
    offload = settings.offload_optimizer or offload_device(
        mapping(settings.ds_config.get('zero_optimization')).get('offload_optimizer')
    )
    in_16_bits = settings.zero_stage == 2 or (settings.zero_stage in (0, 1) and offload == 'cpu')
    if before_0_19_8 and in_16_bits and precision_of(settings, facts) == 'amp_bf16':
        # Measured with tests/distributed/test_bf16.py.
        yield (
            f'deepspeed {facts.deepspeed_version} trains wrongly in bf16 with ZeRO 2, and with ZeRO 1 and offload: it '
            'adds up gradients in 16 bits or loses some. Install deepspeed>=0.19.8, or use zero_stage=3'
        )
    for section in ('bf16', 'fp16'):
        enabled = mapping(settings.ds_config.get(section)).get('enabled', 'auto')
        wanted = PRECISIONS.get(precision_of(settings, facts)) == section
        if enabled != 'auto' and bool(enabled) != wanted:
            yield (
                f"Trainer(precision='{facts.precision}') and ds_config.{section}.enabled={enabled!r} disagree; the "
                "Trainer's precision decides, leave the section out"
            )


def _batch_sizes(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    given = settings.ds_config.get('train_micro_batch_size_per_gpu', 'auto')
    ours = facts.device_train_microbatch_size
    if given != 'auto' and given != ours:
        yield (
            f'Trainer(device_train_microbatch_size={ours!r}) and ds_config.train_micro_batch_size_per_gpu={given!r} '
            "disagree; Composer splits the batches, leave it out of the ds_config or write 'auto'"
        )
    for key in ('train_batch_size', 'gradient_accumulation_steps'):
        value = settings.ds_config.get(key, 'auto')
        if value != 'auto':
            yield (
                f'ds_config.{key}={value!r}: one batch of the dataloader is one optimizer step, cut in microbatches by '
                f"Trainer(device_train_microbatch_size=...); leave it out or write 'auto'"
            )
