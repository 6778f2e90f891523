"""A gradient that is infinite skips its optimizer step, and leaves nothing behind for the next ones."""

from __future__ import annotations

import pytest

from tests.distributed.skipped_cases import DTYPES, train_past_an_infinite_batch

TOLERANCE = 2e-5  # as in test_bf16.py
TESTED = ['zero1', 'zero1-cpu', 'zero2', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params']


@pytest.mark.parametrize('dtype', DTYPES)
def test_the_batches_after_an_infinite_one_train_as_ever(two_ranks, dtype: str):
    failures = []
    for strategy in TESTED:
        for result in two_ranks.run(train_past_an_infinite_batch, dtype, strategy):
            if result['difference'] > TOLERANCE or result['least_move'] < 1e-3 or result['skipped'] != 2:
                failures.append(f'{strategy}: {result}')
    assert not failures, '\n'.join(failures)
