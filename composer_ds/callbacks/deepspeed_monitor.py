"""``DeepSpeedMonitor``: counts, learning rates, norms, throughput and where the time goes, at each optimizer step."""

from __future__ import annotations

from collections import deque

from composer.core import Event, State
from composer.loggers import Logger

from composer_ds.callbacks.monitor import Monitor
from composer_ds.counts import OptimizerSteps, optimizer_steps
from composer_ds.parameter_norms import Norms, ParameterNorms
from composer_ds.running import running_deepspeed
from composer_ds.time_split import TimeSplit

__all__ = ['DeepSpeedMonitor']

_CLIPPING_WINDOW = 100


class DeepSpeedMonitor(Monitor):
    """Logs what happens at each optimizer step of DeepSpeed, or at every n-th.

    All keys of an optimizer step are logged together, at the end of its batch, with ``optimizer_steps/applied`` among
    them for the x-axis. After a skipped optimizer step the first five are logged alone. Times and throughput are those
    of everything since the last log (or the start of ``fit``), without evaluation; times are of this rank.

    +-------------------------------------------+------------------------------------------------------------------+
    | Key                                       | Logged data                                                      |
    +===========================================+==================================================================+
    | ``optimizer_steps/applied``               | Optimizer steps that changed the weights                         |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``optimizer_steps/attempted``             | Applied or skipped                                               |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``optimizer_steps/skipped``               | Skipped, because a gradient was infinite or NaN                  |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``optimizer_steps/microbatches``          | Backward passes of this rank                                     |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``gradient/loss_scale``                   | That this optimizer step was made with. Only in fp16             |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``learning_rate/group{GROUP}``            | That this update was made with, for each parameter group         |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``l2_norm/grad/global``                   | Norm of the whole gradient, before clipping                      |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``gradient/clip_factor``                  | What clipping multiplied the gradient by; 1.0 when it was        |
    |                                           | small enough. Only where gradients are clipped                   |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``gradient/clipped_fraction``             | Share of the last 100 applied optimizer steps of which the       |
    |                                           | gradient was clipped. Only where gradients are clipped           |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``speed/optimizer_steps_per_sec``         | Applied optimizer steps                                          |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``speed/samples_per_sec``                 | Samples of all ranks                                             |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``speed/tokens_per_sec``                  | Tokens of all ranks. Only where the dataloader counts tokens     |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``speed/samples_per_optimizer_step``      | Samples of all ranks; skipped optimizer steps count, too         |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``speed/tokens_per_optimizer_step``       | Tokens of all ranks. Only where the dataloader counts tokens     |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``time_split/total_sec``                  | Seconds for each optimizer step, applied or skipped, as all times|
    |                                           | here                                                             |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``time_split/forward_sec``                | Forward pass and loss, of all microbatches                       |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``time_split/backward_sec``               | Backward pass, without the reduction where that is measured      |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``time_split/reduction_sec``              | Collectives that reduce gradients, and wait for other ranks.     |
    |                                           | Only with ``measure_reduction``; otherwise a part of the         |
    |                                           | backward pass (ZeRO 2, 3) or of the optimizer (ZeRO 1)           |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``time_split/optimizer_sec``              | The update; the gathering of the new weights                     |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``time_split/data_wait_sec``              | Waiting for a batch, here and on other ranks; moving it          |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``time_split/checkpoint_sec``             | What this and later callbacks do at checkpoint events: the       |
    |                                           | Trainer's own checkpoints (``save_folder``) are among them       |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``time_split/other_sec``                  | The rest: other callbacks and algorithms, logging, metrics       |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``l2_norm/grad/{NAME}``                   | Norm of a parameter's gradient, before clipping. Only with       |
    |                                           | ``per_layer``, as all keys below                                 |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``l2_norm/param/{NAME}``                  | Norm of its fp32 master weights, after the update                |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``l2_norm/update/{NAME}``                 | Norm of what the update added to them                            |
    +-------------------------------------------+------------------------------------------------------------------+
    | ``update_to_weight/{NAME}``               | ``l2_norm/update`` / ``l2_norm/param``                           |
    +-------------------------------------------+------------------------------------------------------------------+

    Args:
        interval (int): Log at every so many applied optimizer steps. Default: 1.
        per_layer (bool): Log norms of every parameter, too. Costs one all-reduce of three numbers for each parameter,
            and memory for a copy of the master weights that are updated at a time. Default: False.
        measure_reduction (bool | None): Whether to take the reduction of gradients out of the other times. Its record
            makes DeepSpeed wait for the device after each collective, so that on a GPU nothing overlaps with
            communication. None: on a CPU only, where DeepSpeed waits anyway. Default: None.

    Raises:
        ConfigError: When the interval is no whole number from 1 on; from ``Trainer(...)``, when that has no
            ``DeepSpeed``.
    """

    def __init__(self, interval: int = 1, per_layer: bool = False, measure_reduction: bool | None = None):
        super().__init__(interval)
        self.per_layer = per_layer
        self.measure_reduction = measure_reduction
        self._time: TimeSplit | None = None
        self._norms: ParameterNorms | None = None
        self._layers: dict[str, Norms] = {}
        self._clipping = 0.0
        self._was_clipped: deque[bool] = deque(maxlen=_CLIPPING_WINDOW)
        self._is_fp16 = self._is_pending = False
        self._skipped = 0
        self._last: tuple[int, int, int, int] = (0, 0, 0, 0)
        """Attempted and applied optimizer steps, samples and tokens, when the times were taken last."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Note when a phase begins or ends. Called by Composer at every event, on every rank.

        Args:
            event (Event): The event.
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        if self._time is not None:
            self._time.event(event)
        super().run_event(event, state, logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin to watch. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        algorithm = running_deepspeed(state, type(self).__name__)
        assert algorithm.plan is not None
        steps = algorithm.optimizer_steps
        on_cuda = state.device.name == 'gpu'
        self._clipping = float(algorithm.plan.ds_config.get('gradient_clipping') or 0.0)
        self._is_fp16 = algorithm.plan.precision == 'amp_fp16'
        self._is_pending = False
        self._skipped, self._last = steps.skipped, _progress(state, steps)
        self._stop()
        if self.per_layer:
            optimizer = algorithm.ds_engine.optimizer.optimizer  # the PartitionedOptimizer that ZeRO wraps
            self._norms = ParameterNorms(optimizer, lambda: (steps.applied + 1) % self.interval == 0)
        measures_reduction = not on_cuda if self.measure_reduction is None else self.measure_reduction
        self._time = TimeSplit(on_cuda, measures_reduction)

    def optimizer_step(self, state: State, logger: Logger) -> None:
        """Note an update. Called on every rank, after each that was applied.

        Collective, with ``per_layer`` and where the optimizer step is to be logged.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        if self._time is None:
            return
        self._time.optimizer_step()
        steps = optimizer_steps(state)
        if self._clipping:
            self._was_clipped.append(self._clip_factor(steps) < 1.0)
        self._is_pending = steps.applied % self.interval == 0
        if self._is_pending and self._norms is not None:
            self._layers = self._norms.take(self._clip_factor(steps))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the optimizer step that this batch has made, if it made one. Called by Composer, on every rank.

        Args:
            state (State): Composer's state, which has counted the batch.
            logger (Logger): Composer's logger.
        """
        steps = optimizer_steps(state)
        if self._time is None:
            return
        if self._is_pending:
            self._is_pending = False
            metrics = self._counts(steps) | self._gradient(steps) | self._speed(state, steps) | self._per_layer()
            logger.log_metrics(metrics)
        elif steps.skipped > self._skipped:
            logger.log_metrics(self._counts(steps))
        self._skipped = steps.skipped

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the optimizer step of a short last window; end watching. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self.batch_end(state, logger)
        self._stop()

    def close(self, state: State, logger: Logger) -> None:
        """End watching, also after an exception. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._stop()

    def _stop(self) -> None:
        if self._time is not None:
            self._time.stop()
            self._time = None
        if self._norms is not None:
            self._norms.close()
            self._norms = None

    def _clip_factor(self, steps: OptimizerSteps) -> float:
        """What DeepSpeed (0.19.8: ``unscale_and_clip_grads``) has multiplied the gradient by."""
        if not self._clipping or steps.gradient_norm is None:
            return 1.0
        return min(1.0, self._clipping / (steps.gradient_norm + 1e-6))

    def _counts(self, steps: OptimizerSteps) -> dict[str, float]:
        names = ('applied', 'attempted', 'skipped', 'microbatches')
        scale = {'gradient/loss_scale': steps.loss_scale} if self._is_fp16 else {}
        return {f'optimizer_steps/{name}': getattr(steps, name) for name in names} | scale

    def _gradient(self, steps: OptimizerSteps) -> dict[str, float]:
        metrics = {f'learning_rate/group{group}': rate for group, rate in enumerate(steps.learning_rates)}
        if steps.gradient_norm is not None:
            metrics['l2_norm/grad/global'] = steps.gradient_norm
            if self._clipping:
                metrics['gradient/clip_factor'] = self._clip_factor(steps)
                metrics['gradient/clipped_fraction'] = sum(self._was_clipped) / len(self._was_clipped)
        return metrics

    def _speed(self, state: State, steps: OptimizerSteps) -> dict[str, float]:
        assert self._time is not None
        split = self._time.take()
        now = _progress(state, steps)
        attempted, applied, samples, tokens = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        metrics = {'speed/optimizer_steps_per_sec': applied / split['total']}
        for name, number in (('samples', samples), ('tokens', tokens)):
            if number or name == 'samples':
                metrics[f'speed/{name}_per_sec'] = number / split['total']
                metrics[f'speed/{name}_per_optimizer_step'] = number / attempted
        return metrics | {f'time_split/{phase}_sec': sec / attempted for phase, sec in split.items()}

    def _per_layer(self) -> dict[str, float]:
        layers, self._layers = self._layers, {}
        metrics = {}
        for name, norms in layers.items():
            metrics[f'l2_norm/grad/{name}'] = norms.gradient
            metrics[f'l2_norm/param/{name}'] = norms.weight
            metrics[f'l2_norm/update/{name}'] = norms.update
            metrics[f'update_to_weight/{name}'] = norms.update_to_weight
        return metrics


def _progress(state: State, steps: OptimizerSteps) -> tuple[int, int, int, int]:
    time = state.timestamp
    return steps.attempted, steps.applied, time.sample.value, time.token.value
