"""The proof: after several optimizer steps the weights are those of plain Composer.

Under SGD with momentum nothing hides a wrong scale of the gradients; AdamW is there for its state.
"""

from __future__ import annotations

import pytest

from composer_ds.testing import RankPool
from tests.distributed.parity_cases import CASES, SOME_STRATEGIES, STAGES_AND_OFFLOAD, STRATEGIES, compare

TOLERANCE = 1e-6


@pytest.mark.parametrize('case', CASES)
def test_weights_equal_plain_composer(two_ranks, case: str):
    _assert_equal(two_ranks, case, 'sgd', STAGES_AND_OFFLOAD)


@pytest.mark.slow
@pytest.mark.parametrize('case', ['does-not-divide', 'groups', 'sometimes', 'uneven'])
def test_other_buckets_and_weights_that_are_not_cut(two_ranks, case: str):
    _assert_equal(two_ranks, case, 'sgd', [name for name in STRATEGIES if name not in STAGES_AND_OFFLOAD])


@pytest.mark.parametrize('case', CASES)
def test_the_state_of_adamw(two_ranks, case: str):
    _assert_equal(two_ranks, case, 'adamw', ['zero1', 'zero2-cpu', 'zero3-cut-cpu-params'])


@pytest.mark.parametrize('case', CASES)
def test_one_rank(one_rank, case: str):
    _assert_equal(one_rank, case, 'sgd', SOME_STRATEGIES)


@pytest.mark.long
def test_four_ranks(four_ranks):
    for case in ('does-not-divide', 'sometimes'):
        _assert_equal(four_ranks, case, 'sgd', ['zero1-cpu', 'zero2', 'zero3-cut-cpu-params'])


@pytest.mark.parametrize('optimizer', ['sgd', 'adamw'])
def test_ranks_that_use_different_parameters(two_ranks, optimizer: str):
    _assert_equal(two_ranks, 'rank-dependent', optimizer, ['zero1', 'zero1-cpu'])


@pytest.mark.parametrize('optimizer', ['decoupled_sgdw', 'decoupled_adamw'])
def test_optimizers_of_composer(two_ranks, optimizer: str):
    _assert_equal(two_ranks, 'groups', optimizer, ['zero1', 'zero2-cpu', 'zero3-cut'])


def _assert_equal(pool: RankPool, case: str, optimizer: str, strategies: list[str]) -> None:
    failures = []
    for strategy in strategies:
        for rank, result in enumerate(pool.run(compare, case, optimizer, strategy)):
            if result['difference'] > TOLERANCE or result['least_move'] < 1e-4 or result['frozen_moved'] != 0.0:
                failures.append(f'{strategy}, rank {rank}: {result}')
    assert not failures, '\n'.join(failures)
