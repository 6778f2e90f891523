"""Checkpoints that survive: files complete or absent, errors on every rank, checks before loading."""

from composer_ds.checkpoint.damage import damage
from composer_ds.checkpoint.saver import save_safely
from composer_ds.checkpoint.verification import verify_loads
from composer_ds.checkpoint.writing import save_checkpoint

__all__ = ['damage', 'save_checkpoint', 'save_safely', 'verify_loads']
