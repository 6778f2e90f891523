"""Forward passes of evaluation, which Composer makes with the user's own model beside the engine.

Its ``eval_forward`` mostly calls ``self.forward``: hooks of the root module, which gather the root's own parameters
under ZeRO 3 and switch autocast on, do not run. So both is done around it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from composer_ds.ownership import Plan

__all__ = ['EvaluationForward']


class EvaluationForward:
    """What surrounds each forward pass of evaluation.

    Args:
        ds_engine (Any): The ``deepspeed.DeepSpeedEngine``.
        plan (Plan): What is run.
    """

    def __init__(self, ds_engine: Any, plan: Plan):
        self.ds_engine = ds_engine
        self.plan = plan
        self._contexts = contextlib.ExitStack()

    def enter(self) -> None:
        """Prepare the forward pass. Called at ``EVAL_BEFORE_FORWARD``. Collective under ZeRO 3."""
        self._contexts = contextlib.ExitStack()
        if self.plan.zero_stage == 3:
            import deepspeed

            roots = list(self.ds_engine.module.parameters(recurse=False))
            self._contexts.enter_context(deepspeed.zero.GatheredParameters(roots))
        if self.plan.autocast_dtype is not None:
            device = self.ds_engine.device.type
            self._contexts.enter_context(torch.autocast(device, dtype=self.plan.autocast_dtype))

    def leave(self) -> None:
        """Undo it. Called at ``EVAL_AFTER_FORWARD``. Collective under ZeRO 3."""
        self._contexts.close()
