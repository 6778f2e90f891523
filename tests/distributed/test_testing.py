"""RankPool and run_on_ranks: results, failures of every kind, time limits, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed

from composer_ds.testing import LAUNCHER_VARIABLES, RankPool, RanksFailed, run_on_ranks

pytestmark = pytest.mark.timeout(120)

CALLS = 0


def rank_and_arguments(first, *, second):
    return int(os.environ['RANK']), first, second


def sum_over_ranks(value):
    total = torch.tensor([value * (torch.distributed.get_rank() + 1)])
    torch.distributed.all_reduce(total)
    return total


def rank_of_composer():
    from composer.utils import dist

    dist.initialize_dist('cpu')
    return dist.get_global_rank(), dist.get_local_rank(), dist.get_world_size(), dist.get_local_world_size()


def launcher_variables():
    seen = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}
    return seen, os.environ['DS_ACCELERATOR'], torch.distributed.is_initialized()


def pid_and_calls():
    global CALLS
    CALLS += 1
    return os.getpid(), CALLS


def raise_on_rank_1_while_rank_0_waits():
    if torch.distributed.get_rank() == 1:
        raise LookupError('no such thing on rank 1')
    torch.distributed.barrier()


def raise_everywhere(message):
    raise LookupError(message)


def hang_on_rank_0():
    if torch.distributed.get_rank() == 0:
        threading.Event().wait()  # the stuck line


def end_rank_1(how):
    if torch.distributed.get_rank() == 1:
        if how == 'exit':
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def unpicklable():
    return {'lock': threading.Lock()}


def collective_on_rank_0_only():
    if torch.distributed.get_rank() == 0:
        torch.distributed.all_reduce(torch.zeros(1), async_op=True)


def exists(pid):
    return Path(f'/proc/{pid}').exists()


class StubbornError(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, number, *, reason):
        super().__init__(f'{number} {reason}')


def raise_stubborn():
    raise StubbornError(7, reason='because')


def test_results_come_in_rank_order(two_ranks):
    assert two_ranks.run(rank_and_arguments, 'a', second=[1]) == [(0, 'a', [1]), (1, 'a', [1])]


def test_collectives_work(two_ranks):
    results = two_ranks.run(sum_over_ranks, 10)
    assert [result.tolist() for result in results] == [[30], [30]]


def test_composer_takes_the_group_as_its_own(two_ranks):
    assert two_ranks.run(rank_of_composer) == [(0, 0, 2, 2), (1, 1, 2, 2)]


def test_two_ranks_see_the_launcher_variables(two_ranks):
    for rank, (seen, accelerator, initialized) in enumerate(two_ranks.run(launcher_variables)):
        assert seen.pop('MASTER_PORT').isdecimal()
        expected = {'RANK': rank, 'LOCAL_RANK': rank, 'WORLD_SIZE': 2, 'LOCAL_WORLD_SIZE': 2, 'NODE_RANK': 0}
        assert seen == {name: str(value) for name, value in expected.items()} | {'MASTER_ADDR': '127.0.0.1'}
        assert accelerator == 'cpu'
        assert initialized


def test_one_rank_has_no_launcher_variables_even_under_a_launcher(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, '1')
    assert run_on_ranks(launcher_variables, world_size=1) == [({}, 'cpu', False)]


def test_env_wins_over_the_defaults():
    env = {'DS_ACCELERATOR': 'other', 'NODE_RANK': '5'}
    (seen, accelerator, _), _ = run_on_ranks(launcher_variables, env=env)
    assert (seen['NODE_RANK'], accelerator) == ('5', 'other')


def test_pool_keeps_its_processes_and_recovers_after_a_failure():
    with RankPool(world_size=2, timeout_sec=60) as pool:
        pids = [pid for pid, _ in pool.run(pid_and_calls)]
        assert pids == pool.pids

        with pytest.raises(RanksFailed, match='the same everywhere') as caught:
            pool.run(raise_everywhere, 'the same everywhere')
        assert {rank: type(error) for rank, error in caught.value.exceptions.items()} == dict.fromkeys(
            (0, 1), LookupError
        )
        assert pool.run(pid_and_calls) == [(pids[0], 2), (pids[1], 2)]

        with pytest.raises(RanksFailed):
            pool.run(end_rank_1, 'exit')
        new = pool.run(pid_and_calls)
        assert [calls for _, calls in new] == [1, 1]
        assert not {pid for pid, _ in new} & set(pids)
        assert not any(exists(pid) for pid in pids)
        pids = pool.pids
    assert not any(exists(pid) for pid in pids)


@pytest.mark.slow
def test_one_rank_raising_is_reported_at_once(two_ranks):
    two_ranks.run(pid_and_calls)
    pids = two_ranks.pids
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        two_ranks.run(raise_on_rank_1_while_rank_0_waits)
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert 'first on rank 1' in message
    assert "raise LookupError('no such thing on rank 1')" in message
    assert '--- rank 0: stuck' in message
    assert 'torch.distributed.barrier()' in message
    assert isinstance(caught.value.__cause__, LookupError)
    assert not any(exists(pid) for pid in pids)


@pytest.mark.slow
def test_a_hang_ends_at_the_time_limit_and_shows_where():
    start = time.monotonic()
    with RankPool(world_size=2, timeout_sec=3) as pool:
        pool.run(pid_and_calls)
        pids = pool.pids
        start = time.monotonic()
        with pytest.raises(RanksFailed) as caught:
            pool.run(hang_on_rank_0)
        assert 3 <= time.monotonic() - start < 20
    assert 'threading.Event().wait()  # the stuck line' in str(caught.value)
    assert '--- rank 1: returned' in str(caught.value)
    assert not any(exists(pid) for pid in pids)


@pytest.mark.parametrize(('how', 'words'), [('exit', 'exit code 3'), ('kill', r'killed by SIGKILL \(exit code -9\)')])
def test_a_rank_that_dies_is_reported_with_its_exit_code(two_ranks, how, words):
    with pytest.raises(RanksFailed, match=f'--- rank 1: died\n.*{words}'):
        two_ranks.run(end_rank_1, how)


def test_a_result_that_cannot_be_pickled_is_named(two_ranks):
    with pytest.raises(RanksFailed, match='unpicklable returned a dict that cannot be pickled'):
        two_ranks.run(unpicklable)


def test_an_exception_that_cannot_be_pickled_still_shows_its_traceback(two_ranks):
    with pytest.raises(RanksFailed, match=r"raise StubbornError\(7, reason='because'\)") as caught:
        two_ranks.run(raise_stubborn)
    assert caught.value.exceptions == {}


@pytest.mark.slow
def test_ranks_that_ran_different_collectives_do_not_spoil_the_next_call(two_ranks):
    with pytest.raises(RanksFailed, match='did not take part in the same collectives'):
        two_ranks.run(collective_on_rank_0_only)
    assert [result.tolist() for result in two_ranks.run(sum_over_ranks, 1)] == [[3], [3]]


def test_lambdas_and_nested_functions_are_refused(two_ranks):
    def nested():
        pass

    for fn in (nested, lambda: None):
        with pytest.raises(TypeError, match='Move it to the top level of a module'):
            two_ranks.run(fn)
    with pytest.raises(TypeError, match='cannot be pickled'):
        two_ranks.run(rank_and_arguments, threading.Lock(), second=2)


def test_functions_are_found_on_the_parents_path(tmp_path, monkeypatch):
    (tmp_path / 'a_module_of_the_user.py').write_text('def answer():\n    return 42\n')
    monkeypatch.syspath_prepend(tmp_path)
    import a_module_of_the_user  # pyright: ignore[reportMissingImports]

    assert run_on_ranks(a_module_of_the_user.answer, world_size=1) == [42]


PARENT = """
import os, signal
from composer_ds.testing import RankPool
from tests.distributed.test_testing import pid_and_calls

pool = RankPool(world_size=2)
pool.run(pid_and_calls)
print(*pool.pids, flush=True)
{last_line}
"""


@pytest.mark.parametrize(
    'last_line',
    ['pass', pytest.param('os.kill(os.getpid(), signal.SIGKILL)', marks=pytest.mark.slow)],
    ids=['forgotten', 'killed'],
)
def test_ranks_end_with_their_parent(last_line):
    command = [sys.executable, '-c', PARENT.format(last_line=last_line)]
    root = Path(__file__).parents[2]
    parent = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=90, check=False)
    pids = parent.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ('arguments', 'words'), [({'world_size': 0}, 'at least one'), ({'timeout_sec': 0}, 'positive')]
)
def test_impossible_pools_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        RankPool(**arguments)
