"""What becomes of each feature that a ds_config can ask for. What the features do is tried in ``tests/distributed``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from composer.algorithms import GradientClipping
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.logging import log_levels
from packaging.version import Version

from composer_ds import ds_features
from composer_ds.ds_feature_table import FEATURES, feature_of
from composer_ds.ds_features import passed_on, problems_of_features, problems_of_features_with_trainer
from composer_ds.ds_keys import valid_keys
from composer_ds.facts import Settings
from tests.unit.test_ownership import FACTS

PAGE = Path(__file__).parents[2] / 'docs' / 'deepspeed_features.md'
PATHS = {path: feature for feature in FEATURES for path in feature.paths}


def _nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split('.')):
        value = {key: value}
    return value


def _problems(ds_config: dict[str, Any], stage: int = 2, offload: str | None = None) -> list[str]:
    return list(problems_of_features(Settings(stage, offload, None, ds_config)))


def _with_trainer(ds_config: dict[str, Any], stage: int = 2, **facts: Any) -> list[str]:
    settings = Settings(stage, None, None, ds_config)
    return list(problems_of_features_with_trainer(settings, dataclasses.replace(FACTS, **facts)))


def test_every_key_of_the_installed_deepspeed_is_decided():
    sections = {path.rpartition('.')[0] for path in PATHS} - {''}
    undecided = [key for key in sorted(valid_keys()) if feature_of(key) is None and key not in sections]
    assert undecided == [], 'new in this DeepSpeed: try them out and put them into ds_feature_table.FEATURES'
    if Version(deepspeed.__version__) >= Version('0.19.8'):
        assert set(PATHS) - valid_keys() == set(), 'not in this DeepSpeed any more'
    assert len(PATHS) == sum(len(feature.paths) for feature in FEATURES), 'decided twice'


def test_a_new_key_would_be_noticed():
    assert feature_of('zero_optimization.no_such_key') is None
    assert feature_of('no_such_section.enabled') is None
    assert feature_of('flops_profiler.module_depth') is PATHS['flops_profiler']


@pytest.mark.parametrize('path', [path for path, feature in PATHS.items() if feature.verdict == 'refused'])
def test_what_is_refused_says_why_and_what_instead(path: str):
    feature = PATHS[path]
    value: Any = False if True in [one for one in feature.off if isinstance(one, bool)] else 'nvme'
    if feature.switch is not None:
        value = {feature.switch: True}
    (problem,) = _problems(_nested(path, value))
    assert problem.startswith(f'ds_config.{path}')
    assert problem.endswith(f': {feature.reason}; {feature.instead}')
    assert len(feature.reason) > 10 and feature.instead


@pytest.mark.parametrize(
    ('ds_config', 'words'),
    [
        ({'zero_optimization': {'round_robin_gradients': True}}, 'checkpoints would hold wrong weights'),
        ({'zero_optimization': {'zero_quantized_weights': True}}, 'ZeRO++ rounds what is sent'),
        ({'zero_optimization': {'offload_optimizer': {'device': 'nvme'}}}, "device='nvme': NVMe offload keeps"),
        ({'zero_optimization': {'offload_optimizer': {'device': 'cpu', 'ratio': 0.5}}}, 'ratio=0.5: partial offload'),
        ({'zero_optimization': {'zenflow': {}}}, 'ZenFlow'),
        ({'zero_optimization': {'cpu_offload': True}}, "write offload_optimizer: {'device': 'cpu'}"),
        ({'csv_monitor': {'enabled': True}}, 'all at sample 0'),
        ({'comms_logger': {'verbose': True}}, "or Composer's Profiler"),
        ({'activation_checkpointing': {'partition_activations': True}}, 'call deepspeed.checkpointing.configure('),
        ({'tensor_parallel': {'autotp_size': 2}}, 'no longer all be data-parallel'),
        ({'sequence_parallel_size': 2}, 'sequence_parallel_size=2: the ranks'),
        ({'compile': {'deepcompile': True}}, 'DeepCompile needs'),
        ({'bf16': {'enabled': True, 'bf16_master_weights_and_grads': True}}, 'master weights are fp32 here'),
        ({'data_efficiency': {'enabled': True, 'seed': 1}}, 'random-LTD'),
        ({'checkpoint': {'load_universal': True}}, 'write Trainer(save_folder=...)'),
        ({'timers': {'throughput': {'enabled': True}}}, 'SpeedMonitor'),
        ({'gradient_allreduce_op': 'sum'}, 'multiply the learning rate'),
    ],
)
def test_words_of_refusals(ds_config: dict[str, Any], words: str):
    (problem,) = _problems(ds_config)
    assert words in problem


def test_what_is_switched_off_is_no_problem_and_not_passed_on():
    ds_config = {
        'flops_profiler': {'enabled': False, 'profile_step': 3},
        'comms_logger': {'enabled': False, 'verbose': True},  # DeepSpeed would take it as on
        'tensorboard': {'enabled': False, 'output_path': 'logs'},
        'wandb': None,
        'activation_checkpointing': {'partition_activations': False, 'number_checkpoints': None},
        'checkpoint': {'tag_validation': 'Warn', 'writer': None},
        'compile': {'deepcompile': False},
        'tensor_parallel': {'autotp_size': 1},
        'expert_parallel': {'enabled': False, 'autoep_size': 4},
        'data_efficiency': {'enabled': False, 'seed': 1234},
        'gradient_predivide_factor': 1.0,
        'prescale_gradients': False,
        'gradient_allreduce_op': 'mean',
        'steps_per_print': None,
        'wall_clock_breakdown': False,
        'sequence_parallel_size': 1,
        'zero_optimization': {
            'zero_quantized_weights': False,
            'zero_hpz_partition_size': 1,
            'round_robin_gradients': False,
            'allgather_partitions': True,
            'memory_efficient_linear': True,
            'ignore_unused_parameters': True,
            'zenflow': None,
            'offload_optimizer': {'device': 'cpu', 'pin_memory': True, 'buffer_count': 4, 'fast_init': False},
            'offload_param': {'device': 'none', 'buffer_size': 1e8, 'max_in_cpu': 1e9, 'nvme_path': None},
        },
    }
    for stage in (1, 2, 3):
        assert _problems(ds_config, stage) == []
    assert passed_on(Settings(2, None, None, ds_config)) == {}


@pytest.mark.parametrize(
    ('model', 'section'),
    [
        (DeepSpeedZeroConfig, 'zero_optimization'),
        (DeepSpeedZeroOffloadOptimizerConfig, 'zero_optimization.offload_optimizer'),
        (DeepSpeedZeroOffloadParamConfig, 'zero_optimization.offload_param'),
    ],
)
def test_no_default_of_deepspeed_is_refused(model: Any, section: str):
    for name, field in model.model_fields.items():
        feature = PATHS.get(f'{section}.{name}')
        if feature is not None and feature.verdict == 'refused':
            assert not feature.asked_by(field.default), name


def test_what_passes_is_passed_on():
    ds_config = {
        'wall_clock_breakdown': True,
        'flops_profiler': {'enabled': True, 'profile_step': 2},
        'communication_data_type': 'bf16',
        'data_types': {'buffer_dtype': 'bf16'},
        'log_level': 'info',
        'steps_per_print': 10,
    }
    assert _problems(ds_config) == []
    throughput_is_off = {'timers': {'throughput': {'enabled': False}}}
    assert passed_on(Settings(2, None, None, ds_config)) == ds_config | throughput_is_off


def test_the_dump_needs_a_log_level():
    (problem,) = _problems({'dump_state': True, 'log_level': 'warning'})
    assert problem.startswith("ds_config.dump_state=True: DeepSpeed prints it at log level 'info'")
    assert _problems({'dump_state': True, 'log_level': 'debug'}) == []


def test_log_levels():
    (problem,) = _problems({'log_level': 'loud'})
    assert all(repr(level) in problem for level in log_levels)
    assert [_problems({'log_level': level}) for level in log_levels] == [[]] * len(log_levels)


@pytest.mark.parametrize('key', ['prescale_gradients', 'gradient_predivide_factor'])
def test_division_before_the_sum(key: str):
    assert _problems({key: 2.0}, 1) == []
    for stage in (2, 3):
        (problem,) = _problems({key: 2.0}, stage)
        assert 'reduce_scatter=False' in problem
        assert _problems({key: 2.0, 'zero_optimization': {'reduce_scatter': False}}, stage) == []


@pytest.mark.parametrize(
    ('key', 'value', 'stages'),
    [
        ('zero_hpz_partition_size', 2, (3,)),
        ('leaf_module', {'names': ['block']}, (3,)),
        ('enable_sanity_checks', True, (3,)),
        ('parameter_alignment', True, (1, 2)),
        ('compute_grad_norm', False, (1, 2)),
        ('use_multi_rank_bucket_allreduce', False, (1, 2)),
    ],
)
def test_stages_that_do_not_read_a_key(key: str, value: Any, stages: tuple[int, ...]):
    for stage in (1, 2, 3):
        problems = _problems({'zero_optimization': {key: value}}, stage)
        assert (problems == []) is (stage in stages)
        assert all(f'and this is ZeRO {stage}' in problem for problem in problems)
    assert (_problems({'zero_optimization': {key: value}}, 0) == []) is (1 in stages)


def test_with_and_without_offload():
    for key, with_offload in (('ignore_unused_parameters', True), ('compute_grad_norm', False)):
        ds_config = {'zero_optimization': {key: False}}
        assert (_problems(ds_config, 2, 'cpu') == []) is with_offload
        assert (_problems(ds_config, 2) == []) is not with_offload
    ds_config = {'bf16': {'enabled': True, 'immediate_grad_update': True}}
    assert _problems(ds_config, 1) == []
    assert _problems(ds_config, 1, 'cpu') != [] and _problems(ds_config, 2) != []


def test_what_zero_3_leaves_behind_in_a_process(monkeypatch: pytest.MonkeyPatch):
    efficient = {'zero_optimization': {'memory_efficient_linear': False}}
    flops = {'flops_profiler': {'enabled': True}}
    monkeypatch.setattr(torch.nn.functional, 'linear', torch._C._nn.linear)
    assert _problems(efficient, 3) == _problems(flops) == []
    monkeypatch.setattr(ds_features, '_linear_is_replaced', lambda: True)
    assert 'start a new process' in _problems(efficient, 3)[0] and 'counts twice' in _problems(flops)[0]


def test_groups_of_hpz_divide_the_ranks():
    hpz = {'zero_optimization': {'zero_hpz_partition_size': 3}}
    assert _with_trainer(hpz, 3, world_size=6) == _with_trainer(hpz, 3, world_size=2) == []
    (problem,) = _with_trainer(hpz, 3, world_size=4)
    assert '=3: 4 ranks cannot be divided' in problem


def test_flops_of_one_microbatch_only():
    flops = {'flops_profiler': {'enabled': True}}
    assert _with_trainer(flops, device_train_microbatch_size=8) == []
    (problem,) = _with_trainer(flops, device_train_microbatch_size=3)
    assert 'a batch has 3 microbatches' in problem


def test_norm_that_is_needed():
    no_norm = {'zero_optimization': {'compute_grad_norm': False}}
    assert _with_trainer(no_norm) == []
    (problem,) = _with_trainer({**no_norm, 'gradient_clipping': 1.0})
    assert 'ds_config.gradient_clipping disagree' in problem
    (problem,) = _with_trainer(no_norm, parts=(GradientClipping('norm', 0.5),))
    assert "GradientClipping('norm', 0.5) disagree" in problem
    assert _with_trainer(no_norm, precision='amp_bf16') == []
    assert 'bf16 weights and ZeRO 1' in _with_trainer(no_norm, 1, precision='amp_bf16')[0]


def test_data_types_agree_with_the_precision():
    for spelling in ('fp32', 'float', 'torch.float32'):
        assert _with_trainer({'data_types': {'param_dtype': spelling, 'grad_accum_dtype': spelling}}) == []
    both = {'data_types': {'param_dtype': 'bf16', 'grad_accum_dtype': 'bf16'}}
    assert _with_trainer(both, precision='amp_bf16') == []
    parameters, sums = _with_trainer(both)
    assert "param_dtype='bf16' disagrees" in parameters and 'the weights fp32' in parameters
    assert "grad_accum_dtype='bf16' would round" in sums


def test_the_page_says_the_same():
    rows = [row.split('|') for row in PAGE.read_text().splitlines() if row.startswith('| `')]
    told = {path: row[2].strip() for row in rows for path in re.findall(r'`([\w.]+)`', row[1])}
    assert told == {path: feature.verdict for path, feature in PATHS.items()}
    text = {path: row[3] for row in rows for path in re.findall(r'`([\w.]+)`', row[1])}
    for path, feature in PATHS.items():
        assert feature.reason in text[path] and feature.instead in text[path], path
