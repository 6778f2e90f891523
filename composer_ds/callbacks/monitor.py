"""What the monitors have in common: they watch a Trainer that trains with DeepSpeed."""

from __future__ import annotations

from composer import Callback
from composer.core import State
from composer.loggers import Logger

from composer_ds.errors import ConfigError

__all__ = ['Monitor']


class Monitor(Callback):
    """Refuses a Trainer without ``DeepSpeed``, and logs at every n-th optimizer step.

    Args:
        interval (int): Log at every so many applied optimizer steps.

    Raises:
        ConfigError: When the interval is no whole number from 1 on.
    """

    def __init__(self, interval: int):
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(
                f'{type(self).__name__}(interval={interval!r}): a whole number of optimizer steps, 1 or more, is '
                'needed; 1 logs at each'
            )
        self.interval = interval
        self.pending: dict[str, float] = {}
        """What is to be logged when the batch is over."""

    def init(self, state: State, logger: Logger) -> None:
        """Check that there is something to watch. Called by Composer on every rank, from ``Trainer(...)``.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.

        Raises:
            ConfigError: On every rank, when there is no ``DeepSpeed`` among the algorithms.
        """
        from composer_ds.algorithm import DeepSpeed  # not above: it takes seconds to import

        if not any(isinstance(algorithm, DeepSpeed) for algorithm in state.algorithms):
            raise ConfigError(
                f"{type(self).__name__} watches DeepSpeed's optimizer steps, and this Trainer has none. Give it "
                "algorithms=[DeepSpeed(...)], or use Composer's own callbacks: SpeedMonitor, OptimizerMonitor, "
                'LRMonitor, MemoryMonitor'
            )

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log what the batch's optimizer step gave. Called by Composer, on every rank.

        Args:
            state (State): Composer's state, which has counted the batch.
            logger (Logger): Composer's logger.
        """
        if self.pending:
            logger.log_metrics(self.pending)
            self.pending = {}

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the optimizer step of a short last window. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self.batch_end(state, logger)
