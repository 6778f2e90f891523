"""The clock of optimizer steps: it counts them, fires ``OPTIMIZER_STEP``, moves the schedules and ends the windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from composer.core import Event, State, TimeUnit
from composer.loggers import Logger
from composer.utils import dist

from composer_ds.announcements import announce, describe_optimizer_steps, describe_saved_by
from composer_ds.checkpoint.verification import take_loaded_path
from composer_ds.events import run_optimizer_step_event
from composer_ds.faces.scheduler import SchedulerFace, StateInOptimizerSteps, scheduler_face
from composer_ds.loss_scaling import LossScale
from composer_ds.running import running_deepspeed

if TYPE_CHECKING:
    from composer_ds.console import Console
    from composer_ds.counts import OptimizerSteps
    from composer_ds.faces.optimizer import OptimizerFace
    from composer_ds.windows import Window

__all__ = ['Clock']


class Clock:
    """Belongs to one Trainer, from ``BEFORE_LOAD`` until it is closed.

    Args:
        state (State): Composer's state.
        logger (Logger): Composer's logger.
        steps (OptimizerSteps): The counts.
        window (Window): The batches of an optimizer step.
        loss_scale (LossScale): Of the engine.
        max_consecutive_skipped_steps (int | None): When to give up.
        console (Console): Shows the counts.
    """

    def __init__(
        self,
        state: State,
        logger: Logger,
        steps: OptimizerSteps,
        window: Window,
        loss_scale: LossScale,
        max_consecutive_skipped_steps: int | None,
        console: Console,
    ):
        self.state = state
        self.logger = logger
        self.steps = steps
        self.window = window
        self.loss_scale = loss_scale
        self.limit = max_consecutive_skipped_steps
        self.console = console
        self._settled = steps.applied
        self._saved_by: dict[str, int] = {}

    @property
    def optimizer(self) -> OptimizerFace:
        """The optimizer face."""
        face: Any = self.state.optimizers[0]
        return face

    def take_schedulers(self) -> None:
        """Put faces in the places of the schedulers. Called at ``BEFORE_LOAD``, and at ``FIT_START`` for new ones."""
        view = StateInOptimizerSteps(self.state, self.steps, self.window)
        self.state.schedulers = [
            one if isinstance(one, SchedulerFace) else scheduler_face(one, view, self.steps)
            for one in self.state.schedulers
        ]

    def fit_start(self, batches_per_optimizer_step: int) -> None:
        """Begin a ``fit``. Called on every rank.

        Args:
            batches_per_optimizer_step (int): The size of its windows.
        """
        self.window.size = batches_per_optimizer_step
        if self.state.timestamp.batch.value == 0:  # also after fit(reset_time=True)
            self.steps.in_schedule = 0
        self._settled = self.steps.applied
        self.take_schedulers()
        for scheduler in self.state.schedulers:
            type(scheduler)._moved_at = self.steps.applied  # pyright: ignore[reportAttributeAccessIssue]
        for callback in self.state.callbacks:
            saver: Any = callback  # Composer's, ours, or the user's own
            interval: Any = getattr(saver, 'save_interval', None)
            # One that is no function (a string, say) is the affair of its callback.
            if callable(interval) and not isinstance(interval, _BetweenWindows):
                saver.save_interval = _BetweenWindows(cast(Any, interval), self.window)

    def batch_start(self) -> None:
        """Begin a batch."""
        for scheduler in self.state.schedulers:
            type(scheduler)._called = False  # pyright: ignore[reportAttributeAccessIssue]

    def after_optimizer_step(self, applied: bool) -> None:
        """Count an optimizer step and tell everyone. Called right after each, on every rank.

        Args:
            applied (bool): Whether it changed the weights.

        Raises:
            TrainingError: On every rank, when too many were skipped.
        """
        steps = self.steps
        steps.count(applied)
        steps.loss_scale = self.loss_scale.used
        steps.learning_rates = tuple(float(group['lr']) for group in self.optimizer.param_groups)
        if applied:
            steps.gradient_norm = self.optimizer.gradient_norm()
            run_optimizer_step_event(self.state, self.logger)
        else:
            self.logger.log_metrics({'optimizer_steps/skipped': steps.skipped})
            steps.check_skipped(self.limit, self.loss_scale.at_floor)
        self.console.after_optimizer_step()

    def settle(self, event: Event) -> None:
        """Settle the batch that is over; step a short window when it was the last. Called at ``BATCH_END`` and later.

        Collective.

        Args:
            event (Event): ``BATCH_END``, one of the events after it, or ``FIT_END``.
        """
        if self.window.batches > 0 and (event == Event.FIT_END or _is_over(self.state)):
            self.optimizer.finish_window()
            for scheduler in self.state.schedulers:
                if getattr(type(scheduler), '_called', False):  # per batch
                    scheduler.step()
        self.steps.in_schedule += self.steps.applied - self._settled
        self._settled = self.steps.applied

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and how far the window has come. Called on every rank when a checkpoint is saved.

        Returns:
            dict[str, Any]: In plain types.
        """
        if self.window.batches:
            announce(
                'A checkpoint is saved in the middle of an optimizer step '
                f'({self.window.batches} of {self.window.size} '
                'batches): their gradients are not in it, and a run that resumes from it begins that step anew.'
            )
        plan = running_deepspeed(self.state, 'A checkpoint').plan
        assert plan is not None
        return {
            **self.steps.state_dict(),
            'batches_in_window': self.window.batches,
            'saved_by': {'zero_stage': plan.zero_stage, 'world_size': dist.get_world_size()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the counts of a checkpoint.

        Args:
            state_dict (dict[str, Any]): From :meth:`state_dict`.
        """
        self.steps.load_state_dict(state_dict)
        self._settled = self.steps.applied
        self._saved_by = state_dict.get('saved_by', {})
        lost = state_dict.get('batches_in_window', 0)
        if lost:
            announce(
                f'The checkpoint was saved in the middle of an optimizer step: the gradients of {lost} batches are not '
                'in it. The optimizer step begins anew.'
            )

    def after_load(self, counts_were_loaded: bool) -> None:
        """Complete the counts after a checkpoint of plain Composer, where each batch was an optimizer step; say so.

        Args:
            counts_were_loaded (bool): Whether the checkpoint had counts of ours.
        """
        batches = self.state.timestamp.batch.value
        if not counts_were_loaded and batches > 0:
            self.steps.attempted = self.steps.applied = self.steps.in_schedule = batches
        self._settled = self.steps.applied
        path = take_loaded_path(self.state)
        if path is not None and batches == 0:
            announce(f'Loaded {path}; training begins at batch 0.')
        elif path is not None:
            announce(f'Resumed from {path}: batch {batches}, {self._origin(counts_were_loaded)}.')

    def _origin(self, counts_were_loaded: bool) -> str:
        counts = describe_optimizer_steps(self.steps.applied, self.steps.skipped)
        if not counts_were_loaded:
            return f'{counts}; saved by Composer without DeepSpeed'
        if not self._saved_by:
            return counts
        return f'{counts}; saved {describe_saved_by(**self._saved_by)}'


class _BetweenWindows:
    """When to save, as a callback decides: a checkpoint holds no gradients, so one in a window waits for its end."""

    def __init__(self, save_interval: Callable[[State, Event], bool], window: Window):
        self._save_interval = save_interval
        self._window = window
        self._is_due = False

    def __call__(self, state: State, event: Event) -> bool:
        due = self._save_interval(state, event) or self._is_due
        self._is_due = due and self._window.batches > 0
        return due and self._window.batches == 0


def _is_over(state: State) -> bool:
    """Whether the batch that has just ended was the last of this ``fit``."""
    duration, time = state.max_duration, state.timestamp
    if duration is None:
        return False
    if time >= duration:
        return True
    # The last epoch is counted only after its last batch.
    return (
        duration.unit == TimeUnit.EPOCH
        and time.epoch.value + 1 >= duration.value
        and state.dataloader_len is not None
        and time.batch_in_epoch.value >= int(state.dataloader_len)
    )
