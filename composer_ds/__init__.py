"""DeepSpeed for MosaicML Composer: ZeRO partitioning and offload as an algorithm of Composer's Trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from composer_ds.errors import ComposerDSError, ConfigError, EnvironmentProblem, ModelOutputError, TrainingError

if TYPE_CHECKING:
    from composer_ds.algorithm import DeepSpeed
    from composer_ds.wandb_logger import WandBLogger
    from composer_ds.whole import make_whole

__version__ = '0.1.0'

__all__ = [
    'ComposerDSError',
    'ConfigError',
    'DeepSpeed',
    'EnvironmentProblem',
    'ModelOutputError',
    'TrainingError',
    'WandBLogger',
    'make_whole',
]

# Composer takes seconds to import; `run.py --help` and an error in a YAML file need not wait for it.
_LAZY = {
    'DeepSpeed': 'composer_ds.algorithm',
    'WandBLogger': 'composer_ds.wandb_logger',
    'make_whole': 'composer_ds.whole',
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
