"""Reading and writing partitions, against values put in and against DeepSpeed's own tools.

Fails when a new version of DeepSpeed lays its partitions out in another way than composer_ds/partitions.py reads them.
"""

from __future__ import annotations

import pytest

from tests.distributed import partition_cases
from tests.distributed.parity_cases import STAGES_AND_OFFLOAD


@pytest.mark.parametrize('world_size', [1, 2])
def test_whole_tensors_in_and_out(ranks, world_size: int):
    for strategy in STAGES_AND_OFFLOAD:
        ranks(world_size).run(partition_cases.constants_come_back, strategy)


@pytest.mark.parametrize('world_size', [1, 2])
def test_masters_and_moments_are_those_that_deepspeed_gathers(ranks, world_size: int):
    for strategy in STAGES_AND_OFFLOAD:
        for differences in ranks(world_size).run(partition_cases.as_deepspeed_reads_them, strategy):
            assert len(differences) == 3 * 6
            assert set(differences.values()) == {0.0}, (strategy, differences)
