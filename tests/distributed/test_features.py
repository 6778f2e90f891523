"""What a ds_config asks for beyond ZeRO has its effect, and does not change the weights; refusals have their reason."""

from __future__ import annotations

import csv
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import feature_cases as cases
from tests.distributed.feature_cases import _CUT

TOLERANCE = 1e-6
_DIVIDED = [
    {'prescale_gradients': True},
    {'gradient_predivide_factor': 4.0},
    {'prescale_gradients': True, 'gradient_predivide_factor': 4.0},
]
_REDUCED: list[dict[str, Any]] = [{'contiguous_gradients': False}, {'reduce_scatter': False}]
_ZERO_1_AND_2 = [*_REDUCED, {'use_multi_rank_bucket_allreduce': False}, {'parameter_alignment': True}]
_ZERO_3 = [
    {'stage3_use_all_reduce_for_fetch_params': True},
    {'allgather_sequential': True},
    {'enable_sanity_checks': True, 'log_trace_cache_warnings': True},
]
_LEAF = {'leaf_module': {'names': ['block']}}
_GRANULAR = {'stage3_module_granularity_threshold': 20}


@pytest.mark.parametrize('offload', [None, 'cpu'])
@pytest.mark.parametrize('stage', [1, 2, 3])
def test_weights_stay_those_of_plain_composer(two_ranks, stage: int, offload: str | None):
    zero = [*_REDUCED, *({**one, **_CUT} for one in _ZERO_3)] if stage == 3 else _ZERO_1_AND_2
    if stage == 3 and offload:
        zero = [{'offload_param': {'device': 'cpu', 'pin_memory': True}, **_CUT}]
    elif offload is None and stage < 3:
        zero = [*zero, {'compute_grad_norm': False}]
    ds_configs = [{'zero_optimization': one} for one in zero]
    if offload is None:
        ds_configs += [{**one, 'zero_optimization': {'reduce_scatter': stage == 1}} for one in _DIVIDED]
    for rank in two_ranks.run(cases.differences, stage, offload, ds_configs, 'does-not-divide'):
        assert dict(zip(map(str, ds_configs), rank, strict=True)) == pytest.approx(
            dict.fromkeys(map(str, ds_configs), 0.0), abs=TOLERANCE
        )
    assert two_ranks.run(cases.least_move, 'does-not-divide')[0] > 1e-4


def test_modules_that_are_gathered_as_a_whole(two_ranks):
    ds_configs = [{'zero_optimization': {**one, **_CUT}} for one in (_LEAF, _GRANULAR)]
    for rank in two_ranks.run(cases.differences, 3, None, ds_configs, 'block'):
        assert rank == pytest.approx([0.0, 0.0], abs=TOLERANCE)
    for zero, found in ((_LEAF, ['Block']), (_GRANULAR, ['Block']), ({}, [])):
        assert two_ranks.run(cases.leaves, zero)[0] == found


@pytest.mark.parametrize('stage', [1, 3])
def test_communication_data_type_rounds_gradients(two_ranks, stage: int):
    ds_configs = [{'communication_data_type': 'bf16'}, {'communication_data_type': 'fp32'}]
    (rounded, exact), _ = two_ranks.run(cases.differences, stage, None, ds_configs, 'divides')
    assert exact < TOLERANCE
    assert 1e-5 < rounded < 5e-3  # gradients of size 1, lr 0.02, 3 batches, 8 bits


def test_hpz(two_ranks):
    halves, _ = two_ranks.run(cases.second_copies, 2)
    assert all(copy == (numel + 1) // 2 for numel, copy in halves)
    assert all(copy is None for _, copy in two_ranks.run(cases.second_copies, 1)[0])
    for rank in two_ranks.run(cases.hpz_differences, 2):
        assert rank == pytest.approx([0.0, 0.0], abs=TOLERANCE)
    for pending in (False, True):
        assert two_ranks.run(cases.hpz_loads, pending) == pytest.approx([0.0, 0.0], abs=TOLERANCE)


@pytest.mark.parametrize('stage', [1, 2])
def test_only_zero_1_and_2(two_ranks, stage: int):
    assert two_ranks.run(cases.gradient_norm, stage, False)[0] is None
    assert two_ranks.run(cases.gradient_norm, stage, True)[0] > 0
    assert 'were not used in producing loss' in two_ranks.run(cases.unused_parameters, stage)[0]
    assert two_ranks.run(cases.padded_elements, stage, True)[0] > two_ranks.run(cases.padded_elements, stage, False)[0]


def test_immediate_grad_update(two_ranks):
    (told, weights), (_, without) = (two_ranks.run(cases.immediate_gradients, on)[0] for on in (True, False))
    assert told
    assert all(weights[name].equal(value) for name, value in without.items())


def test_zero_3_alone(two_ranks, tmp_path: Path):
    assert two_ranks.run(cases.sanity_checks, True) == [True, True]
    assert two_ranks.run(cases.linear_while_training, True)[0].startswith('deepspeed')
    assert two_ranks.run(cases.linear_while_training, False)[0] == 'torch._C._nn'
    assert two_ranks.run(cases.saved_shapes, str(tmp_path), False) == [None, None]
    shapes, _ = two_ranks.run(cases.saved_shapes, str(tmp_path), True)
    assert shapes == {name: tuple(value.shape) for name, value in cases.WithBlock().state_dict().items()}
    for on in (True, False):
        zero = {'zero_optimization': {'log_trace_cache_warnings': on}}
        printed, _ = two_ranks.run(cases.output_of, 3, zero, 'sometimes', device_train_microbatch_size=2)[0]
        assert ('Invalidate trace cache' in printed) is on


def test_what_is_logged(two_ranks):
    ds_config = {'steps_per_print': 2, 'dump_state': True, 'vocabulary_size': 1001, 'log_level': 'info'}
    _, logged = two_ranks.run(cases.output_of, 2, ds_config, duration='5ba')[0]
    found = re.findall(r'step=(\d+), skipped=(\d+), lr=\[([\d.e-]+)\]', logged)
    rates = two_ranks.run(cases.learning_rates)[0]
    assert rates[3] > rates[1]
    assert [(int(step), int(skipped)) for step, skipped, _ in found] == [(0, 0), (2, 0), (4, 0)]
    assert [float(lr) for *_, lr in found] == [rates[0], rates[1], rates[3]]
    assert re.search(r'global_samples \.+ 0', logged)
    assert 'vocabulary size 1001 is not aligned' in logged
    assert 'SamplesPerSec' not in logged
    assert two_ranks.run(cases.log_level, 'error')[0] == logging.ERROR
    _, progress_alone = two_ranks.run(cases.output_of, 2, {'steps_per_print': 2}, duration='5ba')[0]
    assert [int(step) for step in re.findall(r'step=(\d+), skipped=0', progress_alone)] == [0, 2, 4]
    assert len(progress_alone.splitlines()) == 3


def test_what_is_printed(two_ranks):
    ds_config = {'wall_clock_breakdown': True, 'memory_breakdown': True}
    printed, _ = two_ranks.run(cases.output_of, 2, ds_config, 'slow', duration='1ba')[0]
    forward_ms = [float(found) for found in re.findall(r'fwd: ([\d.]+)', printed)]
    assert len(forward_ms) == 1
    # A batch of two microbatches.
    assert all(2000 * cases.Slow.PAUSE_SEC <= one < 20_000 * cases.Slow.PAUSE_SEC for one in forward_ms)
    assert printed.count('Engine before forward') == 2


@pytest.mark.parametrize('stage', [1, 2])
def test_flops_profiler(two_ranks, tmp_path: Path, stage: int):
    file = tmp_path / 'flops.txt'
    section = {'enabled': True, 'profile_step': 1, 'output_file': str(file)}
    two_ranks.run(cases.output_of, stage, {'flops_profiler': section}, 'divides', device_train_microbatch_size=4)
    assert _multiplications(file) == 4 * (6 * 13 + 13 * 7 + 7 * 2)


def _multiplications(file: Path) -> float:
    number, thousand = re.findall(r'fwd MACs per GPU: +([\d.]+) (K?)MACs', file.read_text())[0]
    return float(number) * (1000 if thousand else 1)


def test_disable_python_gc(two_ranks):
    assert two_ranks.run(cases.python_gc)[0] == [True, False, True]


# Each of these fails when DeepSpeed has become better: then the feature need not be refused any more.


@pytest.mark.parametrize('stage', [1, 2])
def test_refused_since_whole_weights_would_be_wrong(two_ranks, stage: int):
    found = two_ranks.run(cases.round_robin, stage)[0]
    assert found['trained'] < TOLERANCE
    assert found['saved'] > 0.1


def test_refused_since_flops_would_be_wrong(two_ranks, tmp_path: Path):
    file = tmp_path / 'flops.txt'
    section = {'enabled': True, 'profile_step': 1, 'output_file': str(file)}
    ds_config = {'flops_profiler': section}
    two_ranks.run(cases.output_without_refusal, 3, ds_config, case='divides', device_train_microbatch_size=4)
    assert _multiplications(file) == pytest.approx(2 * 4 * (6 * 13 + 13 * 7 + 7 * 2), rel=0.01)
    two_ranks.run(cases.output_without_refusal, 2, ds_config, case='divides', device_train_microbatch_size=3)
    assert _multiplications(file) == 1 * (6 * 13 + 13 * 7 + 7 * 2)  # of the second microbatch, which has one sample


def test_refused_since_latencies_would_be_wrong(two_ranks):
    noted = two_ranks.run(cases.communications, 2)[0]
    count, times_ms = noted['all_reduce'][4 * sum(p.numel() for p in cases.WithBlock().parameters())]
    assert count == 4  # two batches of two microbatches
    assert times_ms == sorted(times_ms)


def test_refused_since_the_axis_would_be_wrong(two_ranks, tmp_path: Path):
    section = {'enabled': True, 'output_path': str(tmp_path), 'job_name': 'run'}
    two_ranks.run(cases.output_without_refusal, 2, {'csv_monitor': section})
    files = list((tmp_path / 'run').iterdir())
    assert [file.name for file in files] == ['Train_Samples_lr.csv']
    with files[0].open() as file:
        assert [row['step'] for row in csv.DictReader(file)] == ['0', '0', '0']


def test_refused_since_it_is_not_read(two_ranks):
    assert two_ranks.run(cases.checkpointing_is_configured) == [False, False]
