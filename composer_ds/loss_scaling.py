"""DeepSpeed's loss scale: what it was in an optimizer step, and when it moves.

DeepSpeed (0.19.8, every ZeRO stage) doubles the dynamic scale inside an optimizer step, before it divides the
gradients by it, so that each optimizer step in which the scale grows makes half the update, without a word. Here the
scale grows after the update. ``tests/distributed/test_fp16.py`` holds the case.
"""

from __future__ import annotations

from typing import Any

__all__ = ['LossScale']


class LossScale:
    """Watches over the loss scale of one engine. Without fp16 there is nothing to watch.

    Args:
        zero_optimizer (Any): ``ds_engine.optimizer``; its ``loss_scaler`` is told to wait with its growth.
    """

    def __init__(self, zero_optimizer: Any):
        self._scaler: Any = getattr(zero_optimizer, 'loss_scaler', None)
        self._growth_waits = False
        self.used = 1.0
        """The scale that the last optimizer step was made with."""
        self.at_floor = False
        """Whether the last optimizer step overflowed at the smallest scale there is."""
        if getattr(self._scaler, 'dynamic', False):
            # At its floor DeepSpeed raises a bare Exception; see Clock.after_optimizer_step for ours.
            self._scaler.raise_error_at_min_scale = False
            self._update_scale = self._scaler.update_scale
            self._scaler.update_scale = self._inside_the_optimizer_step

    def before_optimizer_step(self) -> None:
        """Note the scale. Called before every ``ds_engine.step()``."""
        self.used, self.at_floor = float(getattr(self._scaler, 'cur_scale', 1.0)), False

    def _inside_the_optimizer_step(self, overflow: bool) -> None:
        if overflow:  # the optimizer step is skipped, so nothing is divided any more
            scaler = self._scaler
            self.at_floor = self.used <= scaler.min_scale and 1 in (scaler.delayed_shift, scaler.cur_hysteresis)
            self._update_scale(True)
        else:
            self._growth_waits = True

    def after_optimizer_step(self) -> None:
        """Let the scale grow now, when it is due. Called after every ``ds_engine.step()``, on every rank."""
        if self._growth_waits:
            self._growth_waits = False
            self._update_scale(False)
        elif getattr(self._scaler, 'dynamic', False):
            self._scaler.cur_scale = max(self._scaler.cur_scale, self._scaler.min_scale)
