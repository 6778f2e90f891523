"""Forward passes that are made for the other ranks' sake, and must change nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ['no_trace']


@contextlib.contextmanager
def no_trace(model: torch.nn.Module) -> Iterator[None]:
    """Put the model's buffers, and the random numbers of Python, numpy and torch, back on leaving.

    Args:
        model (torch.nn.Module): The user's model, or its face.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    # The rank's own GPU only: of several, fork_rng would warn.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                module._buffers[name] = buffer  # a forward pass may put another tensor in its place
