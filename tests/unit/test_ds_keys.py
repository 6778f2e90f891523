"""The keys of a ds_config; the oracles are DeepSpeed's documentation (0.19) and DeepSpeed itself."""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import logging.handlers
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from composer_ds import deepspeed_output, ds_schema
from composer_ds.ds_keys import auto_is_a_value, problems_of_keys, valid_keys

deepspeed = pytest.importorskip('deepspeed')

DOCUMENTED: dict[str, Any] = {
    'train_batch_size': 8, 'train_micro_batch_size_per_gpu': 8, 'gradient_accumulation_steps': 1,
    'managed_gradient_accumulation': True,
    'optimizer': {'type': 'AdamW', 'params': {'lr': 0.001, 'betas': [0.8, 0.999], 'eps': 1e-8, 'torch_adam': True}},
    'scheduler': {'type': 'WarmupLR', 'params': {'warmup_min_lr': 0, 'warmup_max_lr': 0.001, 'warmup_num_steps': 10}},
    'communication_data_type': 'fp32', 'gradient_allreduce_op': 'mean', 'prescale_gradients': False,
    'gradient_predivide_factor': 1.0,
    'fp16': {
        'enabled': False, 'auto_cast': False, 'loss_scale': 0, 'initial_scale_power': 16, 'loss_scale_window': 1000,
        'hysteresis': 2, 'consecutive_hysteresis': False, 'min_loss_scale': 1, 'fp16_master_weights_and_grads': False,
    },
    'bf16': {'enabled': True, 'bf16_master_weights_and_grads': False, 'bf16_optimizer_states': False},
    'torch_autocast': {'enabled': False, 'dtype': 'bfloat16', 'lower_precision_safe_modules': ['torch.nn.Linear']},
    'gradient_clipping': 1.0,
    'zero_optimization': {
        'stage': 3, 'allgather_partitions': True, 'allgather_bucket_size': 5e8, 'overlap_comm': False,
        'reduce_scatter': True, 'reduce_bucket_size': 5e8, 'contiguous_gradients': True,
        'load_from_fp32_weights': True, 'offload_param': {'device': 'nvme', 'nvme_path': '/local_nvme',
        'pin_memory': True, 'buffer_count': 5, 'buffer_size': 1e8, 'max_in_cpu': 1e9},
        'offload_optimizer': {'device': 'nvme', 'nvme_path': '/local_nvme', 'pin_memory': True, 'ratio': 0.3,
        'buffer_count': 4, 'fast_init': False}, 'stage3_max_live_parameters': 1e9, 'stage3_max_reuse_distance': 1e9,
        'stage3_prefetch_bucket_size': 5e8, 'stage3_param_persistence_threshold': 1e6, 'sub_group_size': 1e9,
        'elastic_checkpoint': False, 'stage3_gather_16bit_weights_on_model_save': True,
        'stage3_module_granularity_threshold': 0, 'ignore_unused_parameters': True, 'round_robin_gradients': False,
        'zero_hpz_partition_size': 1, 'zero_quantized_weights': False, 'zero_quantized_gradients': False,
        'log_trace_cache_warnings': False,
    },
    'aio': {'block_size': 1048576, 'queue_depth': 8, 'single_submit': False, 'overlap_events': True},
    'steps_per_print': 10, 'wall_clock_breakdown': False, 'dump_state': False, 'memory_breakdown': False,
    'dataloader_drop_last': False,
    'tensor_parallel': {'autotp_size': 1, 'preset_model': 'llama', 'partition_config': {'use_default_specs': False}},
    'autotuning': {
        'enabled': False, 'results_dir': 'results', 'exps_dir': 'exps', 'overwrite': False, 'metric': 'throughput',
        'start_profile_step': 5, 'end_profile_step': 10, 'fast': True, 'max_train_batch_size': 64, 'mp_size': 1,
        'num_tuning_micro_batch_sizes': 3, 'tuner_type': 'model_based', 'tuner_early_stopping': 5,
        'tuner_num_trials': 50, 'arg_mappings': {'train_micro_batch_size_per_gpu': '--batch'},
        'model_info': {'num_params': 1000},
    },
    'flops_profiler': {
        'enabled': False, 'profile_step': 1, 'module_depth': -1, 'top_modules': 1, 'detailed': True,
        'output_file': None,
    },
    'activation_checkpointing': {
        'partition_activations': False, 'cpu_checkpointing': False, 'contiguous_memory_optimization': False,
        'number_checkpoints': None, 'synchronize_checkpoint_boundary': False, 'profile': False,
    },
    'data_efficiency': {
        'enabled': True, 'seed': 1234, 'data_routing': {'enabled': True, 'random_ltd': {'enabled': True,
        'total_layer_num': 24}}, 'data_sampling': {'enabled': True, 'num_epochs': 1, 'num_workers': 0,
        'pin_memory': False, 'curriculum_learning': {'enabled': True,
        'curriculum_metrics': {'seqlen': {'min_difficulty': 8}}}, 'dynamic_batching': {'enabled': True,
        'lr_scaling_method': 'linear', 'max_tokens': 10}},
    },
    'tensorboard': {'enabled': False, 'output_path': 'logs', 'job_name': 'a_job'},
    'wandb': {'enabled': False, 'group': 'a', 'team': 'b', 'project': 'c'},
    'comet': {'enabled': False, 'workspace': 'a', 'project': 'b', 'samples_log_interval': 50, 'experiment_name': 'c'},
    'csv_monitor': {'enabled': False, 'output_path': 'logs', 'job_name': 'a_job'},
    'comms_logger': {'enabled': False, 'verbose': False, 'prof_all': True, 'debug': False, 'prof_ops': ['all_reduce']},
    'checkpoint': {
        'tag_validation': 'Warn', 'load_universal': False, 'use_node_local_storage': False,
        'parallel_write': {'pipeline_stage': False},
    },
    'data_types': {'grad_accum_dtype': 'fp32'},
    'zero_allow_untested_optimizer': True, 'zero_force_ds_cpu_optimizer': False,
    'hybrid_engine': {'enabled': False, 'max_out_tokens': 512, 'inference_tp_size': 1, 'pin_parameters': True},
    'pipeline': {'stages': 'auto', 'partition': 'best'},
    'timers': {'throughput': {'enabled': True, 'synchronized': False}},
    'compile': {'deepcompile': False},
    'weight_quantization': {'enabled': False, 'num_bits': 8, 'q_groups': 1},
    'sequence_parallel_size': 1, 'data_parallel_size': 1,
}  # fmt: skip
"""What https://www.deepspeed.ai/docs/config-json/ documents, and some of what it leaves out."""

OPEN = re.compile(r'(optimizer|scheduler)\.params\.|data_efficiency\.data_(sampling|routing\.random_ltd)\.|pipeline\.')
OPEN_DEEPER = re.compile(r'tensor_parallel\.partition_config\.|autotuning\.arg_mappings\.')


def paths_of(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*above, key))


CHECKED = [path for path in paths_of(DOCUMENTED) if not any(p.match('.'.join(path)) for p in (OPEN, OPEN_DEEPER))]


def with_key(path: tuple[str, ...], name: Any, config: dict[str, Any] = DOCUMENTED) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    section = changed
    for key in path[:-1]:
        section = section[key]
    section[name] = section.pop(path[-1])
    return changed


def test_what_is_documented_is_accepted():
    before = copy.deepcopy(DOCUMENTED)
    assert list(problems_of_keys(DOCUMENTED)) == []
    assert before == DOCUMENTED
    deepspeed.DeepSpeedConfig(copy.deepcopy(DOCUMENTED))
    assert {'.'.join(path) for path in CHECKED} <= valid_keys()
    assert len(CHECKED) > 140


def test_every_misspelt_key_is_found():
    for path in CHECKED:
        *_, key = path
        problems = list(problems_of_keys(with_key(path, key + key[-1])))
        assert problems == [f"ds_config.{'.'.join(path)}{key[-1]}: unknown; did you mean '{key}'?"]


@settings(deadline=None)
@given(st.sampled_from(CHECKED), st.integers(0, 50), st.sampled_from(['drop', 'swap', 'capital', 'replace']))
def test_misspelt_in_other_ways(path: tuple[str, ...], at: int, how: str):
    key = path[-1]
    at %= len(key) - 1
    wrong = {
        'drop': key[:at] + key[at + 1 :],
        'swap': key[:at] + key[at + 1] + key[at] + key[at + 2 :],
        'capital': key.capitalize(),
        'replace': key[:at] + 'q' + key[at + 1 :],
    }[how]
    assume(not any(name.split('.')[-1] == wrong for name in valid_keys()))
    (problem,) = problems_of_keys(with_key(path, wrong))
    assert problem.startswith('.'.join(('ds_config', *path[:-1], wrong)) + ': unknown')
    named = re.search(r"did you mean '(\w+)'", problem)
    likeness = difflib.SequenceMatcher(None, key, wrong).ratio()
    assert (named is None and likeness < 0.6) or (
        named is not None and difflib.SequenceMatcher(None, named.group(1), wrong).ratio() >= likeness
    )


def test_placeholders_are_left_alone():
    section = {'stage': 'auto', 'reduce_bucket_size': 'auto', 'offload_param': {'device': 'auto'}}
    config = {'zero_optimization': section, 'gradient_clipping': 'auto', 'fp16': 'auto', 'bf16': {'enabled': 'auto'}}
    config |= {'checkpoint': {'tag_validation': 'auto', 'writer': 'auto'}, 'communication_data_type': 'auto'}
    assert list(problems_of_keys(config)) == []


def test_a_placeholder_does_not_hide_a_misspelt_key():
    (problem,) = problems_of_keys({'zero_optimization': {'reduce_buket_size': 'auto', 'reduce_bucket_size': 'auto'}})
    assert 'reduce_buket_size' in problem


@pytest.mark.parametrize(
    ('config', 'place'),
    [
        ({'reduce_bucket_size': 1}, 'ds_config.zero_optimization.reduce_bucket_size'),
        ({'zero_optimization': {'aio': {}}}, 'ds_config.aio'),
        ({'zero_optimization': {'gradient_clipping': 1.0}}, 'ds_config.gradient_clipping'),
    ],
)
def test_a_key_in_the_wrong_place(config: dict, place: str):
    (problem,) = problems_of_keys(config)
    assert f"did you mean '{place}'" in problem


@pytest.mark.parametrize('key', [3, None, '', 'nothing_like_it', 'a.b'])
def test_other_keys(key: Any):
    assert list(problems_of_keys({key: 1})) == [f'ds_config.{key}: unknown; leave it out']


def removed_keys() -> list[tuple[tuple[str, ...], str]]:
    from deepspeed.runtime import config

    top, zero = config._REMOVED_TOP_LEVEL_CONFIG_KEYS, config._REMOVED_ZERO_CONFIG_KEYS
    return [((key,), text) for key, text in top.items()] + [
        (('zero_optimization', key), text) for key, text in zero.items()
    ]


@pytest.mark.skipif(not hasattr(deepspeed.runtime.config, '_REMOVED_ZERO_CONFIG_KEYS'), reason='nothing removed yet')
@pytest.mark.parametrize('value', ['auto', {}, 1, {'enabled': True}])
def test_removed_keys(value: Any):
    assert removed_keys()
    for path, text in removed_keys():
        config = {path[0]: value} if len(path) == 1 else {path[0]: {path[1]: value}}
        (problem,) = problems_of_keys(config)
        assert problem.startswith('.'.join(('ds_config', *path)) + f': deepspeed {deepspeed.__version__} does not have')
        assert text.strip() in problem
        assert '.'.join(path) not in valid_keys()


@pytest.mark.parametrize(
    ('config', 'words'),
    [
        ({'zero_optimization': {'stage': 7}}, ['ds_config.zero_optimization.stage=7: ', '0, 1, 2']),
        ({'zero_optimization': {'offload_param': {'device': 'gpu'}}}, ["offload_param.device='gpu'", 'nvme']),
        ({'zero_optimization': {'zenflow': {'select_interval': [1]}}}, ['zenflow.select_interval=[1]', '; or: ']),
        ({'zero_optimization': {'leaf_module': 3}}, ['ds_config.zero_optimization: ', 'leaf_module']),
        ({'zero_optimization': {'cpu_offload': True, 'offload_optimizer': {}}}, ['ds_config.zero_optimization: ']),
        ({'fp16': {'loss_scale': True}}, ['ds_config.fp16.loss_scale=True: ', 'number']),
        ({'timers': {'throughput': {'enabled': 'often'}}}, ["ds_config.timers.throughput.enabled='often': "]),
        ({'compile': {'passes': ['z1', 'z9']}}, ["ds_config.compile.passes[1]='z9': "]),
        ({'communication_data_type': 'fp8'}, ["ds_config.communication_data_type='fp8': ", 'bf16']),
        ({'checkpoint': {'tag_validation': 'no'}}, ["ds_config.checkpoint={'tag_validation': 'no'}: ", 'IGNORE']),
        ({'fp16': True}, ['ds_config.fp16=True: a mapping']),
        ({'optimizer': None}, ['ds_config.optimizer=None: a mapping']),
    ],
)  # fmt: skip
def test_values_that_deepspeed_refuses(config: dict, words: list[str]):
    (problem,) = problems_of_keys(config)
    assert all(word in problem for word in words), problem
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it raises
        deepspeed.DeepSpeedConfig({'train_micro_batch_size_per_gpu': 1, **config})


def test_all_problems_at_once():
    problems = list(
        problems_of_keys(
            {
                'zero_optimization': {
                    'stage': 'x',
                    'reduce_bucket_size': -1,
                    'stag': 1,
                    'offload_param': {'devise': 1},
                },
                'fp16': {'hysteresis': 'x', 'enable': True},
                'gradient_cliping': 1,
            }
        )
    )
    assert len(problems) == 7 and len(set(problems)) == 7


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(key for key in valid_keys() if not key.endswith('*'))),
    st.sampled_from([None, True, 0, 1, -1, 2, 0.5, 5e8, '', 'cpu', 'fp16', 'WARN', '3', [], ['a'], {}, {'enabled': 1}]),
)
@example('zero_optimization.offload_optimizer.ratio', 0.5)
def test_accepted_is_what_deepspeed_accepts(path: str, value: Any):
    keys = path.split('.')
    assume(keys[0] not in ds_schema.READ_BY_INITIALIZE and not keys[0].endswith(('_size', 'steps', 'per_gpu')))
    config: Any = value
    for key in reversed(keys):
        config = {key: config}
    problems = list(problems_of_keys(config))
    assume(not any('unknown' in problem for problem in problems))  # {'enabled': 1} where there is no such key
    try:
        with_stage = {'zero_optimization': {'stage': 1}, **copy.deepcopy(config)}
        if isinstance(with_stage['zero_optimization'], dict):
            with_stage['zero_optimization'].setdefault('stage', 1)
        deepspeed.DeepSpeedConfig({'train_micro_batch_size_per_gpu': 1, **with_stage})
    except Exception as error:
        assert problems, error
    else:
        assert problems == []


def test_the_stage_that_will_be_run_counts():
    config = {'zero_optimization': {'offload_optimizer': {'device': 'cpu', 'ratio': 0.5}}}
    (problem,) = problems_of_keys(config)
    assert 'Stage 3' in problem
    assert list(problems_of_keys(config, zero_stage=2)) == list(problems_of_keys(config, zero_stage=0)) == [problem]
    assert list(problems_of_keys(config, zero_stage=3)) == []
    config['zero_optimization']['stage'] = 2  # pyright: ignore[reportArgumentType]
    assert list(problems_of_keys(config, zero_stage=3)) == [problem]
    section = {'enabled': True, 'bf16_master_weights_and_grads': True}  # needs a stage, too
    assert list(problems_of_keys({'bf16': section})) == []
    (problem,) = problems_of_keys({'bf16': {'enabled': True, 'bf16_optimizer_states': True}})
    assert 'bf16_master_weights_and_grads' in problem


def test_where_auto_is_a_value_of_deepspeed():
    assert auto_is_a_value(('zero_optimization', 'zenflow', 'select_strategy'))
    assert auto_is_a_value(('expert_parallel', 'top_k'))
    for path in (
        'zero_optimization.stage',
        'zero_optimization.reduce_bucket_size',
        'fp16.enabled',
        'a.b.c',
        'fp16.x.y',
    ):
        assert not auto_is_a_value(path.split('.'))


def test_what_initialize_reads_itself():
    source = inspect.getsource(deepspeed.initialize)
    assert set(re.findall(r'config\[[\'"](\w+)[\'"]\]', source)) == ds_schema.READ_BY_INITIALIZE
    assert set(re.findall(r'config\.get\([\'"](\w+)[\'"]', source)) <= valid_keys()


def test_deepspeed_is_imported_for_a_config_only(monkeypatch):
    for name in [name for name in sys.modules if name.split('.')[0] == 'deepspeed']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'deepspeed', None)
    assert list(problems_of_keys({})) == []
    with pytest.raises(ImportError):
        list(problems_of_keys({'fp16': {}}))


def test_deepspeed_logs_nothing(monkeypatch):
    monkeypatch.setattr(deepspeed_output, '_said', set())  # each warning is let through once in a process
    config = {'zero_optimization': {'cpu_offload': True}}
    handler = logging.handlers.BufferingHandler(capacity=100)
    deepspeed.utils.logger.addHandler(handler)
    try:
        assert list(problems_of_keys(config)) == [] and handler.buffer == []
        deepspeed.DeepSpeedConfig({'train_micro_batch_size_per_gpu': 1, **config})
        assert any('deprecated' in record.getMessage() for record in handler.buffer)
    finally:
        deepspeed.utils.logger.removeHandler(handler)
