"""Launchers other than Composer's: they describe the same ranks by other environment variables."""

from __future__ import annotations

import os

__all__ = ['complete_environment']

# What Composer (0.32) wants to know, and what torchrun and DeepSpeed's launcher call it.
_SAME = {'NODE_RANK': ('GROUP_RANK', 'CROSS_RANK'), 'LOCAL_WORLD_SIZE': ('LOCAL_SIZE',)}


def complete_environment() -> None:
    """Set the variables that Composer needs, where a launcher has set others that say the same.

    Called before the process group is initialized, on every rank. Without a launcher it does nothing.
    """
    if 'RANK' not in os.environ:
        return
    for name, others in _SAME.items():
        found = next((os.environ[other] for other in others if other in os.environ), None)
        if name not in os.environ and found is not None:
            os.environ[name] = found
