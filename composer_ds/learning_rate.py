"""The learning rate of every optimizer step of a run, without training: Composer's own schedulers, asked in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from composer.core import State, Time, Timestamp, TimeUnit
from composer.devices import DeviceCPU

from composer_ds.counts import OptimizerSteps
from composer_ds.errors import ConfigError
from composer_ds.faces.scheduler import StateInOptimizerSteps

__all__ = ['LearningRates', 'RunLength', 'learning_rates']

# More points than a screen or a picture shows; every optimizer step where there are fewer.
_MOST_POINTS = 4000


@dataclass(frozen=True)
class RunLength:
    """How long a run is, in Composer's units.

    Args:
        max_duration (int | str): As for the Trainer.
        batches_per_epoch (int | None): Batches that a rank draws in an epoch; None where the dataloader does not say.
        samples_per_batch (int | None): Over all ranks.
        samples_per_epoch (int | None): Over all ranks.
        scale_schedule_ratio (float): As for the Trainer.
        step_schedulers_every_batch (bool | None): As for the Trainer.
        batches_per_optimizer_step (int): As the ds_config asks.
    """

    max_duration: int | str
    batches_per_epoch: int | None = None
    samples_per_batch: int | None = None
    samples_per_epoch: int | None = None
    scale_schedule_ratio: float = 1.0
    step_schedulers_every_batch: bool | None = None
    batches_per_optimizer_step: int = 1

    @property
    def scaled_duration(self) -> Time:
        """``max_duration`` times ``scale_schedule_ratio``, as the Trainer counts."""
        duration = Time.from_input(self.max_duration, 'ep')
        return Time(int(duration.value * self.scale_schedule_ratio), duration.unit)

    @property
    def optimizer_steps(self) -> int | None:
        """Optimizer steps of the whole run; None when they cannot be known in advance."""
        batches = self.batches
        return None if batches is None else -(-batches // self.batches_per_optimizer_step)

    @property
    def batches(self) -> int | None:
        """Batches of the whole run; None when they cannot be known in advance."""
        duration = self.scaled_duration
        if duration.unit == TimeUnit.BATCH:
            return duration.value
        if duration.unit == TimeUnit.EPOCH and self.batches_per_epoch is not None:
            return duration.value * self.batches_per_epoch
        if duration.unit == TimeUnit.SAMPLE and self.batches_per_epoch and self.samples_per_batch:
            samples_per_epoch = self.samples_per_epoch or self.batches_per_epoch * self.samples_per_batch
            epochs, rest = divmod(duration.value, samples_per_epoch)
            return epochs * self.batches_per_epoch + -(-rest // self.samples_per_batch)
        return None

    def timestamp(self, batch: int, *, at_end_of_epoch: bool = False) -> Timestamp:
        """Return Composer's clock after so many batches.

        Args:
            batch (int): Batches since the start.
            at_end_of_epoch (bool): Whether the epoch that has just ended still counts as the current one.

        Returns:
            Timestamp: Without tokens, which nobody knows in advance.
        """
        epoch, in_epoch = divmod(batch, self.batches_per_epoch) if self.batches_per_epoch else (0, batch)
        if at_end_of_epoch and epoch and not in_epoch:
            epoch, in_epoch = epoch - 1, self.batches_per_epoch or 0
        per_batch = self.samples_per_batch or 0
        per_epoch = self.samples_per_epoch or per_batch * (self.batches_per_epoch or 0)
        in_epoch_samples = min(in_epoch * per_batch, per_epoch) if per_epoch else in_epoch * per_batch
        return Timestamp(
            epoch=epoch,
            batch=batch,
            batch_in_epoch=in_epoch,
            sample=epoch * per_epoch + in_epoch_samples,
            sample_in_epoch=in_epoch_samples,
        )


@dataclass(frozen=True)
class LearningRates:
    """The curves, as Composer's ``LRMonitor`` would log them.

    Args:
        optimizer_steps (list[int]): How many optimizer steps have been made, from 1 to the end of the run; not each of
            them in a long run.
        groups (list[list[float]]): For each parameter group the learning rate at each of them.
    """

    optimizer_steps: list[int]
    groups: list[list[float]]

    @property
    def curves(self) -> dict[str, list[float]]:
        """The groups, where those with the same curve are named together."""
        named: dict[tuple[float, ...], list[int]] = {}
        for number, rates in enumerate(self.groups):
            named.setdefault(tuple(rates), []).append(number)
        if len(named) == 1:
            return {'all parameter groups' if len(self.groups) > 1 else 'lr': self.groups[0]}
        return {f'group {", ".join(map(str, numbers))}': list(rates) for rates, numbers in named.items()}


def learning_rates(scheduler: Any, optimizer: torch.optim.Optimizer, length: RunLength) -> LearningRates:
    """Ask a scheduler of Composer for the learning rates of a run.

    Composer's schedulers are functions of the state's clock (``composer/optim/scheduler.py``), which counts optimizer
    steps here. Its Trainer asks them after each batch, before the clock moves on (``trainer.py:_train_loop``), so that
    the value logged after optimizer step n is that of clock n - 1.

    Args:
        scheduler (Any): A ``ComposerScheduler``, or None for a constant learning rate.
        optimizer (torch.optim.Optimizer): Gives the parameter groups and their initial learning rates.
        length (RunLength): Of the run.

    Returns:
        LearningRates: The curves.

    Raises:
        ConfigError: When the length is not known in advance, or the scheduler refuses its arguments.
    """
    total = length.optimizer_steps
    if total is None:
        raise ConfigError(f'max_duration={length.max_duration!r} cannot be turned into optimizer steps in advance')
    stride = -(-total // _MOST_POINTS)
    steps = sorted({*range(1, total + 1, stride), total}) if total else []
    try:
        factors = [1.0] * len(steps) if scheduler is None else _factors(scheduler, steps, length)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f'{type(scheduler).__name__}: {error}') from error
    initial = [group.get('initial_lr', group['lr']) for group in optimizer.param_groups]
    return LearningRates(steps, [[rate * factor for factor in factors] for rate in initial])


def _factors(scheduler: Any, steps: list[int], length: RunLength) -> list[float]:
    state = State(
        model=torch.nn.Module(), rank_zero_seed=0, run_name='check', device=DeviceCPU(),
        max_duration=length.scaled_duration,
    )  # fmt: skip
    if length.batches_per_epoch is not None:
        # dataloader_len cannot be set without a dataloader; of this one nobody takes a batch.
        state.set_dataloader(range(length.batches_per_epoch), 'train')
    ratio, size = length.scale_schedule_ratio, length.batches_per_optimizer_step
    counts = OptimizerSteps()
    view: Any = StateInOptimizerSteps(state, counts, size)
    factors = []
    for step in steps:
        counts.in_schedule = step - 1
        if length.step_schedulers_every_batch is False:
            batch = (step - 1) * size
            clock = batch // length.batches_per_epoch * length.batches_per_epoch if length.batches_per_epoch else 0
            counts.in_schedule = clock // size
            state.timestamp = length.timestamp(clock, at_end_of_epoch=True)
        else:
            state.timestamp = length.timestamp(step * size - 1)
        factors.append(float(scheduler(view) if ratio == 1.0 else scheduler(view, ratio)))
    return factors
