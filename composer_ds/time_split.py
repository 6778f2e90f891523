"""Which of Composer's events begins which phase, and the reduction of gradients within the phases."""

from __future__ import annotations

from composer.core import Event

from composer_ds.communication import REDUCTIONS, collectives
from composer_ds.timing import PhaseClock

__all__ = ['TimeSplit']

_PHASE_FROM = {
    Event.BEFORE_DATALOADER: 'data_wait',
    Event.AFTER_DATALOADER: 'other',
    Event.BEFORE_FORWARD: 'forward',
    Event.AFTER_LOSS: 'other',
    Event.BEFORE_BACKWARD: 'backward',
    Event.AFTER_BACKWARD: 'other',
    Event.AFTER_TRAIN_BATCH: 'optimizer',  # until OPTIMIZER_STEP
    Event.BATCH_END: 'other',
    Event.EVAL_BEFORE_ALL: 'evaluation',
    Event.EVAL_AFTER_ALL: 'other',
    # Until the next event, whichever it is.
    Event.BATCH_CHECKPOINT: 'checkpoint',
    Event.EPOCH_CHECKPOINT: 'checkpoint',
    Event.ITERATION_CHECKPOINT: 'checkpoint',
    Event.EPOCH_END: 'other',
    Event.EPOCH_START: 'other',
    Event.ITERATION_END: 'other',
    Event.ITERATION_START: 'other',
    Event.FIT_END: 'other',
}
_ALWAYS = ('forward', 'backward', 'optimizer', 'data_wait', 'checkpoint')


class TimeSplit:
    """Divides the time of a ``fit`` into phases, from construction until :meth:`stop`.

    Args:
        on_cuda (bool): Whether the model computes on a GPU.
        measures_reduction (bool): Whether the reduction of gradients is a phase of its own, by DeepSpeed's record of
            collectives.
    """

    def __init__(self, on_cuda: bool, measures_reduction: bool):
        self._measures_reduction = measures_reduction
        self._reduced_sec = 0.0
        if measures_reduction:
            collectives.record(self, REDUCTIONS)
            self._reduced_sec = _reduced_sec()
        self._clock = PhaseClock(on_cuda)

    def stop(self) -> None:
        """End the record of collectives."""
        collectives.stop(self)

    def event(self, event: Event) -> None:
        """Begin the phase that begins at an event, if one does.

        Args:
            event (Event): The event.
        """
        phase = _PHASE_FROM.get(event)
        if phase is not None:
            # A batch that ends without an update has not been in the optimizer's phase.
            no_update = event == Event.BATCH_END and self._clock.phase == 'optimizer'
            self._begin(phase, 'other' if no_update else None)

    def optimizer_step(self) -> None:
        """End the optimizer's phase. Called at ``OPTIMIZER_STEP``."""
        self._begin('other')

    def _begin(self, phase: str, instead: str | None = None) -> None:
        ended = instead or self._clock.phase
        self._clock.switch(phase, instead)
        if self._measures_reduction and ended in ('backward', 'optimizer', 'other'):
            reduced_sec = _reduced_sec()
            self._clock.move(reduced_sec - self._reduced_sec, ended, 'reduction')
            self._reduced_sec = reduced_sec

    def take(self) -> dict[str, float]:
        """Return the times since the last call, and begin anew.

        Returns:
            dict[str, float]: Seconds by phase, ``'other'`` and ``'total'`` among them; evaluation is in neither.
        """
        seconds, total = self._clock.take()
        total -= seconds.pop('evaluation', 0.0)
        phases = (*_ALWAYS, 'reduction') if self._measures_reduction else _ALWAYS
        split = {phase: seconds.get(phase, 0.0) for phase in phases}
        # On a GPU the host's times and the device's overlap, so the rest may come out below 0.
        return split | {'other': max(0.0, total - sum(split.values())), 'total': total}


def _reduced_sec() -> float:
    return sum(traffic.sec for name, traffic in collectives.totals().items() if name in REDUCTIONS)
