"""Optimizer steps, learning rates and windows of several batches. The oracle is plain Composer, or a hand's count."""

from __future__ import annotations

import pytest

from tests.distributed import clock_cases

TOLERANCE = 1e-6
SOME = ['zero1', 'zero2-cpu', 'zero3-cut']


@pytest.mark.parametrize('schedule', clock_cases.SCHEDULES)
def test_learning_rates_are_those_of_plain_composer(two_ranks, schedule: str):
    expected = two_ranks.run(clock_cases.learning_rates, schedule, None)[0]['rates']
    assert len(set(expected)) > 1, 'the schedule must move'
    for found in two_ranks.run(clock_cases.learning_rates, schedule, {'zero_stage': 2}):
        assert found['rates'] == pytest.approx(expected, abs=TOLERANCE)
        assert found['counts']['applied'] == len(expected) == 12
        # The event comes after the update, and before the schedule moves.
        assert [one['lr'] for one in found['updates']] == pytest.approx(expected, abs=TOLERANCE)
        weights = [-sum(expected[: count + 1]) for count in range(12)]
        assert [one['weight'] for one in found['updates']] == pytest.approx(weights, abs=1e-5)


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


@pytest.mark.parametrize('zero_stage', [1, 3])
def test_too_many_skipped_optimizer_steps_end_training_on_every_rank(two_ranks, tmp_path, zero_stage: int):
    settings = {'zero_stage': zero_stage, 'max_consecutive_skipped_steps': 3}
    # Batches 2 and 3 are skipped and forgiven; 5, 6 and 7 are too many.
    for found in two_ranks.run(clock_cases.give_up, settings, str(tmp_path), (2, 3, 5, 6, 7, 8)):
        assert '3 optimizer steps in a row' in found['message'] and 'max_consecutive_skipped_steps' in found['message']
        assert (found['counts']['applied'], found['counts']['skipped']) == (3, 5)
        assert found['metric'] == [1, 2, 3, 4, 5]
        assert found['weights'].tolist() == found['checkpoint'].tolist() == [-3.0] * 4


def test_no_limit_on_skipped_optimizer_steps(one_rank, tmp_path):
    settings = {'zero_stage': 2, 'max_consecutive_skipped_steps': None}
    (found,) = one_rank.run(clock_cases.give_up, settings, str(tmp_path), tuple(range(1, 12)))
    assert found['message'] == '' and found['counts']['consecutive_skipped'] == 11


def test_a_loss_scale_that_has_reached_its_floor(two_ranks, tmp_path):
    section = {'enabled': True, 'initial_scale_power': 2, 'min_loss_scale': 1, 'hysteresis': 1}
    for found in two_ranks.run(
        clock_cases.give_up_in_fp16, {'zero_stage': 2, 'ds_config': {'fp16': section}}, str(tmp_path), (1, 2, 3, 4, 5)
    ):
        # 4, 2 and 1 overflow.
        assert 'smallest loss scale, 1.0' in found['message'] and found['scale'] == 1.0
        assert found['counts']['skipped'] == 3 and found['checkpoint'].tolist() == [-1.0] * 4


def test_tuples_of_losses_train_metrics_and_an_evaluation_of_ones_own(two_ranks):
    expected, _ = two_ranks.run(clock_cases.losses_and_metrics, None)
    assert {'loss/train/loss0', 'loss/train/loss1', 'loss/train/total', 'metrics/eval/MeanSquaredError'} < set(expected)
    assert len(set(expected['metrics/train/MeanSquaredError'])) == 4
    for strategy in SOME:
        for found in two_ranks.run(clock_cases.losses_and_metrics, strategy):
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                assert found[name] == pytest.approx(values, rel=1e-5), (strategy, name)
