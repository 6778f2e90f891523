"""Learning-rate schedulers as Composer sees them: they move when an optimizer step was applied, and hold otherwise.

Composer calls ``scheduler.step()`` after every batch (or epoch). Its own schedulers compute the learning rate from the
Trainer's time; they are shown a state whose batches are optimizer steps. torch's count their own calls.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer.core import State, Time, Timestamp, TimeUnit
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from composer_ds.faces.face import face_class

if TYPE_CHECKING:
    from composer_ds.counts import OptimizerSteps
    from composer_ds.windows import Window

__all__ = ['SchedulerFace', 'StateInOptimizerSteps', 'scheduler_face']


class SchedulerFace(LRScheduler):
    """Mixed into the class of a scheduler by :func:`scheduler_face`; never constructed directly."""

    _steps: OptimizerSteps
    _moved_at: int
    _called: bool

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move, when an optimizer step was applied since the last call. Called by Composer, per batch or per epoch.

        Args:
            *args (Any): Passed on.
            **kwargs (Any): Passed on.
        """
        cls = type(self)
        cls._called = True
        if cls._steps.applied != cls._moved_at:
            cls._moved_at = cls._steps.applied
            super().step(*args, **kwargs)


def scheduler_face(scheduler: LRScheduler, view: StateInOptimizerSteps, steps: OptimizerSteps) -> SchedulerFace:
    """Make the face of a scheduler. Called at ``BEFORE_LOAD``, and at ``FIT_START`` for those given to ``fit``.

    Args:
        scheduler (LRScheduler): Of torch, or what Composer made of one of its own.
        view (StateInOptimizerSteps): What Composer's schedulers are to be shown.
        steps (OptimizerSteps): The counts.

    Returns:
        SchedulerFace: An instance of the scheduler's class, too, that shares its ``__dict__``.
    """
    if isinstance(scheduler, LambdaLR):
        scheduler.lr_lambdas = [_with_view(function, view) for function in scheduler.lr_lambdas]
    cls = face_class(SchedulerFace, type(scheduler), _steps=steps, _moved_at=steps.applied, _called=False)
    face = object.__new__(cls)
    object.__setattr__(face, '__dict__', vars(scheduler))
    return face


def _with_view(function: Any, view: StateInOptimizerSteps) -> Any:
    """Make a function of Composer's, which holds the state in its closure, look at another state."""
    # Private to Composer 0.32: compile_composer_scheduler. tests/distributed/test_clock.py fails when it changes.
    if getattr(function, '__qualname__', '') != 'compile_composer_scheduler.<locals>.scheduler_fn':
        return function
    inside = inspect.getclosurevars(function).nonlocals
    scheduler: Callable[..., float] = inside['scheduler']
    ratio: float = inside['ssr']
    takes_ratio = len(inspect.signature(scheduler).parameters) > 1
    return lambda _: scheduler(view, ratio) if takes_ratio else scheduler(view)


class StateInOptimizerSteps:
    """Composer's state, in which a batch is an optimizer step. Everything else is the real one.

    Args:
        state (State): Composer's state.
        steps (OptimizerSteps): The counts.
        window (Window | int): How many batches make an optimizer step.
    """

    def __init__(self, state: State, steps: OptimizerSteps, window: Window | int):
        self._state = state
        self._steps = steps
        self._window = window

    @property
    def _size(self) -> int:
        return self._window if isinstance(self._window, int) else self._window.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    @property
    def timestamp(self) -> Timestamp:
        """The Trainer's time, with the number of applied optimizer steps for that of batches."""
        real = self._state.timestamp
        return real if real.batch.value == self._steps.in_schedule else real.copy(batch=self._steps.in_schedule)

    @property
    def dataloader_len(self) -> Time | None:
        """Optimizer steps in an epoch, rounded down where windows cross epochs."""
        real = self._state.dataloader_len
        return real if real is None or self._size == 1 else Time.from_batch(int(real) // self._size)

    @property
    def max_duration(self) -> Time | None:
        """Length of the run; in optimizer steps where it is in epochs or batches."""
        real = self._state.max_duration
        if real is None or self._size == 1:
            return real
        batches = real.value
        if real.unit == TimeUnit.EPOCH and self._state.dataloader_len is not None:
            batches *= int(self._state.dataloader_len)
        elif real.unit != TimeUnit.BATCH:
            return real
        return Time.from_batch(math.ceil(batches / self._size))

    def get_elapsed_duration(self) -> Time[float] | None:
        """The part of the run that is over, on the clock of optimizer steps.

        Returns:
            Time[float] | None: 0 to 1; None when the run has no end.
        """
        if self.max_duration is None:
            return None
        return self.timestamp.get(self.max_duration.unit) / self.max_duration
