"""Optimizer steps, learning rates and windows of several batches. The oracle is plain Composer, or a hand's count."""

from __future__ import annotations

import pytest

from tests.distributed import clock_cases
from tests.distributed.parity_cases import STRATEGIES

TOLERANCE = 1e-6
SOME = ['zero1', 'zero2-cpu', 'zero3-cut']


@pytest.mark.parametrize('schedule', clock_cases.SCHEDULES)
def test_learning_rates_are_those_of_plain_composer(two_ranks, schedule: str):
    expected = two_ranks.run(clock_cases.learning_rates, schedule, None)[0]['rates']
    assert len(set(expected)) > 1, 'the schedule must move'
    for found in two_ranks.run(clock_cases.learning_rates, schedule, {'zero_stage': 2}):
        assert found['rates'] == pytest.approx(expected, abs=TOLERANCE)
        assert found['counts']['applied'] == len(expected) == 12


def test_warmup_from_0_leaves_the_weights_at_the_first_update(one_rank):
    (found,) = one_rank.run(clock_cases.learning_rates, 'warmup in ba', {'zero_stage': 1})
    # Composer moves the schedule before it counts the batch, so the second update has the first's rate again.
    assert found['rates'][:5] == pytest.approx([0, 0, 1 / 3, 2 / 3, 1.0], abs=TOLERANCE)


@pytest.mark.parametrize('schedule', ['warmup in ba', 'torch per batch'])
def test_schedules_given_to_fit(one_rank, schedule: str):
    (expected,) = one_rank.run(clock_cases.learning_rates, schedule, None, by='fit')
    (found,) = one_rank.run(clock_cases.learning_rates, schedule, {'zero_stage': 3}, by='fit')
    assert found['rates'] == pytest.approx(expected['rates'], abs=TOLERANCE)


def test_a_schedule_that_is_stretched(one_rank):
    arguments = {'scale_schedule_ratio': 0.5, 'duration': '4ep'}
    (expected,) = one_rank.run(clock_cases.learning_rates, 'warmup in dur', None, **arguments)
    (found,) = one_rank.run(clock_cases.learning_rates, 'warmup in dur', {'zero_stage': 1}, **arguments)
    assert found['rates'] == pytest.approx(expected['rates'], abs=TOLERANCE) and len(found['rates']) == 12


@pytest.mark.parametrize('schedule', ['warmup in ba', 'two of them', 'torch per batch', 'torch sequence'])
def test_schedules_hold_while_optimizer_steps_are_skipped(one_rank, schedule: str):
    (plain,) = one_rank.run(clock_cases.learning_rates, schedule, {'zero_stage': 2})
    (found,) = one_rank.run(clock_cases.learning_rates, schedule, {'zero_stage': 2}, infinite=(2, 3, 9))
    # Batches 1 and 4 of each epoch are skipped; the rates of the others follow each other as if nothing were.
    skipped = [1, 4, 7, 10]
    assert [found['rates'][batch] for batch in skipped] == [0, 0, 0, 0]
    applied = [rate for batch, rate in enumerate(found['rates']) if batch not in skipped]
    assert applied == pytest.approx(plain['rates'][:8], abs=TOLERANCE)
    assert found['counts'] | {'microbatches': 0} == {
        'attempted': 12, 'applied': 8, 'skipped': 4, 'consecutive_skipped': 0, 'in_schedule': 8, 'microbatches': 0,
    }  # fmt: skip
    assert [one['applied'] for one in found['updates']] == list(range(1, 9)), 'the event is for applied ones only'


def test_counts_and_schedule_go_on_after_a_checkpoint(two_ranks, tmp_path):
    folder = str(tmp_path)
    infinite = {'infinite': (4, 5, 6, 7)}  # batch 1 of each epoch, on both ranks
    for schedule in ('warmup in ba', 'torch sequence'):
        whole, _ = two_ranks.run(clock_cases.learning_rates, schedule, {'zero_stage': 2}, **infinite)
        two_ranks.run(
            clock_cases.learning_rates, schedule, {'zero_stage': 1}, save=f'{folder}/{schedule}', **infinite,
            stop_after=5,
        )  # fmt: skip
        rest, _ = two_ranks.run(
            clock_cases.learning_rates, schedule, {'zero_stage': 3}, load=f'{folder}/{schedule}/latest-rank0.pt',
            **infinite,
        )  # fmt: skip
        assert rest['rates'] == pytest.approx(whole['rates'][5:], abs=TOLERANCE)
        assert rest['counts'] == whole['counts']


@pytest.mark.parametrize('batches', [2, 4])
@pytest.mark.parametrize('world_size', [1, 2])
def test_several_batches_in_one_optimizer_step(ranks, world_size: int, batches: int):
    (expected, *_) = ranks(world_size).run(clock_cases.windows, None, batches)
    failures = []
    for strategy in STRATEGIES:
        for found in ranks(world_size).run(clock_cases.windows, strategy, batches):
            difference = max(
                float((value - expected['weights'][name]).abs().max()) for name, value in found['weights'].items()
            )
            if difference > TOLERANCE:
                failures.append(f'{strategy}: {difference}')
            # 10 batches of 2 in two epochs; the last window is short where 4 do not divide 10.
            updates = -(-10 // batches)
            assert [one['applied'] for one in found['updates']] == list(range(1, updates + 1))
            assert found['batches'] == 10, "Composer's own clock counts batches"
            assert found['order'] == ['algorithm', 'callback'] * updates
    assert not failures, '\n'.join(failures)
    moved = {name: float((expected['weights'][name] - value).abs().max()) for name, value in expected['before'].items()}
    assert min(moved.values()) > 1e-4
