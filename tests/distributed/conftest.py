"""The rank processes that all distributed tests share, so that Composer and DeepSpeed are imported once per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from composer_ds.testing import RankPool


@pytest.fixture(scope='session')
def two_ranks() -> Iterator[RankPool]:
    """Two ranks in one gloo group, as ``composer -n 2`` would start them."""
    with RankPool(world_size=2, timeout_sec=300) as pool:
        yield pool


@pytest.fixture(scope='session')
def one_rank() -> Iterator[RankPool]:
    """One process without launcher variables and without a process group."""
    with RankPool(world_size=1, timeout_sec=300) as pool:
        yield pool


@pytest.fixture
def four_ranks() -> Iterator[RankPool]:
    """Four ranks; ended after the test, since four processes with DeepSpeed take 3 GB."""
    with RankPool(world_size=4, timeout_sec=300) as pool:
        yield pool


@pytest.fixture(scope='session')
def ranks(request: pytest.FixtureRequest) -> Callable[[int], RankPool]:
    """The pool of a given world size, for tests that are parametrised over it."""
    return lambda world_size: request.getfixturevalue({1: 'one_rank', 2: 'two_ranks'}[world_size])
