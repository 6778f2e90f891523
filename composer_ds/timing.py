"""Where the time of training goes: every moment belongs to one phase.

On a CPU the host's clock tells it all. On a GPU the host only hands kernels over and is far ahead of them, so the
phases that compute are measured by CUDA events, which are recorded in the stream beside the kernels and cost
microseconds. They are read when the batch is over: Composer has waited for the loss by then, so that reading them waits
for nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

__all__ = ['DEVICE_PHASES', 'PhaseClock']

DEVICE_PHASES = ('forward', 'backward', 'optimizer')
"""The phases that compute on the device."""


class PhaseClock:
    """Divides the time into phases that follow each other.

    Args:
        on_cuda (bool): Whether the model computes on a GPU. Default: False.
        make_event (Callable[[], Any] | None): Makes a CUDA event with ``record``, ``synchronize`` and
            ``elapsed_time``; None for torch's. Default: None.
    """

    def __init__(self, on_cuda: bool = False, make_event: Callable[[], Any] | None = None):
        self.phase = 'other'
        """The phase at hand."""
        self._on_cuda = on_cuda
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._total = 0.0
        self._begun: Any = None
        self._pairs: list[tuple[str, Any, Any]] = []
        self._spare: list[Any] = []

    def switch(self, phase: str, instead: str | None = None) -> None:
        """Begin a phase, which ends the one at hand.

        Args:
            phase (str): What begins.
            instead (str | None): What the phase that ends turned out to be; None when it was what it seemed to be.
        """
        now = time.perf_counter()
        ended = instead or self.phase
        if self._begun is not None:
            if ended in DEVICE_PHASES:
                self._pairs.append((ended, self._begun, self._event()))
            else:
                self._spare.append(self._begun)
            self._begun = None
        elif not (self._on_cuda and ended in DEVICE_PHASES):
            self._seconds[ended] += now - self._since
        self._total += now - self._since
        if self._on_cuda and phase in DEVICE_PHASES:
            self._begun = self._event()
        self.phase, self._since = phase, now

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count a part of one phase as another.

        Args:
            seconds (float): How much.
            source (str): The phase that it was counted as.
            target (str): The phase that it belongs to.
        """
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def take(self) -> tuple[dict[str, float], float]:
        """Return the times since the last call, and begin anew.

        Returns:
            tuple[dict[str, float], float]: The seconds of each phase that occurred, and those of all together by the
                host's clock.
        """
        self.switch(self.phase)
        for phase, begin, end in self._pairs:
            end.synchronize()
            self._seconds[phase] += begin.elapsed_time(end) / 1000
            self._spare += [begin, end]
        seconds, total = dict(self._seconds), self._total
        self._pairs.clear()
        self._seconds.clear()
        self._total = 0.0
        return seconds, total

    def _event(self) -> Any:
        event: Any = self._spare.pop() if self._spare else self._make_event()
        event.record()
        return event
