"""Counts of optimizer steps, which are part of every checkpoint, and what happens when too many are skipped."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from composer.core import State
from composer.utils import dist

from composer_ds.announcements import beside_bars
from composer_ds.errors import TrainingError
from composer_ds.running import running_deepspeed

__all__ = ['OptimizerSteps', 'optimizer_steps']

log = logging.getLogger(__name__)


@dataclasses.dataclass
class OptimizerSteps:
    """What the engine has done so far. Alike on all ranks, but for the microbatches of unequal batches.

    Args:
        attempted (int): Optimizer steps, applied or skipped.
        applied (int): Optimizer steps that changed the weights.
        skipped (int): Optimizer steps that were skipped, because a gradient was infinite or NaN.
        consecutive_skipped (int): Skipped since the last that was applied.
        microbatches (int): Backward passes of this rank.
        in_schedule (int): Applied since the Trainer's time was 0: the time of the learning-rate schedules.
        gradient_norm (float | None): Of the last applied optimizer step, over all ranks, before clipping.
        loss_scale (float): That the last optimizer step was made with.
        learning_rates (tuple[float, ...]): Of the last optimizer step, for each parameter group.
    """

    attempted: int = 0
    applied: int = 0
    skipped: int = 0
    consecutive_skipped: int = 0
    microbatches: int = 0
    in_schedule: int = 0
    gradient_norm: float | None = None
    loss_scale: float = 1.0
    learning_rates: tuple[float, ...] = ()

    def count(self, applied: bool) -> None:
        """Count one optimizer step.

        Args:
            applied (bool): Whether it changed the weights.
        """
        self.attempted += 1
        if applied:
            self.applied += 1
            self.consecutive_skipped = 0
        else:
            self.skipped += 1
            self.consecutive_skipped += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, in plain types.

        Returns:
            dict[str, Any]: By their names.
        """
        names = ('attempted', 'applied', 'skipped', 'consecutive_skipped', 'microbatches', 'in_schedule')
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the counts of a checkpoint.

        Args:
            state_dict (dict[str, Any]): From :meth:`state_dict`.
        """
        for name in self.state_dict():
            setattr(self, name, int(state_dict.get(name, 0)))

    def check_skipped(self, limit: int | None, at_floor: bool) -> None:
        """Warn of a skipped optimizer step; give up after too many. Called on every rank, after a skipped one.

        Args:
            limit (int | None): How many in a row are tolerated; None for any number.
            at_floor (bool): Whether the loss scale of fp16 can become no smaller.

        Raises:
            TrainingError: On every rank.
        """
        if dist.get_global_rank() == 0:
            # DeepSpeed itself says nothing in bf16 and fp32, and a run whose gradients are NaN looks alive.
            with beside_bars():
                log.warning(
                    'Optimizer step %d skipped%s: a gradient is infinite or NaN. The weights are unchanged. '
                    '(%d of %d skipped so far, %d in a row)',
                    self.attempted,
                    '' if self.loss_scale == 1.0 else f' at loss scale {self.loss_scale:g}',
                    self.skipped,
                    self.attempted,
                    self.consecutive_skipped,
                )
        causes = (
            'Likely causes: a learning rate that is too high or rises too fast, a batch with bad data (NaN in the '
            'inputs, a division by zero or the log of zero in the loss), or a model that overflows in fp16 '
            "(precision='amp_bf16' has the range of fp32). The weights and the last checkpoint are intact"
        )
        if at_floor:
            raise TrainingError(
                f'fp16: gradients overflow even at the smallest loss scale, {self.loss_scale}. {causes}.'
            )
        if limit is not None and self.consecutive_skipped >= limit:
            raise TrainingError(
                f'{self.consecutive_skipped} optimizer steps in a row were skipped, because gradients were infinite or '
                f'NaN. {causes}; DeepSpeed(max_consecutive_skipped_steps=None) goes on regardless.'
            )


def optimizer_steps(state: State) -> OptimizerSteps:
    """Return the counts of a Trainer that trains with DeepSpeed.

    Args:
        state (State): Composer's state.

    Returns:
        OptimizerSteps: The live object.

    Raises:
        ComposerDSError: When there is no ``DeepSpeed`` among the algorithms.
    """
    return running_deepspeed(state, 'optimizer_steps(state)').optimizer_steps
