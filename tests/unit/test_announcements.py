"""The batch arithmetic, by hand."""

from __future__ import annotations

import pytest

from composer_ds.announcements import describe_batch


@pytest.mark.parametrize(
    ('microbatch_size', 'batch_sizes', 'text'),
    [
        (4, [32, 32], 'microbatch 4 x accumulation 8 x world size 2 = global batch 64'),
        (8, [8], 'microbatch 8 x accumulation 1 x world size 1 = global batch 8'),
        (16, [8, 8], 'microbatch 8 x accumulation 1 x world size 2 = global batch 16'),
        (3, [8, 8], '(2 microbatches of 3 + 1 of 2 = batch 8) x world size 2 = global batch 16'),
        (3, [4], '(1 microbatch of 3 + 1 of 1 = batch 4) x world size 1 = global batch 4'),
        (2, [4, 6], 'microbatch 2; batches of the ranks 4 + 6 = global batch 10'),
        (2, [None, None], 'microbatch 2 x world size 2; the dataloader does not say its batch size'),
    ],
)
def test_describe_batch(microbatch_size, batch_sizes, text):
    assert describe_batch(microbatch_size, batch_sizes) == text
