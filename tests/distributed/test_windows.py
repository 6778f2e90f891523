"""Gradient accumulation over 64 microbatches or batches, as in the bug report, and by tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import window_cases
from tests.distributed.window_cases import ACCUMULATION, LR, UPDATES

TOLERANCE = 1e-6


@pytest.fixture(scope='module', params=[1, pytest.param(2, marks=pytest.mark.slow)])
def accumulated(request: pytest.FixtureRequest, ranks) -> dict[str, dict[str, Any]]:
    """What each way of accumulating gave on rank 0; the others agree."""
    pool = ranks(request.param)
    found = {how: pool.run(window_cases.accumulate_64, how) for how in ('plain', 'window', 'microbatches')}
    for every_rank in found.values():
        for one in every_rank[1:]:
            assert _difference(one, every_rank[0]) == 0.0
    return {how: every_rank[0] for how, every_rank in found.items()}


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(float((value - expected['weights'][name]).abs().max()) for name, value in found['weights'].items())


def test_updates_are_made_once_per_64_batches_not_per_64_times_64(accumulated):
    found = accumulated['window']
    assert [one['applied'] for one in found['updates']] == [1, 2, 3, 4]
    assert [one['microbatches'] for one in found['updates']] == [64, 128, 192, 256]
    assert found['counts']['applied'] == UPDATES and found['batches'] == ACCUMULATION * UPDATES
    assert _difference(found, accumulated['plain']) < TOLERANCE


def test_offloaded_gradients_of_all_microbatches_count_not_the_last_alone(accumulated):
    found, expected = accumulated['microbatches'], accumulated['plain']
    assert _difference(found, expected) < TOLERANCE
    moved = [float((expected['weights'][name] - value).abs().max()) for name, value in expected['before'].items()]
    assert min(moved) > 1e-5, 'even the smallest gradient must show'


def test_the_schedule_moves_once_per_optimizer_step_and_the_progress_bar_counts_batches(accumulated):
    # Composer shows the first rate twice; then one thousandth of a warm-up over 1000 optimizer steps each.
    rates = [one['lr'] for one in accumulated['window']['updates']]
    assert rates == pytest.approx([0.0, 0.0, LR / 1000, 2 * LR / 1000], abs=1e-12)
    assert rates == [one['lr'] for one in accumulated['microbatches']['updates']]
    assert accumulated['window']['lr'] == accumulated['plain']['lr'] == accumulated['microbatches']['lr']
    assert [one['batch'] for one in accumulated['window']['updates']] == [63, 127, 191, 255]
    assert accumulated['plain']['batches'] == accumulated['microbatches']['batches'] == UPDATES


@pytest.mark.parametrize('batches', [1, 2, 4])
@pytest.mark.parametrize('world_size', [1, 2])
def test_every_token_of_an_optimizer_step_weighs_alike(ranks, world_size: int, batches: int):
    # 6 batches of each rank; 4 do not divide them, so the last window is short.
    for strategy in ('zero1', 'zero2-cpu', 'zero3-cut'):
        for found in ranks(world_size).run(window_cases.tokens, strategy, batches):
            assert found['difference'] < TOLERANCE and found['least_move'] > 1e-3, (strategy, found)


def test_the_mean_of_means_would_be_seen(one_rank):
    (found,) = one_rank.run(window_cases.tokens, 'zero1', 2, on_tokens=False)
    assert found['difference'] > 1e-3
