"""When DeepSpeed's dynamic loss scale grows.

DeepSpeed (0.19.6 to 0.19.8, every ZeRO stage) doubles the scale inside an optimizer step, before it divides the
gradients by it, so that each optimizer step in which the scale grows makes half the update, without a word. Here the
scale grows after the update. ``tests/distributed/test_fp16.py`` holds the case.
"""

from __future__ import annotations

from typing import Any

__all__ = ['GrowthAfterUpdate']


class GrowthAfterUpdate:
    """Puts the growth of the loss scale off until the optimizer step is done. For fp16 only.

    Args:
        zero_optimizer (Any): ``ds_engine.optimizer``; its ``loss_scaler`` is told to wait.
    """

    def __init__(self, zero_optimizer: Any):
        loss_scaler = zero_optimizer.loss_scaler
        self._update_scale = loss_scaler.update_scale
        self._waiting = False
        loss_scaler.update_scale = self._inside_the_optimizer_step

    def _inside_the_optimizer_step(self, overflow: bool) -> None:
        if overflow:
            self._update_scale(True)  # the optimizer step is skipped, so nothing is divided any more
        else:
            self._waiting = True

    def after_optimizer_step(self) -> None:
        """Let the scale grow now, when it is due. Called after every ``ds_engine.step()``, on every rank."""
        if self._waiting:
            self._waiting = False
            self._update_scale(False)
