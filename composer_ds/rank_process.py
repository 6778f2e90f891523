"""One rank of a test: a spawned process that runs functions on request, and the handle that its parent holds.

Parent and child talk over one pipe. The parent sends a pickled call ``(fn, args, kwargs)``, the child answers with an
:class:`Outcome`; an empty message asks the child to leave. Everything crosses the pipe by value: tensors in shared
memory would keep a dead rank's file descriptors alive in its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import linecache
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed

__all__ = ['Outcome', 'RankProcess']

LEAVE = b''
# An idle rank that was asked to leave gets this long.
LEAVE_LIMIT_SEC = 10.0
# A terminated rank gets this long before it is killed: Composer handles SIGTERM in Python code, which a rank that is
# stuck in a collective never reaches.
TERMINATE_LIMIT_SEC = 0.5
# faulthandler writes within milliseconds; a machine with every core busy needs a little more.
STACK_LIMIT_SEC = 2.0


@dataclass(frozen=True)
class Outcome:
    """How one rank's call ended.

    Args:
        rank (int): The global rank.
        kind (str): ``'returned'``, ``'raised'``, ``'died'`` or ``'stuck'``.
        text (str): A traceback, an exit code in words, or the stack of every thread.
        payload (bytes): The pickled result or exception; empty where there is none, or it cannot be pickled.
        type_name (str): The exception's type with its module, for ``'raised'``.
        ordinary (bool): Whether the exception is an :class:`Exception`, not :class:`SystemExit` and the like.
    """

    rank: int
    kind: str
    text: str = ''
    payload: bytes = b''
    type_name: str = ''
    ordinary: bool = False

    @property
    def failed(self) -> bool:
        """Whether the call did not return."""
        return self.kind != 'returned'


class RankProcess:
    """The parent's handle of one rank.

    Args:
        rank (int): The global rank, in ``[0, world_size)``.
        world_size (int): Number of ranks; with 1 there is no process group.
        environment (Mapping[str, str]): The whole environment of the process.
        folder (Path): An empty folder that all ranks of the pool share, for the rendezvous and for stacks.
        group_timeout_sec (float): Time limit of torch.distributed for one collective.
    """

    def __init__(
        self, rank: int, world_size: int, environment: Mapping[str, str], folder: Path, group_timeout_sec: float
    ):
        self.rank = rank
        self.stack_file = folder / f'rank{rank}.stack'
        context = multiprocessing.get_context('spawn')
        self.connection, child_end = context.Pipe()
        # Not a daemon: daemons may have no children, and a dataloader with workers has some.
        self.process = context.Process(
            target=serve, args=(child_end, rank, world_size, folder, group_timeout_sec), name=f'rank{rank}'
        )
        # The variables must be there before the child imports torch or deepspeed, which happens before `serve` runs.
        with mock.patch.dict(os.environ, environment, clear=True):
            self.process.start()
        child_end.close()

    def send(self, call: bytes) -> None:
        """Start a call; a rank that is already dead is noticed by :meth:`poll`.

        Args:
            call (bytes): A pickled ``(fn, args, kwargs)``, or ``LEAVE``.
        """
        with contextlib.suppress(OSError):
            self.connection.send_bytes(call)

    def poll(self) -> Outcome | None:
        """The outcome of the call that runs, or None while it still does.

        Returns:
            Outcome | None: The rank's answer, or how it died.
        """
        # Asked first: a rank that answered and then died has its answer in the pipe.
        alive = self.process.is_alive()
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(LEAVE_LIMIT_SEC)
            alive = False
        return None if alive else Outcome(self.rank, 'died', self._last_words())

    def _last_words(self) -> str:
        code = self.process.exitcode
        if code is None:
            words = 'closed its pipe, but has not ended'
        elif code < 0:
            words = f'killed by {signal.Signals(-code).name} (exit code {code})'
        else:
            words = f'ended with exit code {code}, without raising an exception'
        return f'{words}\n{self.read_stack()}'.rstrip()

    def ask_for_stack(self) -> None:
        """Make a stuck rank write the stack of all its threads; faulthandler does so even inside a collective."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def read_stack(self) -> str:
        """The stack that the rank wrote, if any, with the source of each line.

        Returns:
            str: faulthandler's text, without the thread that watches the parent; empty when there is none.
        """
        if not self.stack_file.exists():
            return ''
        threads = self.stack_file.read_text(errors='replace').split('\n\n')
        text = '\n\n'.join(thread for thread in threads if f' in {_die_with_parent.__name__}\n' not in thread)
        return re.sub(r'File "(.+)", line (\d+) in .+', _with_source, text)

    def stuck(self) -> Outcome:
        """Where a rank is that did not come back in time; call :meth:`ask_for_stack` before, on every stuck rank.

        Returns:
            Outcome: Of kind ``'stuck'``.
        """
        deadline = time.monotonic() + STACK_LIMIT_SEC
        stack = ''
        while time.monotonic() < deadline and self.process.is_alive():
            time.sleep(0.1)
            previous, stack = stack, self.read_stack()
            if stack and stack == previous:
                break
        return Outcome(self.rank, 'stuck', stack or 'no stack: the process did not answer the signal that asks for it')

    def end(self, *, kindly: bool) -> None:
        """End the process and collect its exit code, so that no zombie stays.

        Args:
            kindly (bool): Whether the rank is idle and was asked to leave; otherwise it is terminated at once.
        """
        if kindly:
            self.process.join(LEAVE_LIMIT_SEC)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(TERMINATE_LIMIT_SEC)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def _with_source(match: re.Match[str]) -> str:
    source = linecache.getline(match[1], int(match[2])).strip()
    return f'{match[0]}\n    {source}' if source else match[0]


def serve(pipe: connection.Connection, rank: int, world_size: int, folder: Path, group_timeout_sec: float) -> None:
    """Run calls until the parent asks to leave. The body of a rank's process; joins the process group first.

    Collective: every rank of the pool runs it.

    Args:
        pipe (connection.Connection): The child's end of the pipe.
        rank (int): The global rank.
        world_size (int): Number of ranks.
        folder (Path): The folder that the ranks share.
        group_timeout_sec (float): Time limit of one collective.
    """
    # Kept open for the life of the process: faulthandler holds the bare file descriptor.
    stack_file = (folder / f'rank{rank}.stack').open('w')
    faulthandler.enable(file=stack_file)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    threading.Thread(target=_die_with_parent, name='die-with-parent', daemon=True).start()
    pipe.send(run_call(rank, pickle.dumps((_join_group, (rank, world_size, folder, group_timeout_sec), {}))))
    known_modules = len(sys.modules)
    try:
        while (call := pipe.recv_bytes()) != LEAVE:
            pipe.send(run_call(rank, call))
            if len(sys.modules) > known_modules + 100:
                # Composer, DeepSpeed and torch are a million objects, through which every garbage collection goes, and
                # each ZeRO 3 engine asks for one. Half the time of small runs.
                known_modules = len(sys.modules)
                gc.collect()
                gc.freeze()
    except (EOFError, OSError):
        return
    if torch.distributed.is_initialized():
        # No rank may close its connections while another still waits in a collective.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def run_call(rank: int, call: bytes) -> Outcome:
    """Run one pickled call and describe how it ended; never raises.

    Args:
        rank (int): The global rank.
        call (bytes): A pickled ``(fn, args, kwargs)``.

    Returns:
        Outcome: Of kind ``'returned'`` or ``'raised'``.
    """
    try:
        fn, args, kwargs = pickle.loads(call)
        return Outcome(rank, 'returned', payload=_dump_result(fn, fn(*args, **kwargs)))
    except BaseException as error:
        kind = type(error)
        return Outcome(
            rank,
            'raised',
            text=traceback.format_exc(),
            payload=_dump_exception(error),
            type_name=f'{kind.__module__}.{kind.__qualname__}',
            ordinary=isinstance(error, Exception),
        )


def _dump_result(fn: Any, result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f'{getattr(fn, "__qualname__", fn)} returned a {type(result).__qualname__} that cannot be pickled: '
            f'{error}. Results go from process to process: return numbers, strings, tensors, lists, dicts.'
        ) from error


def _dump_exception(error: BaseException) -> bytes:
    # Exceptions often survive dumps() and fail in loads(), when __init__ takes other arguments than `args` holds.
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return b''
    return payload


def _join_group(rank: int, world_size: int, folder: Path, group_timeout_sec: float) -> None:
    if world_size > 1:
        torch.distributed.init_process_group(
            'gloo',
            init_method=f'file://{folder}/rendezvous',
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout_sec),
        )


def _die_with_parent() -> None:
    # A parent that is killed cannot end its ranks: those would wait in a collective forever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
