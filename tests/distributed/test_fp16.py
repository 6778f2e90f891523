"""fp16: the loss scale, overflow and skipped optimizer steps, against a loop written by hand.

Inputs, weights and gradients of the network are such that a scale of 2^8 is safe and one of 2^20 overflows fp16
(65504).
"""

from __future__ import annotations

import itertools

import pytest

from tests.distributed.fp16_cases import compare_fp16, resume_fp16
from tests.distributed.parity_cases import STAGES_AND_OFFLOAD

TOLERANCE = 2e-5  # as in test_bf16.py; fp16 rounds at 2^-11


@pytest.mark.parametrize(
    ('world_size', 'strategy'), [*((2, one) for one in STAGES_AND_OFFLOAD), (1, 'zero2'), (1, 'zero3-cut-cpu-params')]
)
def test_fp16_equals_training_by_hand(ranks, world_size: int, strategy: str):
    for result in ranks(world_size).run(compare_fp16, strategy, 8):
        assert result['difference'] < TOLERANCE, result
        assert result['least_move'] > 1e-2
        assert result['skipped'] == 0 and set(result['scales']) == {256.0}


@pytest.mark.parametrize('strategy', ['zero1', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params'])
def test_overflow_skips_the_optimizer_step_and_halves_the_scale(two_ranks, strategy: str):
    for result in two_ranks.run(compare_fp16, strategy, 16):
        scales = result['scales']
        assert scales == result['expected_scales'], 'overflow must be found where the loop by hand finds it'
        overflowed = [after < before for before, after in itertools.pairwise(scales)]
        assert 1 <= sum(overflowed) == result['skipped'] < len(overflowed)
        assert [move == 0.0 for move in result['moves'][:-1]] == overflowed, 'only skipped batches leave the weights'
        assert result['difference'] < TOLERANCE and result['least_move'] > 1e-3, result


@pytest.mark.parametrize('strategy', ['zero1', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params'])
def test_the_scale_grows_between_optimizer_steps(two_ranks, strategy: str):
    for result in two_ranks.run(compare_fp16, strategy, 6, 1):
        assert result['scales'] == result['expected_scales'] == [64.0, 64.0, 128.0, 256.0]
        assert result['skipped'] == 0 and result['difference'] < TOLERANCE, result


@pytest.mark.parametrize(('first', 'then'), [('zero1', 'zero3-cut'), ('zero3-cut-cpu-params', 'zero2-cpu')])
def test_the_loss_scale_is_part_of_the_checkpoint(two_ranks, tmp_path, first: str, then: str):
    for result in two_ranks.run(resume_fp16, first, then, str(tmp_path)):
        assert result['scales'] == result['expected_scales'] and len(set(result['scales'])) > 1
        assert result['difference'] < TOLERANCE
        assert result['torch_scale'] == result['scales'][-1], "torch's own scaler must read the state"
