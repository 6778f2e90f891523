"""The rank processes that all distributed tests share, so that Composer and DeepSpeed are imported once per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

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


@pytest.fixture
def s3() -> Iterator[str]:
    """The address of a server that speaks S3, with an empty bucket."""
    boto3, server = pytest.importorskip('boto3'), pytest.importorskip('moto.server')
    s3_server = server.ThreadedMotoServer(ip_address='127.0.0.1', port=0)
    s3_server.start()
    host, port = s3_server.get_host_and_port()
    url = f'http://{host}:{port}'
    # Servers of one process share what they hold.
    requests.post(f'{url}/moto-api/reset', timeout=10)
    client_of(boto3, url).create_bucket(Bucket='bucket')
    yield url
    s3_server.stop()


@pytest.fixture
def s3_client(s3: str) -> Any:
    """A client of that server."""
    return client_of(pytest.importorskip('boto3'), s3)


def client_of(boto3: Any, url: str) -> Any:
    """Make a client of a server."""
    return boto3.client(
        's3', endpoint_url=url, region_name='us-east-1', aws_access_key_id='a', aws_secret_access_key='b'
    )
