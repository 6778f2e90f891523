"""Callbacks for Trainers that train with DeepSpeed. Each has the table of its keys in its docstring."""

from __future__ import annotations

from composer_ds.callbacks.communication_monitor import CommunicationMonitor
from composer_ds.callbacks.consolidated_weights import ConsolidatedWeightsSaver
from composer_ds.callbacks.deepspeed_monitor import DeepSpeedMonitor
from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver
from composer_ds.callbacks.zero_memory_monitor import ZeroMemoryMonitor

__all__ = [
    'CommunicationMonitor',
    'ConsolidatedWeightsSaver',
    'DeepSpeedMonitor',
    'ShardedCheckpointSaver',
    'ZeroMemoryMonitor',
]
