"""``OPTIMIZER_STEP``: the event that Composer has not.

It is fired once for each optimizer step that was applied: after the update, before the schedulers move and before
Composer counts the batch. Never for a microbatch, for a batch inside a window of several, or for an optimizer step that
was skipped because a gradient was infinite or NaN.

A callback gets it by a method ``optimizer_step(self, state, logger)``; an algorithm by ``match`` and ``apply``, with
``composer_ds.Event.OPTIMIZER_STEP`` as the event. Algorithms come first, in the order in which they were given, then
callbacks and loggers, as in Composer. What can be read there::

    steps = composer_ds.optimizer_steps(state)
    steps.applied, steps.skipped, steps.attempted, steps.microbatches    # counts, this one included
    steps.gradient_norm     # of the whole gradient, before clipping
    steps.loss_scale        # that this optimizer step was made with; 1.0 but in fp16
    steps.learning_rates    # that this update was made with, one for each parameter group
    state.timestamp         # batches before this one
"""

from __future__ import annotations

from composer.core import State
from composer.loggers import Logger
from composer.utils import StringEnum

__all__ = ['Event', 'run_optimizer_step_event']


class Event(StringEnum):
    """Events beside those of ``composer.Event``."""

    OPTIMIZER_STEP = 'optimizer_step'


def run_optimizer_step_event(state: State, logger: Logger) -> None:
    """Tell algorithms, then callbacks. Called on every rank, after every applied optimizer step.

    Args:
        state (State): Composer's state.
        logger (Logger): Composer's logger.
    """
    event = Event.OPTIMIZER_STEP
    for algorithm in list(state.algorithms):
        if algorithm.match(event, state):  # pyright: ignore[reportArgumentType]
            algorithm.apply(event, state, logger)  # pyright: ignore[reportArgumentType]
    for callback in list(state.callbacks):
        if hasattr(callback, event.value):
            getattr(callback, event.value)(state, logger)
