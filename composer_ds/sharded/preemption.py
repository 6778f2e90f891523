"""SIGTERM, by which a cluster says that it will take the machine back: all ranks save, and end together.

Composer's launcher (0.32) passes a SIGTERM on to its ranks, and kills those that live 30 seconds later. Where the whole
group of processes is told, a rank therefore hears it twice.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from composer.core import Event, State

__all__ = ['Preemption', 'SaveInterval']


class Preemption:
    """Notes a SIGTERM, and lets the ranks agree on it. A second one changes nothing; who cannot wait sends SIGKILL."""

    _watching: ClassVar[list[Preemption]] = []
    _before: ClassVar[Any] = None

    def __init__(self):
        self.asked_for = False
        """Whether all ranks know."""
        self._received = False
        self._group: Any = None

    def watch(self) -> None:
        """Begin to note the signal. Called on every rank, at the start of training."""
        # Python hands signals to the main thread only.
        if self in Preemption._watching or threading.current_thread() is not threading.main_thread():
            return
        if not Preemption._watching:
            Preemption._before = signal.signal(signal.SIGTERM, _note)
        Preemption._watching.append(self)

    def leave(self) -> None:
        """Give the signal its former effect back, when nobody else watches."""
        if self not in Preemption._watching:
            return
        Preemption._watching.remove(self)
        # Somebody may have put a handler of their own in the place of ours.
        if not Preemption._watching and signal.getsignal(signal.SIGTERM) is _note:
            signal.signal(signal.SIGTERM, Preemption._before)

    def is_asked_for(self) -> bool:
        """Say whether any rank got the signal: one rank alone may be told.

        Collective, on the CPU: it does not wait for a GPU.

        Returns:
            bool: Alike on all ranks.
        """
        # A group of its own: a save may be using another in the background.
        self._group = self._group or dist.new_group(backend='gloo')
        received = torch.tensor(int(self._received))
        dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group)
        self.asked_for = bool(received)
        return self.asked_for


def _note(*_: Any) -> None:
    for one in Preemption._watching:
        one._received = True


class SaveInterval:
    """When to save: as the user said, and after a SIGTERM.

    Args:
        interval (Callable[[State, Event], bool]): As the user said.
        preemption (Preemption | None): The signal, if it counts.
    """

    def __init__(self, interval: Callable[[State, Event], bool], preemption: Preemption | None):
        self._interval, self._preemption = interval, preemption

    def __call__(self, state: State, event: Event) -> bool:
        """Say whether it is time. Called at the events at which checkpoints are saved, on every rank.

        Args:
            state (State): Composer's state.
            event (Event): The event.

        Returns:
            bool: Alike on all ranks.
        """
        due = self._interval(state, event)
        return due or (self._preemption is not None and self._preemption.asked_for)
