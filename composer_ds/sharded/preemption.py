"""SIGTERM, by which a cluster says that it will take the machine back: all ranks save, and end together."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

__all__ = ['Preemption']


class Preemption:
    """Notes a SIGTERM, and lets the ranks agree on it. A second one ends the process, as without this class."""

    def __init__(self):
        self.asked_for = False
        """Whether all ranks know."""
        self._received = False
        self._before: Any = None
        self._group: Any = None

    def watch(self) -> None:
        """Begin to note the signal. Called on every rank, at the start of training."""
        # Python hands signals to the main thread only.
        if self._before is None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: Any) -> None:
        self._received = True
        self.leave()

    def leave(self) -> None:
        """Give the signal its former effect back."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

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
