"""The gradient scaler as Composer sees it: DeepSpeed's loss scaler.

Composer's own fp16 path runs unchanged: it scales the loss of each microbatch, hands its closure to ``step`` and calls
``update`` afterwards. DeepSpeed divides the gradients by the scale, looks for overflow, skips the optimizer step and
moves the scale, all inside ``ds_engine.step()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

__all__ = ['ScalerFace']


class ScalerFace(GradScaler):
    """Put into ``state.scaler`` at ``BEFORE_LOAD`` when the precision is ``amp_fp16``.

    Args:
        ds_engine (DeepSpeedEngine): An engine in fp16.
    """

    # The key in Composer's checkpoints, so that plain Composer in fp16 reads ours, and we read its.
    __qualname__ = 'GradScaler'

    def __init__(self, ds_engine: DeepSpeedEngine):
        # Not GradScaler's own __init__: it would switch itself off where there is no GPU.
        self._ds_engine = ds_engine
        self._enabled = True

    @property
    def _scaler(self) -> Any:
        # deepspeed 0.19: DynamicLossScaler or LossScaler; BF16_Optimizer and the fp32 paths have one of scale 1.
        zero_optimizer: Any = self._ds_engine.optimizer
        return zero_optimizer.loss_scaler

    def is_enabled(self) -> bool:
        """Say that losses are scaled.

        Returns:
            bool: True.
        """
        return True

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scale a microbatch's loss. Called by Composer before each backward pass.

        Args:
            outputs (torch.Tensor): The loss, of one element.

        Returns:
            torch.Tensor: The scaled loss, a new tensor of the same shape. DeepSpeed now expects its backward pass.
        """
        return self._ds_engine.scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: DeepSpeed divides by the scale together with clipping, inside the optimizer step.

        Args:
            optimizer (torch.optim.Optimizer): Not used.
        """

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable | None = None, **kwargs: Any) -> Any:  # pyright: ignore
        """Make one optimizer step. Collective.

        Args:
            optimizer (torch.optim.Optimizer): The optimizer face.
            closure (Callable | None): Composer's: runs all microbatches.
            **kwargs (Any): Passed on.

        Returns:
            Any: What the closure returned.
        """
        return optimizer.step(closure=closure, **kwargs)  # pyright: ignore

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Do nothing, or set the scale: DeepSpeed has moved it already.

        Args:
            new_scale (float | torch.Tensor | None): A new loss scale.
        """
        if new_scale is not None:
            self._scaler.cur_scale = float(new_scale)

    def get_scale(self) -> float:
        """Return the loss scale.

        Returns:
            float: What losses are multiplied by at present.
        """
        return float(self._scaler.cur_scale)

    def get_growth_factor(self) -> float:
        """Return what the scale is multiplied by after a while without overflow, and divided by after an overflow.

        Returns:
            float: 2 in DeepSpeed.
        """
        return float(getattr(self._scaler, 'scale_factor', 1.0))

    def get_backoff_factor(self) -> float:
        """Return the inverse of the growth factor.

        Returns:
            float: 0.5 in DeepSpeed.
        """
        return 1.0 / self.get_growth_factor()

    def get_growth_interval(self) -> int:
        """Return how many optimizer steps without overflow make the scale grow.

        Returns:
            int: ``loss_scale_window`` of the ds_config.
        """
        return int(getattr(self._scaler, 'scale_window', 0))

    @property
    def _steps_since_overflow(self) -> int:
        """0 at first and after an overflow; the scale grows in an optimizer step that begins with the window's length.

        Up to the window's length: what came before the last growth does not matter.
        """
        scaler = self._scaler
        if not getattr(scaler, 'dynamic', False):
            return 0
        steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        return steps if steps <= 0 else (steps - 1) % scaler.scale_window + 1

    def _get_growth_tracker(self) -> int:
        # torch's scale grows in the optimizer step that makes its tracker as long as the window: one behind ours.
        return max(0, self._steps_since_overflow - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale in torch's own layout, with what only DeepSpeed knows beside it.

        Returns:
            dict[str, Any]: Read by torch's ``GradScaler``, too.
        """
        return {
            'scale': self.get_scale(),
            'growth_factor': self.get_growth_factor(),
            'backoff_factor': self.get_backoff_factor(),
            'growth_interval': self.get_growth_interval(),
            '_growth_tracker': self._get_growth_tracker(),
            'steps_since_overflow': self._steps_since_overflow,
            'hysteresis': getattr(self._scaler, 'cur_hysteresis', 1),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the scale of a checkpoint, of DeepSpeed or of torch.

        Args:
            state_dict (dict[str, Any]): From :meth:`state_dict` or from torch's ``GradScaler``; empty where it was off.
        """
        scaler = self._scaler
        if not state_dict or not getattr(scaler, 'dynamic', False):
            return  # a fixed scale is a setting, not a state
        scaler.cur_scale = float(state_dict['scale'])
        scaler.last_overflow_iter = -1
        scaler.cur_iter = int(state_dict.get('steps_since_overflow', state_dict['_growth_tracker'] + 1))
        scaler.cur_hysteresis = int(state_dict.get('hysteresis', scaler.delayed_shift))
