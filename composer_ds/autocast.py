"""Composer's autocast, kept on inside the engine.

Composer runs the model under ``torch.autocast`` when its precision is ``amp_bf16`` or ``amp_fp16``. On a GPU DeepSpeed
(0.19) switches autocast off around the engine's forward pass, because its weights have 16 bits already; but then a
model that is fed fp32 images, or that adds an fp32 mask, fails on the dtypes, and layer norms and softmax are rounded
where plain Composer keeps them in fp32. On a CPU Composer never switches it on. So it is switched on around the user's
module, inside the engine.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ['autocast_inside']


def autocast_inside(model: torch.nn.Module, device_type: str, dtype: torch.dtype) -> list[RemovableHandle]:
    """Run the model's forward under autocast. Called once, at ``BEFORE_LOAD``.

    Args:
        model (torch.nn.Module): The user's model; it gets a hook before and one after its forward.
        device_type (str): Such as ``'cuda'``.
        dtype (torch.dtype): bf16 or fp16.

    Returns:
        list[RemovableHandle]: Removes the hooks again.
    """
    contexts: list[contextlib.AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        context = torch.autocast(device_type, dtype=dtype)
        context.__enter__()
        contexts.append(context)

    def leave(*_: Any) -> None:
        if contexts:  # empty when an earlier hook has raised
            contexts.pop().__exit__(None, None, None)

    return [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]
