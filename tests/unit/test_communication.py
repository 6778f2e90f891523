"""Volumes by hand: ZeRO's paper (arXiv:1910.02054, section 7) and rings of ranks."""

from __future__ import annotations

import pytest

from composer_ds.communication import COLLECTIVES, expected_bytes, sent_bytes
from composer_ds.memory_plan import MemoryPlan

PARAMETERS = 1_000_000


@pytest.mark.parametrize(('zero_stage', 'times_parameters'), [(1, 2), (2, 2), (3, 3)])
def test_the_paper(zero_stage: int, times_parameters: int):
    """One microbatch, 16 bits, so many ranks that the ring's factor is 1: 2Ψ, 2Ψ and 3Ψ elements."""
    plan = MemoryPlan(zero_stage, world_size=10**9, weights='bf16', communication='bf16')
    assert sum(expected_bytes(plan, PARAMETERS, 0, 1)) == pytest.approx(times_parameters * 2 * PARAMETERS)


@pytest.mark.parametrize(('zero_stage', 'gradients', 'weights'), [(1, 1, 1), (2, 5, 1), (3, 5, 10)])
def test_five_microbatches_on_four_ranks(zero_stage: int, gradients: int, weights: int):
    plan = MemoryPlan(zero_stage, world_size=4, weights='bf16', communication='fp32')
    frozen = 8000 if zero_stage == 3 else 0  # gathered, never reduced
    expected = (gradients * PARAMETERS * 4 * 3 / 4, weights * (PARAMETERS + frozen) * 2 * 3 / 4)
    assert expected_bytes(plan, PARAMETERS, 8000, 5) == pytest.approx(expected)


def test_one_rank_sends_nothing():
    for stage in (1, 2, 3):
        assert expected_bytes(MemoryPlan(stage, world_size=1), PARAMETERS, 5, 3) == (0, 0)
    assert all(sent_bytes(collective, 1000, 1) == 0 for collective in COLLECTIVES)


def test_rings():
    """On 4 ranks. A message is a rank's own part in a gather, and everything in the others."""
    assert sent_bytes('all_gather_into_tensor', 100, 4) == sent_bytes('all_gather', 100, 4) == 300
    assert sent_bytes('reduce_scatter_tensor', 400, 4) == sent_bytes('reduce_scatter', 400, 4) == 300
    assert sent_bytes('all_reduce', 400, 4) == 600, 'a reduce-scatter and an all-gather'
