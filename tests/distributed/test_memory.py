"""The prediction of `composer_ds.memory` against what real engines hold, found among the live tensors of the ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.memory_cases import measured_and_predicted

TOLERANCE = 0.02

WAYS = [(1, None, None), (1, 'cpu', None), (2, None, None), (2, 'cpu', None),
        (3, None, None), (3, None, 'cpu'), (3, 'cpu', None), (3, 'cpu', 'cpu')]  # fmt: skip


@pytest.mark.parametrize('dtype', [pytest.param('fp32', marks=pytest.mark.slow), 'bf16'])
@pytest.mark.parametrize(
    ('world_size', 'model', 'optimizer'),
    [(1, 'odd', 'momentum'), pytest.param(2, 'large', 'adamw', marks=pytest.mark.slow)],
)
def test_every_stage_and_offload(ranks, world_size: int, model: str, optimizer: str, dtype: str):
    ds_config = {'bf16': {'enabled': True}} if dtype == 'bf16' else {}
    _assert_close(ranks(world_size), model, optimizer, [(*way, ds_config) for way in WAYS])


def test_other_buckets(two_ranks):
    """A bucket that is filled several times, two buckets, another dtype of accumulation, no state, sub-groups."""
    small = {'reduce_bucket_size': 170_000}
    bf16 = {'bf16': {'enabled': True}, 'data_types': {'grad_accum_dtype': 'bf16'}}
    cut = {'stage3_param_persistence_threshold': 1000, 'sub_group_size': 100_000}
    _assert_close(
        two_ranks,
        'large',
        'sgd',
        [
            (1, None, None, {'zero_optimization': small}),
            (2, None, None, {'zero_optimization': {'overlap_comm': True}}),
            (3, 'cpu', None, {'zero_optimization': cut}),
            (1, None, None, bf16),
            (2, 'cpu', None, bf16),
        ],
    )


def _assert_close(pool: Any, model: str, optimizer: str, cases: list[tuple]) -> None:
    wrong = []
    for stage, offload_optimizer, offload_param, ds_config in cases:
        settings = {
            'zero_stage': stage,
            'offload_optimizer': offload_optimizer,
            'offload_param': offload_param,
            'ds_config': ds_config,
        }
        results = pool.run(measured_and_predicted, model, optimizer, settings)
        measured, predicted = max(one for one, _ in results), results[0][1]
        assert measured > 0
        if abs(predicted / measured - 1) > TOLERANCE:
            wrong.append(f'{settings}: predicted {predicted:,} bytes, measured {measured:,}')
    assert not wrong, '\n'.join(wrong)
