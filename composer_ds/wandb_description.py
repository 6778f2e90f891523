"""What a W&B run says about itself, with DeepSpeed or without: its x-axes and the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_ds.panels import OPTIMIZER_STEPS
from composer_ds.plan_keys import ENVIRONMENT

if TYPE_CHECKING:
    from composer.core import State

__all__ = ['describe']

_FAMILIES = (
    'optimizer_steps', 'gradient', 'learning_rate', 'l2_norm', 'update_to_weight', 'speed', 'time_split',
    'communication', 'zero_memory',
)  # fmt: skip


def describe(run: Any, state: State) -> None:
    """Describe a run that was just started. Called on the ranks that log.

    Args:
        run (Any): The ``wandb.Run``.
        state (State): Composer's state.
    """
    # These take seconds to import.
    from composer_ds.callbacks.monitor import Monitor
    from composer_ds.plan_record import environment_record

    if any(isinstance(callback, Monitor) for callback in state.callbacks):
        run.define_metric(OPTIMIZER_STEPS)
        for family in _FAMILIES:
            run.define_metric(f'{family}/*', step_metric=OPTIMIZER_STEPS)
    run.config.update({ENVIRONMENT: environment_record()}, allow_val_change=True)
