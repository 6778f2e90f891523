"""Run a function on several CPU ranks, to test a model under distributed training on any machine.

::

    def weights_after_training(zero_stage):  # at the top level of an importable module
        ...
        return trainer.state.model.state_dict()

    def test_zero_3_trains_like_zero_2():
        zero_2, _ = run_on_ranks(weights_after_training, zero_stage=2)

The ranks are fresh processes with the variables of Composer's launcher and a gloo process group, so that Composer and
DeepSpeed find what they would find under ``composer -n 2``. With ``world_size=1`` there is neither: the situation of
a user who starts Python without a launcher.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed

from composer_ds.errors import ComposerDSError
from composer_ds.rank_process import LEAVE, Outcome, RankProcess

__all__ = ['RankPool', 'RanksFailed', 'run_on_ranks']

LAUNCHER_VARIABLES = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT')
# Starting a rank means importing torch, and composer and deepspeed where the package does: 5 to 15 s, more when busy.
START_LIMIT_SEC = 180.0
# Once one rank failed, the others get this long to fail too. Most then wait in a collective that never completes.
GRACE_SEC = 5.0


class RanksFailed(ComposerDSError, RuntimeError):
    """A function that ran on several ranks raised, died or did not come back in time.

    The message holds what every rank was doing, the rank that failed first at the top.

    Args:
        message (str): The report.
        exceptions (Mapping[int, BaseException]): By rank, the exceptions that can be pickled.
    """

    def __init__(self, message: str, exceptions: Mapping[int, BaseException]):
        self.exceptions: dict[int, BaseException] = dict(exceptions)
        super().__init__(message)

    def __reduce__(self):
        return type(self), (str(self), self.exceptions)


class RankPool:
    """Processes that stay between calls, so that many tests share one import of Composer and DeepSpeed.

    The processes start with the first call. Whatever a function changes in its process (module globals, environment
    variables, random state) is still changed for the next one. After a call that failed in different ways on the
    ranks, the next call gets new processes.

    Args:
        world_size (int): Number of ranks. Default: ``2``.
        timeout_sec (float): Time limit of one call; the start of the processes has its own. Default: ``300``.
        env (Mapping[str, str] | None): Environment variables on top of the parent's and of those that make a CPU
            rank. Default: ``None``.
    """

    def __init__(self, world_size: int = 2, timeout_sec: float = 300, env: Mapping[str, str] | None = None):
        if world_size < 1:
            raise ValueError(f'world_size={world_size}: a pool has at least one rank.')
        if timeout_sec <= 0:
            raise ValueError(f'timeout_sec={timeout_sec}: give a positive number of seconds.')
        self.world_size = world_size
        self.timeout_sec = timeout_sec
        self.env = dict(env or {})
        self._processes: list[RankProcess] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception_info: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids by rank; empty when no process runs."""
        return [process.process.pid for process in self._processes if process.process.pid is not None]

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank and wait until all have finished.

        Args:
            fn (Callable[..., Any]): A function at the top level of a module that the ranks can import: it is pickled
                by its name. Lambdas and nested functions are refused.
            *args (Any): Positional arguments, pickled.
            **kwargs (Any): Keyword arguments, pickled.

        Returns:
            list[Any]: The results by rank.

        Raises:
            TypeError: If the function, an argument or a result cannot be pickled.
            RanksFailed: If a rank raised, died or did not come back within the time limit.
        """
        call = _dump_call(fn, args, kwargs)
        name = getattr(fn, '__qualname__', repr(fn))
        try:
            if not self._processes:
                self._start()
            outcomes = self._exchange(call, self.timeout_sec)
            alike = all(outcome.ordinary for outcome in outcomes) and len({o.type_name for o in outcomes}) == 1
            if alike or not any(outcome.failed for outcome in outcomes):
                self._settle(name, report=not alike)
            else:
                self._end()
        except BaseException:
            self._end()
            raise
        if any(outcome.failed for outcome in outcomes):
            raise _failure(f'{name} failed', outcomes)
        return [_load_result(name, outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]

    def close(self) -> None:
        """End the processes; the pool may be used again, with new ones."""
        for process in self._processes:
            process.send(LEAVE)
        self._end(kindly=True)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix='composer_ds_ranks_')
        folder = Path(self._folder.name)
        port = _free_port()
        # Processes that are no daemons outlive a forgotten pool, and would keep the interpreter from ending.
        atexit.register(self._end)
        # The pool's own time limit comes first: torch's would only tell that some collective timed out.
        group_timeout_sec = self.timeout_sec + START_LIMIT_SEC
        for rank in range(self.world_size):
            environment = _environment(rank, self.world_size, port, self.env)
            self._processes.append(RankProcess(rank, self.world_size, environment, folder, group_timeout_sec))
        outcomes = self._exchange(None, START_LIMIT_SEC)
        if any(outcome.failed for outcome in outcomes):
            raise _failure('The ranks did not start', outcomes)

    def _exchange(self, call: bytes | None, limit_sec: float) -> list[Outcome]:
        """Send a call (None: wait only) and gather the outcomes in the order in which the ranks finished."""
        deadline = time.monotonic() + limit_sec
        if call is not None:
            for process in self._processes:
                process.send(call)
        outcomes: list[Outcome] = []
        waiting = list(self._processes)
        while waiting and (left_sec := deadline - time.monotonic()) > 0:
            # Not longer than 1 s: a dead rank's pipe stays open while a process that it forked lives on.
            connection.wait([process.connection for process in waiting], timeout=min(left_sec, 1.0))
            for process in list(waiting):
                outcome = process.poll()
                if outcome is not None:
                    waiting.remove(process)
                    outcomes.append(outcome)
                    if outcome.failed:
                        deadline = min(deadline, time.monotonic() + GRACE_SEC)
        for process in waiting:
            process.ask_for_stack()
        return outcomes + [process.stuck() for process in waiting]

    def _settle(self, name: str, *, report: bool) -> None:
        """A barrier after the call: ranks that ran different collectives must not meet in the next call's."""
        if self.world_size == 1:
            return
        outcomes = self._exchange(_dump_call(_barrier, (), {}), GRACE_SEC)
        if all(outcome.kind == 'returned' and pickle.loads(outcome.payload) for outcome in outcomes):
            return
        self._end()
        if report and any(outcome.failed for outcome in outcomes):
            raise _failure(f'{name} returned, but its ranks did not take part in the same collectives', outcomes)

    def _end(self, *, kindly: bool = False) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.end(kindly=kindly)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        atexit.unregister(self._end)


def run_on_ranks(
    fn: Callable[..., Any],
    /,
    *args: Any,
    world_size: int = 2,
    timeout_sec: float = 300,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` in ``world_size`` fresh processes: a :class:`RankPool` that is used once.

    Args:
        fn (Callable[..., Any]): A function at the top level of a module that the ranks can import.
        *args (Any): Positional arguments, pickled.
        world_size (int): Number of ranks. Default: ``2``.
        timeout_sec (float): Time limit of the call. Default: ``300``.
        env (Mapping[str, str] | None): Environment variables of the ranks. Default: ``None``.
        **kwargs (Any): Keyword arguments, pickled.

    Returns:
        list[Any]: The results by rank.

    Raises:
        TypeError: If the function, an argument or a result cannot be pickled.
        RanksFailed: If a rank raised, died or did not come back within the time limit.
    """
    with RankPool(world_size, timeout_sec, env) as pool:
        return pool.run(fn, *args, **kwargs)


def _environment(rank: int, world_size: int, port: int, env: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    # Ranks on CPU even where a GPU is: the process group is gloo, and Composer would ask for nccl.
    environment |= {'DS_ACCELERATOR': 'cpu', 'CUDA_VISIBLE_DEVICES': ''}
    # Ranks that each use every core slow each other down.
    environment.setdefault('OMP_NUM_THREADS', '1')
    if world_size > 1:
        values = (rank, rank, world_size, world_size, 0, '127.0.0.1', port)
        environment |= {name: str(value) for name, value in zip(LAUNCHER_VARIABLES, values, strict=True)}
    return environment | dict(env)


def _free_port() -> int:
    # Nothing listens there: the rendezvous is a file. Composer's launcher sets the variable, so programs may read it.
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def _barrier() -> bool:
    if not torch.distributed.is_initialized():
        return False
    torch.distributed.barrier()
    return True


def _dump_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    name = getattr(fn, '__qualname__', '')
    if '<lambda>' in name or '<locals>' in name:
        raise TypeError(
            f'{name} cannot run on other ranks: they import it by its name. Move it to the top level of a module and '
            'pass what it needs as arguments.'
        )
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f'The call of {name or fn!r} cannot be pickled ({error}). Give a function at the top level of a module, '
            'and arguments that are numbers, strings, tensors, or lists and dicts of them.'
        ) from error


def _load_result(name: str, outcome: Outcome) -> Any:
    try:
        return pickle.loads(outcome.payload)
    except Exception as error:
        raise TypeError(f'The result of {name} on rank {outcome.rank} cannot be unpickled: {error!r}') from error


def _failure(headline: str, outcomes: Sequence[Outcome]) -> RanksFailed:
    # A death comes first even if another rank's complaint about the lost connection arrived before it was noticed.
    order = sorted(outcomes, key=lambda outcome: (not outcome.failed, outcome.kind != 'died'))
    first = order[0]
    exceptions = {o.rank: pickle.loads(o.payload) for o in order if o.kind == 'raised' and o.payload}
    labels = {'returned': 'returned', 'raised': 'raised', 'died': 'died', 'stuck': 'stuck, the most recent call first'}
    lines = [f'{headline} on {sum(o.failed for o in order)} of {len(order)} ranks, first on rank {first.rank}.']
    for outcome in order:
        lines += ['', f'--- rank {outcome.rank}: {labels[outcome.kind]}', outcome.text.rstrip()]
    failure = RanksFailed('\n'.join(lines).rstrip(), exceptions)
    failure.__cause__ = exceptions.get(first.rank)
    return failure
