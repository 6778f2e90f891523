"""The plan and the environment of a run in plain types, for loggers and reports."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch
from composer.loggers import ConsoleLogger, Logger, ProgressBarLogger
from composer.utils import dist

from composer_ds.ownership import Plan
from composer_ds.plan_keys import ENVIRONMENT, PLAN

__all__ = ['environment_record', 'log_record', 'plan_record']

_PACKAGES = ('composer-ds', 'mosaicml', 'deepspeed', 'torch', 'wandb')


def log_record(plan: Plan, logger: Logger) -> None:
    """Give the plan and the environment to whatever logs, as hyperparameters. Called on every rank.

    The terminal is left out: it has the plan's block.

    Args:
        plan (Plan): What is run.
        logger (Logger): Composer's logger.
    """
    record = {PLAN: plan_record(plan), ENVIRONMENT: environment_record()}
    for destination in logger.destinations:
        if not isinstance(destination, ConsoleLogger | ProgressBarLogger):
            destination.log_hyperparameters(record)


def plan_record(plan: Plan) -> dict[str, Any]:
    """Write a plan in plain types.

    Args:
        plan (Plan): What is run.

    Returns:
        dict[str, Any]: Its fields; each of the ``decisions`` by its setting, with value, owner and source.
    """
    decisions = {
        one.setting: {'value': _plain(one.value), 'owner': one.owner, 'source': one.source} for one in plan.decisions
    }
    return {
        'zero_stage': plan.zero_stage,
        'offload_optimizer': plan.offload_optimizer,
        'offload_param': plan.offload_param,
        'precision': plan.precision,
        'weights': plan.weights,
        'fused_adam': plan.fused_adam,
        'ds_config': _plain(plan.ds_config),
        'decisions': decisions,
        'notes': list(plan.notes),
    }


def environment_record() -> dict[str, Any]:
    """Describe where a run runs: as this rank sees it.

    Returns:
        dict[str, Any]: Versions by package, numbers of ranks and nodes, the device.
    """
    versions = {'python': platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    world_size = dist.get_world_size()
    return {
        'versions': versions,
        'world_size': world_size,
        'nodes': max(1, world_size // dist.get_local_world_size()),
        'device': torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU',
        'platform': platform.platform(),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
