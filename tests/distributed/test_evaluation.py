"""Evaluation, prediction and generation where ranks have different work to do. The oracle is plain Composer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from composer_ds.testing import RankPool
from tests.distributed import evaluation_cases

STRATEGIES = ['zero2', 'zero3-cut', 'zero3-cut-cpu-params']


@pytest.fixture
def impatient_ranks(two_ranks: RankPool) -> Iterator[RankPool]:
    """Two ranks that are ended when they wait for each other."""
    two_ranks.run(evaluation_cases.imported)
    patience_sec, two_ranks.timeout_sec = two_ranks.timeout_sec, 50
    yield two_ranks
    two_ranks.timeout_sec = patience_sec


def test_ranks_with_other_batches_and_microbatches(impatient_ranks):
    oracle = impatient_ranks.run(evaluation_cases.evaluations, None)
    moved = [(oracle[0]['weights'][name] - value).abs().max() for name, value in oracle[0]['start'].items()]
    assert min(moved) > 1e-3
    samples = {name: value for name, value in oracle[0]['values'] if name.endswith('samples')}
    # Composer itself stops at the shortest rank; were it otherwise, the ranks of ZeRO 3 would need more help.
    assert samples == {
        'equal samples': 22, 'batches samples': 24, 'none samples': 0, 'microbatches samples': 16,
        'sampled samples': 11, 'subset samples': 16, 'later samples': 9,
    }  # fmt: skip
    # How often each rank ran the model. DistributedDataParallel gives the ranks the buffers of rank 0 more often than
    # this package, so rank 1 is compared between ZeRO stages.
    calls = [float(expected['weights'].pop('calls')) for expected in oracle]
    rank_1: set[float] = set()
    for strategy in STRATEGIES:
        ours = impatient_ranks.run(evaluation_cases.evaluations, strategy)
        assert float(ours[0]['weights'].pop('calls')) == calls[0], strategy
        rank_1.add(float(ours[1]['weights'].pop('calls')))
        for expected, found in zip(oracle, ours, strict=True):
            assert [name for name, _ in found['values']] == [name for name, _ in expected['values']]
            for (name, value), (_, other) in zip(found['values'], expected['values'], strict=True):
                assert value == pytest.approx(other, abs=1e-5, nan_ok=True), f'{strategy}: {name}'
            for key in ('weights', 'predictions', 'some', 'random'):
                torch.testing.assert_close(found[key], expected[key], rtol=0, atol=2e-6, msg=f'{strategy}: {key}')
    assert len(rank_1) == 1


def test_evaluation_after_an_error(impatient_ranks):
    oracle = impatient_ranks.run(evaluation_cases.evaluation_after_an_error, None)
    found = impatient_ranks.run(evaluation_cases.evaluation_after_an_error, 'zero3-cut')
    assert found == pytest.approx(oracle, abs=1e-6)


@pytest.mark.parametrize('strategy', ['zero3-cut', 'zero2'])
def test_evaluation_in_16_bits(impatient_ranks, strategy: str):
    for found, expected in impatient_ranks.run(evaluation_cases.bf16_evaluation, strategy):
        assert len(found) == 2 and found == pytest.approx(expected, abs=1e-4)
    impatient_ranks.run(evaluation_cases.bf16_generation, strategy)


@pytest.mark.parametrize('peft', [False, True])
def test_generation_that_ends_earlier_on_one_rank(impatient_ranks, peft: bool):
    oracle = impatient_ranks.run(evaluation_cases.generations, None, peft)
    lengths = [values['before'].shape[1] for values in oracle]
    assert lengths == [6, 10]
    for strategy in STRATEGIES[: 1 if peft else 3]:
        ours = impatient_ranks.run(evaluation_cases.generations, strategy, peft)
        for expected, found in zip(oracle, ours, strict=True):
            torch.testing.assert_close(found.pop('weights'), expected['weights'], rtol=0, atol=2e-6, msg=strategy)
            assert found.pop('table') == expected['table']
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=f'{strategy}: {name}')
