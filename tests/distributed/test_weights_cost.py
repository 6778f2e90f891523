"""What an export of weights costs in memory. Time is measured by tests/benchmarks/weights.py."""

from __future__ import annotations

import pytest

from composer_ds.checkpoint.exported_weights import PART_BYTES
from tests.benchmarks import weights_cases

SLACK_BYTES = 40 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(('layers', 'width'), [(40, 1024), (2, 5120)])
def test_no_rank_holds_the_weights_while_they_are_exported(two_ranks, tmp_path, layers: int, width: int):
    weights_bytes = 4 * layers * width * width
    limit_bytes = 2 * PART_BYTES + SLACK_BYTES
    assert weights_bytes > 150 * 2**20 > 2 * limit_bytes, 'or else the test could not fail'
    ways = ['ConsolidatedWeightsSaver', 'gather everything, torch.save']
    found = two_ranks.run(weights_cases.measure, str(tmp_path), layers, width, 0, ways)
    for rank, measured in enumerate(found):
        # Also where a single tensor is larger than the limit.
        assert measured[ways[0]]['peak_bytes'] < limit_bytes, rank
        assert measured[ways[1]]['peak_bytes'] > weights_bytes * 0.9, 'the measurement sees nothing'
