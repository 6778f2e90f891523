"""The rank processes that the tests of the recipes share, so that Composer and DeepSpeed are imported once per rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from composer_ds.testing import RankPool


@pytest.fixture(scope='session')
def two_ranks() -> Iterator[RankPool]:
    """Two ranks in one gloo group, as ``composer -n 2`` would start them."""
    with RankPool(world_size=2, timeout_sec=180) as pool:
        yield pool


@pytest.fixture(scope='session')
def one_rank() -> Iterator[RankPool]:
    """One process without launcher variables and without a process group."""
    with RankPool(world_size=1, timeout_sec=180) as pool:
        yield pool
