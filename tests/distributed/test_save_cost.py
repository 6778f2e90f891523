"""What a save costs in memory. Time is measured by ``make benchmark``, where nothing else runs."""

from __future__ import annotations

import pytest

from tests.benchmarks import saving_cases
from tests.distributed.parity_cases import STRATEGIES

pytestmark = pytest.mark.slow
LAYERS, WIDTH = 10, 1536
LARGEST_BYTES = 4 * WIDTH * WIDTH
STATE_BYTES = 3 * LAYERS * LARGEST_BYTES
SLACK_BYTES = 64 * 2**20


@pytest.mark.parametrize('strategy', ['zero2-cpu', 'zero3'])
def test_no_rank_holds_the_state_while_it_is_saved(two_ranks, tmp_path, strategy: str):
    assert STATE_BYTES > 3 * (SLACK_BYTES + LARGEST_BYTES), 'or else the test could not fail'
    path = str(tmp_path / 'checkpoint.pt')
    arguments = (STRATEGIES[strategy], path, LAYERS, WIDTH)
    for rank, found in enumerate(two_ranks.run(saving_cases.save, *arguments)):
        assert found['file_bytes'] > STATE_BYTES
        assert found['peak_bytes'] < SLACK_BYTES + LARGEST_BYTES, f'rank {rank}, streamed'
    # Through Composer's own writer rank 0 holds the whole state, and nobody else does.
    first, second = two_ranks.run(saving_cases.save, *arguments, by_composer=True)
    assert STATE_BYTES / 2 < first['peak_bytes'] < STATE_BYTES + SLACK_BYTES
    assert second['peak_bytes'] < SLACK_BYTES + LARGEST_BYTES


def test_loading_holds_the_file_and_this_ranks_partition(two_ranks, tmp_path):
    path = str(tmp_path / 'checkpoint.pt')
    two_ranks.run(saving_cases.save, STRATEGIES['zero2'], path, LAYERS, WIDTH)
    for found in two_ranks.run(saving_cases.load, STRATEGIES['zero2'], path, LAYERS, WIDTH):
        # What Composer has read, and this rank's half of the moments, which did not exist before.
        assert found['peak_bytes'] < found['built_bytes'] + STATE_BYTES + STATE_BYTES / 3 + SLACK_BYTES


@pytest.mark.parametrize('strategy', ['zero2', 'zero3'])
def test_no_rank_holds_more_than_its_partitions_of_a_sharded_checkpoint(two_ranks, tmp_path, strategy: str):
    arguments = (STRATEGIES[strategy], str(tmp_path), LAYERS, WIDTH)
    for found in two_ranks.run(saving_cases.save_sharded, *arguments):
        assert found['file_bytes'] > STATE_BYTES
        assert found['peak_bytes'] < SLACK_BYTES + LARGEST_BYTES
    for found in two_ranks.run(saving_cases.load_sharded, *arguments):
        # This rank's half of the moments, which did not exist before. What building alone takes varies, as memory is
        # used again or not.
        limit_bytes = found['built_bytes'] + STATE_BYTES / 3 + 2 * SLACK_BYTES
        assert limit_bytes < found['built_bytes'] + STATE_BYTES, 'or else the test could not fail'
        assert found['peak_bytes'] < limit_bytes
