"""What the terminal shows of a ``fit``: a bar of optimizer steps where they are not batches, and a summary."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from composer import Callback
from composer.core import State, Time, Timestamp, TimeUnit
from composer.loggers import Logger, ProgressBarLogger
from tqdm import tqdm

from composer_ds.announcements import announce, block, describe_duration

if TYPE_CHECKING:
    from composer_ds.counts import OptimizerSteps
    from composer_ds.windows import Window

__all__ = ['Console', 'optimizer_steps_to_come']

# As wide as the beginning of Composer's bar, when the duration is in batches.
_BAR = f'{"optimizer steps":29} ' + '{percentage:3.0f}%|{bar:25}| {n_fmt}/{total_fmt}{postfix}'
_BAR_WITHOUT_END = f'{"optimizer steps":29} ' + '{n_fmt}{postfix}'


class Console(Callback):
    """Belongs to one Trainer. Added as its last callback, so that it speaks when the others have saved what they save.

    Args:
        steps (OptimizerSteps): The counts.
        window (Window): The batches of an optimizer step.
    """

    def __init__(self, steps: OptimizerSteps, window: Window):
        self._steps = steps
        self._window = window
        self._planned: int | None = None
        self._bar: tqdm | None = None
        self._composers_bar: ProgressBarLogger | None = None
        self._began = time.monotonic()
        self._before = 0, 0
        self._time_before = Timestamp()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Remember how far training was. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        to_come = optimizer_steps_to_come(state, self._window.size)
        self._planned = None if to_come is None else self._steps.attempted + to_come
        bars = [one for one in state.callbacks if isinstance(one, ProgressBarLogger) and one.show_pbar]
        self._composers_bar = bars[0] if bars else None
        self._began = time.monotonic()
        self._before = self._steps.applied, self._steps.skipped
        self._time_before = state.timestamp.copy()

    def after_optimizer_step(self) -> None:
        """Show the counts below Composer's bar, where batches do not say it all. Called after each optimizer step."""
        steps = self._steps
        if self._composers_bar is None or (self._window.size == 1 and not steps.skipped):
            return
        stream: Any = self._composers_bar.stream
        if self._bar is None and stream.isatty():  # a log file has the summary
            self._bar = tqdm(
                total=self._planned,
                position=2,  # Composer has 0 and 1
                bar_format=_BAR if self._planned else _BAR_WITHOUT_END,
                file=stream,
                dynamic_ncols=True,
                leave=False,
            )
        if self._bar is not None:
            self._bar.set_postfix_str(f'{steps.skipped} skipped' if steps.skipped else '', refresh=False)
            self._bar.update(steps.applied - self._bar.n)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Sum up. Called by Composer, on every rank; rank 0 speaks.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._close_bar()
        now, before = state.timestamp, self._time_before
        applied, skipped = self._steps.applied - self._before[0], self._steps.skipped - self._before[1]
        samples = now.sample.value - before.sample.value
        took = describe_duration(time.monotonic() - self._began)
        if now.total_wct is not None and before.total_wct is not None and now.total_wct > before.total_wct:
            training_sec = (now.total_wct - before.total_wct).total_seconds()
            took += f', {describe_duration(training_sec)} of it in training: {samples / training_sec:,.1f} samples/s'
        lines = [
            ('optimizer', f'{_several(applied, "optimizer step")} applied, {skipped} skipped'),
            ('data', f'{_several(now.batch.value - before.batch.value, "batch")}, {_several(samples, "sample")}'),
            ('time', took),
        ]
        if before.batch.value:
            whole = f'{self._steps.applied:,} applied, {self._steps.skipped} skipped, in {now.batch.value:,} batches'
            lines.insert(1, ('in all', whole))
        if (loss := state.total_loss_dict.get('loss/train/total')) is not None:
            lines.append(('train loss', f'{loss:.4f} (last batch)'))
        for callback in state.callbacks:
            if (saved := getattr(callback, 'last_saved', None)) is not None:
                lines.append(('saved', saved))
        announce(block('DeepSpeed, training ended', lines))

    def close(self, state: State, logger: Logger) -> None:
        """Take the bar away, also of a ``fit`` that failed. Called by Composer when the Trainer is closed.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._close_bar()

    def _close_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


def optimizer_steps_to_come(state: State, batches_per_optimizer_step: int) -> int | None:
    """Calculate how many optimizer steps a ``fit`` will attempt. Called at ``FIT_START``.

    Args:
        state (State): Composer's state.
        batches_per_optimizer_step (int): The size of a window; the last one may be shorter.

    Returns:
        int | None: None where the Trainer's duration does not say: in samples or tokens, or without a known length of
            the dataloader.
    """
    duration = state.max_duration
    if duration is None:
        return None
    batches = _batches_of(duration, state)
    if batches is None:
        return None
    return math.ceil(max(0, batches - state.timestamp.batch.value) / batches_per_optimizer_step)


def _batches_of(duration: Time, state: State) -> int | None:
    if duration.unit == TimeUnit.BATCH:
        return duration.value
    if duration.unit == TimeUnit.EPOCH and state.dataloader_len is not None:
        return duration.value * int(state.dataloader_len)
    return None


def _several(count: int, noun: str) -> str:
    plural = {'batch': 'batches'}.get(noun, f'{noun}s')
    return f'{count:,} {noun if count == 1 else plural}'
