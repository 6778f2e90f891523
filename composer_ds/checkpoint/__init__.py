"""Checkpoints that survive: files complete or absent, errors on every rank, checks before loading."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_ds.checkpoint.saver import save_safely
    from composer_ds.checkpoint.verification import verify_loads
    from composer_ds.checkpoint.writing import save_checkpoint

__all__ = ['save_checkpoint', 'save_safely', 'verify_loads']

# Commands read checkpoints without Composer, which takes seconds to import.
_LAZY = {
    'save_checkpoint': 'composer_ds.checkpoint.writing',
    'save_safely': 'composer_ds.checkpoint.saver',
    'verify_loads': 'composer_ds.checkpoint.verification',
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
