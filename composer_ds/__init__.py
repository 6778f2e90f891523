"""DeepSpeed for MosaicML Composer: ZeRO partitioning and offload as an algorithm of Composer's Trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from composer_ds.errors import (
    CheckpointError,
    ComposerDSError,
    ConfigError,
    EnvironmentProblem,
    ModelOutputError,
    TrainingError,
)

if TYPE_CHECKING:
    from composer_ds.algorithm import DeepSpeed
    from composer_ds.callbacks import (
        CommunicationMonitor,
        ConsolidatedWeightsSaver,
        DeepSpeedMonitor,
        ShardedCheckpointSaver,
        ZeroMemoryMonitor,
    )
    from composer_ds.counts import OptimizerSteps, optimizer_steps
    from composer_ds.events import Event
    from composer_ds.partitioned_construction import partitioned_init
    from composer_ds.sharded.choice import LoadSharded
    from composer_ds.wandb_logger import WandBLogger
    from composer_ds.whole import make_whole

__version__ = '0.1.0'

__all__ = [
    'CheckpointError',
    'CommunicationMonitor',
    'ComposerDSError',
    'ConfigError',
    'ConsolidatedWeightsSaver',
    'DeepSpeed',
    'DeepSpeedMonitor',
    'EnvironmentProblem',
    'Event',
    'LoadSharded',
    'ModelOutputError',
    'OptimizerSteps',
    'ShardedCheckpointSaver',
    'TrainingError',
    'WandBLogger',
    'ZeroMemoryMonitor',
    'make_whole',
    'optimizer_steps',
    'partitioned_init',
]

# Composer takes seconds to import; `run.py --help` and an error in a YAML file need not wait for it.
_LAZY = {
    'CommunicationMonitor': 'composer_ds.callbacks',
    'ConsolidatedWeightsSaver': 'composer_ds.callbacks',
    'DeepSpeed': 'composer_ds.algorithm',
    'DeepSpeedMonitor': 'composer_ds.callbacks',
    'Event': 'composer_ds.events',
    'LoadSharded': 'composer_ds.sharded.choice',
    'OptimizerSteps': 'composer_ds.counts',
    'ShardedCheckpointSaver': 'composer_ds.callbacks',
    'WandBLogger': 'composer_ds.wandb_logger',
    'ZeroMemoryMonitor': 'composer_ds.callbacks',
    'make_whole': 'composer_ds.whole',
    'optimizer_steps': 'composer_ds.counts',
    'partitioned_init': 'composer_ds.partitioned_construction',
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
