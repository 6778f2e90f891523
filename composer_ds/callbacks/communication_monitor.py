"""``CommunicationMonitor``: the bytes that each rank sends in an optimizer step, against the ZeRO stage in theory."""

from __future__ import annotations

from collections.abc import Mapping

from composer.core import State
from composer.loggers import Logger
from composer.utils import dist

from composer_ds.callbacks.monitor import Monitor
from composer_ds.communication import REDUCTIONS, Traffic, collectives, expected_bytes, sent_bytes
from composer_ds.counts import optimizer_steps
from composer_ds.memory_plan import MemoryPlan
from composer_ds.partitions import full_numel
from composer_ds.running import running_deepspeed

__all__ = ['CommunicationMonitor']


class CommunicationMonitor(Monitor):
    """Measures every n-th optimizer step of DeepSpeed.

    Bytes are those that each rank sends when collectives run around a ring; see ``composer_ds/communication.py`` for
    the formulas. While an optimizer step is measured, DeepSpeed waits for the device after each collective: on a GPU it
    is slower than the others, and its times show communication that nothing overlaps with. Counted is what DeepSpeed
    sends; Composer's own collectives (of the loss, of metrics) are small and are not.

    +------------------------------------+---------------------------------------------------------------------+
    | Key                                | Logged data                                                         |
    +====================================+=====================================================================+
    | ``optimizer_steps/applied``        | Optimizer steps that changed the weights, for the x-axis            |
    +------------------------------------+---------------------------------------------------------------------+
    | ``communication/measured_bytes``   | What this rank sent in this optimizer step                          |
    +------------------------------------+---------------------------------------------------------------------+
    | ``communication/gradient_bytes``   | Of it, for the reduction of gradients (and of their norm)           |
    +------------------------------------+---------------------------------------------------------------------+
    | ``communication/weight_bytes``     | Of it, for the gathering of weights                                 |
    +------------------------------------+---------------------------------------------------------------------+
    | ``communication/expected_bytes``   | What the ZeRO stage asks for, in theory                             |
    +------------------------------------+---------------------------------------------------------------------+
    | ``communication/ratio``            | Measured / expected. Only with several ranks                        |
    +------------------------------------+---------------------------------------------------------------------+
    | ``communication/collectives``      | Number of collectives                                               |
    +------------------------------------+---------------------------------------------------------------------+
    | ``communication/reduction_sec``    | Seconds in reductions, waiting for other ranks included             |
    +------------------------------------+---------------------------------------------------------------------+
    | ``communication/gathering_sec``    | Seconds in gatherings; on a CPU, ZeRO 3 starts them and goes on, so |
    |                                    | that waiting for them is not among them                             |
    +------------------------------------+---------------------------------------------------------------------+

    Args:
        interval (int): Measure every so many applied optimizer steps. Default: 50.

    Raises:
        ConfigError: When the interval is no whole number from 1 on; from ``Trainer(...)``, when that has no
            ``DeepSpeed``.
    """

    def __init__(self, interval: int = 50):
        super().__init__(interval)
        self._plan: MemoryPlan | None = None
        self._trained = self._frozen = 0
        self._before: Mapping[str, Traffic] | None = None
        self._microbatches = 0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Read the plan. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        algorithm = running_deepspeed(state, type(self).__name__)
        plan = algorithm.plan
        assert plan is not None
        self._plan = MemoryPlan.of_ds_config(
            plan.ds_config, world_size=dist.get_world_size(), weights=plan.weights, on_cpu=state.device.name == 'cpu'
        )
        trained = algorithm.ds_engine.optimizer.optimizer.partitions.names
        self._trained = sum(full_numel(parameter) for parameter in trained)
        self._frozen = sum(full_numel(parameter) for parameter in state.model.parameters()) - self._trained
        self._stop()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin to record, when an optimizer step begins that is to be measured. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        steps = optimizer_steps(state)
        if self._before is None and (steps.applied + 1) % self.interval == 0:
            collectives.record(self)
            self._before, self._microbatches = collectives.totals(), steps.microbatches

    def optimizer_step(self, state: State, logger: Logger) -> None:
        """Take stock. Called on every rank, after each applied optimizer step.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        before = self._before
        if before is None:
            return
        steps = optimizer_steps(state)
        after = collectives.totals()
        self._stop()
        traffic = {name: now.since(before.get(name, Traffic())) for name, now in after.items()}
        self.pending = {
            'optimizer_steps/applied': steps.applied,
            **self._measured(traffic, steps.microbatches - self._microbatches),
        }

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the optimizer step that was measured; forget one that was skipped. Called by Composer, on every rank.

        Args:
            state (State): Composer's state, which has counted the batch.
            logger (Logger): Composer's logger.
        """
        super().batch_end(state, logger)
        if optimizer_steps(state).consecutive_skipped:
            self._stop()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the optimizer step of a short last window; end recording. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        super().fit_end(state, logger)
        self._stop()

    def close(self, state: State, logger: Logger) -> None:
        """End recording, also after an exception. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._stop()

    def _stop(self) -> None:
        collectives.stop(self)
        self._before = None

    def _measured(self, traffic: Mapping[str, Traffic], microbatches: int) -> dict[str, float]:
        assert self._plan is not None
        sent, seconds = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        for name, one in traffic.items():
            sent[name in REDUCTIONS] += sent_bytes(name, one.message_bytes, self._plan.world_size)
            seconds[name in REDUCTIONS] += one.sec
        expected = sum(expected_bytes(self._plan, self._trained, self._frozen, microbatches))
        ratio = {'communication/ratio': sum(sent.values()) / expected} if expected else {}
        return {
            'communication/measured_bytes': sum(sent.values()),
            'communication/gradient_bytes': sent[True],
            'communication/weight_bytes': sent[False],
            'communication/expected_bytes': expected,
            **ratio,
            'communication/collectives': sum(one.count for one in traffic.values()),
            'communication/reduction_sec': seconds[True],
            'communication/gathering_sec': seconds[False],
        }
