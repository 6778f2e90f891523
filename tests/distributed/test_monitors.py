"""Monitors against plain Composer, against sleeps, and against bytes counted by hand."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from composer_ds.callbacks import CommunicationMonitor, DeepSpeedMonitor, ZeroMemoryMonitor
from composer_ds.report.command import read_run
from tests.distributed import monitor_cases
from tests.distributed.parity_cases import CASES, STAGES_AND_OFFLOAD

BF16 = {'bf16': {'enabled': True}}
TRAINED, FROZEN = 64 * 96 + 96 * 32, 32 * 16


def _assert_norms(found: list[dict[str, float]], expected: list[dict[str, float]], clipping: float | None) -> None:
    assert len(found) == len(expected) == 5
    for ours, plain in zip(found, expected, strict=True):
        assert {key for key in ours if not key.startswith('gradient')} == plain.keys()
        for key, value in plain.items():
            assert ours[key] == pytest.approx(value, rel=2e-5, abs=1e-7), key
        if clipping is not None:
            factor = min(1.0, clipping / plain['l2_norm/grad/global'])
            assert ours['gradient/clip_factor'] == pytest.approx(factor, rel=1e-4)
            assert ours['gradient/clipped_fraction'] == 1.0 and factor < 0.5


@pytest.mark.parametrize('strategy', STAGES_AND_OFFLOAD)
def test_norms_of_every_parameter_on_two_ranks(two_ranks, strategy: str):
    """Clipped, with microbatches of unequal size; momentum and weight decay in the update."""
    clipping = CASES['clipped'].clipping
    expected = two_ranks.run(monitor_cases.per_layer, 'clipped', None, clipping=clipping)[0]
    for found in two_ranks.run(monitor_cases.per_layer, 'clipped', strategy, clipping=clipping):
        _assert_norms(found, expected, clipping)


@pytest.mark.parametrize('strategy', ['zero1-cpu', 'zero3-cut'])
def test_norms_of_parameters_that_are_not_always_used(two_ranks, strategy: str):
    expected = two_ranks.run(monitor_cases.per_layer, 'sometimes', None)[0]
    assert any(norms['l2_norm/grad/branches.1.weight'] == 0 for norms in expected)
    assert any(norms['l2_norm/grad/branches.1.weight'] > 0 for norms in expected)
    _assert_norms(two_ranks.run(monitor_cases.per_layer, 'sometimes', strategy)[0], expected, None)


@pytest.mark.parametrize('strategy', ['zero2', 'zero3-cut-cpu'])
def test_norms_on_one_rank(one_rank, strategy: str):
    (expected,) = one_rank.run(monitor_cases.per_layer, 'does-not-divide', None)
    (found,) = one_rank.run(monitor_cases.per_layer, 'does-not-divide', strategy)
    _assert_norms(found, expected, None)


@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
def test_norms_in_16_bits_and_in_windows_of_two_batches(two_ranks, dtype: str):
    """DeepSpeed takes the global norm itself, before it divides by the loss scale and clips."""
    for zero_stage in (1, 2, 3):
        settings = {'zero_stage': zero_stage, 'ds_config': {'gradient_accumulation_steps': 4}}
        calls = two_ranks.run(monitor_cases.keys, 'DeepSpeed', {'per_layer': True}, settings, 0.7, dtype)[0]
        # 3 batches: a window of two, and a short one of one, which ends with the fit.
        assert [(metrics['optimizer_steps/applied'], step) for step, metrics in calls] == [(1, 2), (2, 3)]
        for _, metrics in calls:
            gradients = [value for key, value in metrics.items() if key.startswith('l2_norm/grad/net')]
            assert len(gradients) == 6 and metrics['gradient/clip_factor'] < 0.5
            assert math.hypot(*gradients) == pytest.approx(metrics['l2_norm/grad/global'], rel=0.01)


def _table(monitor: type) -> dict[str, str]:
    """The keys of a docstring's table, with what they mean."""
    rows: dict[str, str] = {}
    for key, meaning in re.findall(r'^ *\| *(?:``(\S+)``)? *\| (.*?) *\|$', monitor.__doc__ or '', re.MULTILINE):
        name = key or next(reversed(rows), '')
        if name:
            rows[name] = f'{rows.get(name, "")} {meaning}'
    return rows


def _assert_keys(calls: list[tuple[int, dict[str, float]]], patterns: set[str]) -> None:
    assert calls and patterns
    for _, metrics in calls:
        matched = set()
        for key, value in metrics.items():
            alike = [one for one in patterns if re.fullmatch(re.sub(r'\{\w+\}', '.+', one), key)]
            assert alike, f'{key} is not in the table'
            matched.add(key if key in patterns else alike[0])
            assert isinstance(value, int | float) and math.isfinite(value), key
        assert matched == patterns


def test_exactly_the_keys_of_the_tables_are_logged(two_ranks, one_rank):
    table = _table(DeepSpeedMonitor)
    arguments: dict[str, Any] = {'per_layer': True, 'measure_reduction': True}
    calls = two_ranks.run(monitor_cases.keys, 'DeepSpeed', arguments, {'zero_stage': 2}, 0.7, 'fp16', True)[0]
    _assert_keys([call for call in calls if len(call[1]) > 5], set(table))
    (calls,) = one_rank.run(monitor_cases.keys, 'DeepSpeed', {'measure_reduction': False}, {'zero_stage': 1})
    always = {key for key, meaning in table.items() if 'Only' not in meaning}
    _assert_keys(calls, always - {key for key in table if key.endswith('{NAME}')})
    assert len(calls) == 3

    table = _table(CommunicationMonitor)
    _assert_keys(two_ranks.run(monitor_cases.keys, 'Communication', {'interval': 1}, {'zero_stage': 3})[0], set(table))
    always = {key for key, meaning in table.items() if 'Only' not in meaning}
    _assert_keys(one_rank.run(monitor_cases.keys, 'Communication', {'interval': 1}, {'zero_stage': 3})[0], always)

    table = _table(ZeroMemoryMonitor)
    on_a_cpu = {key for key, meaning in table.items() if 'Only on a GPU' not in meaning}
    _assert_keys(two_ranks.run(monitor_cases.keys, 'ZeroMemory', {}, {'zero_stage': 3})[0], on_a_cpu)
    always = {key for key, meaning in table.items() if 'Only' not in meaning}
    _assert_keys(one_rank.run(monitor_cases.keys, 'ZeroMemory', {}, {'zero_stage': 3})[0], always)


def test_times_and_throughput(two_ranks):
    """Each batch of 4 samples per rank in 2 microbatches; see Slow for the sleeps."""
    slept = {'forward': 0.03, 'backward': 0.04, 'optimizer': 0.025, 'data_wait': 0.04}
    for interval, steps in ((1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])):
        calls = two_ranks.run(monitor_cases.times, interval, True)[0]
        assert [step for step, _ in calls] == [metrics['optimizer_steps/applied'] for _, metrics in calls] == steps
        for number, (_, metrics) in enumerate(calls):
            split = {key: value for key, value in metrics.items() if key.startswith('time_split')}
            total = split.pop('time_split/total_sec')
            assert sum(split.values()) == pytest.approx(total)
            for phase, sec in slept.items():
                assert split[f'time_split/{phase}_sec'] >= 0.98 * sec, phase
            # Of the first log's batches the first has no checkpoint before it.
            checkpoints = (interval - (number == 0)) / interval
            assert split['time_split/checkpoint_sec'] >= 0.98 * 0.03 * checkpoints
            assert split['time_split/reduction_sec'] > 0
            assert metrics['speed/samples_per_optimizer_step'] == 8
            assert metrics['speed/tokens_per_optimizer_step'] == 24
            assert metrics['speed/samples_per_sec'] == pytest.approx(8 / total)
            assert metrics['speed/tokens_per_sec'] == pytest.approx(24 / total)
            assert metrics['speed/optimizer_steps_per_sec'] == pytest.approx(1 / total)


def test_skipped_optimizer_steps(two_ranks):
    # Batches 0, 2 and 3 of an epoch of 6 are infinite on one rank or both.
    calls = two_ranks.run(monitor_cases.skipped, {'zero_stage': 2}, 1, (2, 8, 13))[0]
    monitored = [metrics for _, metrics in calls if 'optimizer_steps/attempted' in metrics]
    skipped = [metrics for metrics in monitored if 'l2_norm/grad/global' not in metrics]
    applied = [metrics for metrics in monitored if 'l2_norm/grad/global' in metrics]
    assert [metrics['optimizer_steps/attempted'] for metrics in monitored] == list(range(1, 13))
    assert [metrics['optimizer_steps/attempted'] for metrics in skipped] == [1, 3, 4, 7, 9, 10]
    for metrics in skipped:
        names = ('applied', 'attempted', 'skipped', 'microbatches')
        assert metrics.keys() == {f'optimizer_steps/{name}' for name in names}
    assert [metrics['optimizer_steps/applied'] for metrics in applied] == [1, 2, 3, 4, 5, 6]
    assert [metrics['speed/samples_per_optimizer_step'] for metrics in applied] == [4.0] * 6
    for _, metrics in calls:
        assert all(math.isfinite(value) for value in metrics.values())
    # The gradient of each of the 4 weights is 1.
    assert [metrics['l2_norm/grad/weight'] for metrics in applied] == pytest.approx([2.0] * 6)
    sent = [metrics['communication/measured_bytes'] for _, metrics in calls if 'communication/ratio' in metrics]
    assert len(sent) == 6 and len(set(sent)) == 1, 'skipped optimizer steps are not counted with the next'


@pytest.mark.parametrize('strategy', ['zero1', 'zero2', 'zero3-cut'])
def test_unequal_batches(two_ranks, strategy: str):
    for calls in two_ranks.run(monitor_cases.uneven, strategy):
        applied = [metrics['optimizer_steps/applied'] for _, metrics in calls if 'l2_norm/grad/global' in metrics]
        assert applied == [1, 2, 3, 4]


def test_without_deepspeed(one_rank):
    for monitor in monitor_cases.MONITORS:
        (message,) = one_rank.run(monitor_cases.refusal, monitor)
        assert message.startswith(f'{monitor}Monitor') and 'algorithms=[DeepSpeed(...)]' in message


@pytest.mark.parametrize('zero_stage', [1, 2, 3])
@pytest.mark.parametrize('batches_per_step', [1, 2])
def test_bytes_that_are_sent(two_ranks, zero_stage: int, batches_per_step: int):
    """By hand: 3 microbatches in a batch, fp32, 2 ranks, so that each sends half a message around the ring."""
    nothing_kept = {'stage3_param_persistence_threshold': 0, 'stage3_max_live_parameters': 0,
                    'stage3_max_reuse_distance': 0, 'stage3_prefetch_bucket_size': 0}  # fmt: skip
    settings = {'zero_stage': zero_stage, 'ds_config': {'zero_optimization': nothing_kept if zero_stage == 3 else {}}}
    half, m = 4 / 2, 3 * batches_per_step
    reductions, gathered = {
        # DeepSpeed reduces by all-reduce in ZeRO 1 and 2, which sends twice as much as the paper's reduce-scatter.
        1: (1 * 2 * TRAINED, TRAINED),
        2: (m * 2 * TRAINED, TRAINED),
        3: (m * TRAINED, 2 * m * (TRAINED + FROZEN)),
    }[zero_stage]
    expected = {1: 2 * TRAINED, 2: (m + 1) * TRAINED, 3: 3 * m * TRAINED + 2 * m * FROZEN}[zero_stage]
    for found in two_ranks.run(monitor_cases.wide, 'Communication', settings, batches_per_step):
        # The norm and the test for infinities are a few numbers more.
        assert 0 <= found['communication/gradient_bytes'] - reductions * half < 200
        assert found['communication/weight_bytes'] == gathered * half
        assert found['communication/expected_bytes'] == expected * half
        assert found['communication/ratio'] == pytest.approx((reductions + gathered) / expected, rel=0.01)
        assert found['communication/reduction_sec'] > 0 and found['communication/gathering_sec'] > 0


@pytest.mark.parametrize('offload', [None, 'cpu'])
@pytest.mark.parametrize('zero_stage', [1, 2, 3])
@pytest.mark.parametrize('dtype', ['fp32', 'bf16'])
def test_bytes_that_are_held(two_ranks, zero_stage: int, offload: str | None, dtype: str):
    """By hand: two ranks, Adam, a model whose parameters two ranks divide."""
    ds_config = {'zero_optimization': {'stage3_param_persistence_threshold': 0}} | (BF16 if dtype == 'bf16' else {})
    settings = {'zero_stage': zero_stage, 'offload_optimizer': offload, 'ds_config': ds_config}
    width = 4 if dtype == 'fp32' else 2
    part = TRAINED // 2 * 4  # a rank's part of all trained parameters, in fp32
    of_ranks = two_ranks.run(monitor_cases.wide, 'ZeroMemory', settings)
    for rank, found in enumerate(of_ranks):
        assert found['zero_memory/weights'] == (TRAINED + FROZEN) * width // (2 if zero_stage == 3 else 1)
        assert found['zero_memory/model_buffers'] == 40
        assert found['zero_memory/master_weights'] == part
        # Two moments, and Adam's count of steps.
        assert 0 <= found['zero_memory/optimizer_state'] - 2 * part <= 8
        if zero_stage == 1:  # whole, added up in fp32; in bf16 without offload those of this microbatch, too
            gradients = TRAINED * 4 + (TRAINED * 2 if dtype == 'bf16' and not offload else 0)
        elif zero_stage == 2 and dtype == 'fp32':  # whole parameters: the first of two lies in both ranks' partitions
            gradients = 64 * 96 * 4 if rank == 0 else TRAINED * 4
        else:
            gradients = part
        # With offload the optimizer has an fp32 gradient in host memory besides.
        assert found['zero_memory/gradients'] == gradients + (part if offload else 0)
        kinds = ('weights', 'model_buffers', 'master_weights', 'optimizer_state', 'gradients', 'communication')
        assert found['zero_memory/total'] == sum(found[f'zero_memory/{kind}'] for kind in kinds)
        totals = [one['zero_memory/total'] for one in of_ranks]
        assert [found[f'zero_memory/total/rank{other}'] for other in range(2)] == totals
        assert [found[f'zero_memory/total/{which}'] for which in ('lowest', 'highest')] == sorted(totals)
        assert found['zero_memory/predicted/optimizer'] == 3 * part
        assert found['zero_memory/ratio/optimizer'] == pytest.approx(1, abs=0.001)
        assert found['zero_memory/ratio/total'] <= 1.001, 'an upper bound'
        if zero_stage < 3:
            assert found['zero_memory/ratio/weights'] == 1


def test_every_logger_gets_the_plan(one_rank, tmp_path):
    file = tmp_path / 'logs-rank0.txt'
    ((plan, logged),) = one_rank.run(monitor_cases.record, str(file))
    assert plan['zero_stage'] == 2 and plan['decisions']
    assert logged['deepspeed_plan'] == plan
    assert logged['deepspeed_environment']['world_size'] == 1
    assert read_run(file).config['deepspeed_plan'] == plan
