"""Forward passes beside the engine: those of evaluation and of text generation.

Composer trains and predicts with the model face, which runs the engine. But it evaluates, and computes train metrics,
with ``eval_forward`` of the user's own model, which mostly calls ``self.forward``; and ``generate`` of a Hugging Face
model calls the inner model. There, what the engine does around a forward pass is missing: autocast, and under ZeRO 3
the root's own parameters and those that are used outside of the module that owns them (a tied embedding, say). So
while the engine is open these methods are overridden on the user's objects, to do it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from composer_ds.generation import generating_models
from composer_ds.ownership import Plan

__all__ = ['surround_evaluation']


def surround_evaluation(model: torch.nn.Module, ds_engine: Any, plan: Plan) -> Callable[[], None]:
    """Override ``eval_forward`` of the model, and ``generate`` of Hugging Face models in it. Called at ``BEFORE_LOAD``.

    Collective under ZeRO 3, afterwards: every rank calls these methods equally often.

    Args:
        model (torch.nn.Module): The user's model; the face shares its attributes.
        ds_engine (Any): The ``deepspeed.DeepSpeedEngine``.
        plan (Plan): What is run.

    Returns:
        Callable[[], None]: Takes it back.
    """

    @contextlib.contextmanager
    def beside_the_engine() -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            if plan.autocast_dtype is not None:
                contexts.enter_context(torch.autocast(ds_engine.device.type, dtype=plan.autocast_dtype))
            if plan.zero_stage == 3:
                contexts.enter_context(_weights_at_hand(model))
            yield

    if plan.zero_stage != 3 and plan.autocast_dtype is None:
        return lambda: None
    methods: list[tuple[Any, str]] = [(model, 'eval_forward')] if hasattr(model, 'eval_forward') else []
    methods += [(inner, 'generate') for inner in generating_models(model)]
    overrides = contextlib.ExitStack()
    for owner, name in methods:
        overrides.callback(_override(owner, name, beside_the_engine))
    return overrides.close


def _override(owner: Any, name: str, context: Callable[[], Any]) -> Callable[[], None]:
    before = vars(owner).get(name)
    method = getattr(owner, name)

    @functools.wraps(method)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    vars(owner)[name] = within

    def take_back() -> None:
        if vars(owner).get(name) is within:
            del vars(owner)[name]
            if before is not None:
                vars(owner)[name] = before

    return take_back


@contextlib.contextmanager
def _weights_at_hand(model: torch.nn.Module) -> Iterator[None]:
    """Gather the root's own parameters, and let each other one that is used outside of its module be gathered then.

    Collective. After an error nothing stays gathered here, and nothing is communicated.
    """
    import deepspeed

    # Private to deepspeed 0.19.8, as in DeepSpeedEngine._forward_prologue: with the flag, a partitioned parameter is
    # gathered when it is read, and remembered for the module on top of the stack.
    # tests/distributed/test_evaluation.py evaluates a model that needs it, and fails when it changes.
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    flags: list[Any] = [m._parameters for m in model.modules() if hasattr(m._parameters, '_in_forward')]
    if any(flag._in_forward for flag in flags):  # inside of the engine's forward, or of another of these methods
        yield
        return
    own: list[Any] = list(model.parameters(recurse=False))
    partitioned = [parameter for parameter in own if parameter.ds_status != ZeroParamStatus.AVAILABLE]
    depth = len(FWD_MODULE_STACK)
    with deepspeed.zero.GatheredParameters(partitioned):
        FWD_MODULE_STACK.append(model)
        for flag in flags:
            flag._in_forward = True
        try:
            yield
        finally:
            for flag in flags:
                flag._in_forward = False
            del FWD_MODULE_STACK[depth:]  # an error leaves more on it
