"""``partitioned_init``: a model is built already cut over the ranks, so that no rank ever holds the whole of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from composer.devices import Device
from composer.utils import dist
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from composer_ds.construction import Construction
from composer_ds.ds_config import read_ds_config
from composer_ds.engine import check_environment
from composer_ds.errors import ComposerDSError, ConfigError
from composer_ds.facts import Settings, mapping, offload_device
from composer_ds.partitioned_parameters import PARTITION_SETTINGS
from composer_ds.process_groups import forget_destroyed_groups

__all__ = ['is_building', 'partitioned_init']

_building: Construction | None = None


@contextmanager
def partitioned_init(
    zero_stage: int | None = None,
    offload_optimizer: str | None = None,
    offload_param: str | None = None,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    device: str | Device | None = None,
) -> Iterator[None]:
    """Build a model already partitioned for ZeRO 3: no rank holds more than its part, and a bounded rest.

    Give it what you give to :class:`~composer_ds.DeepSpeed`. With ``zero_stage`` 0, 1 or 2, where each rank keeps
    whole weights, the model is built as usual. Inside of another ``with``, later, a model that was built here can be
    read and changed again.

    Collective: every rank runs the same code inside. Rank 0's values are taken, as DistributedDataParallel does. Starts
    the process group when there is none.

    Args:
        zero_stage (int | None): 0 to 3. Default: None, for the stage in the ds_config.
        offload_optimizer (str | None): Has no effect here; so that both take the same arguments. Default: None.
        offload_param (str | None): ``'cpu'`` keeps the weights in host memory. Default: None.
        ds_config (Mapping[str, Any] | str | Path | None): As for ``DeepSpeed``. Default: None.
        device (str | Device | None): As for the Trainer: ``'cpu'`` or ``'gpu'``. Default: None, a GPU if there is one.

    Yields:
        None: Nothing.

    Raises:
        ConfigError: For settings that cannot be run, and for contexts inside of each other.
        EnvironmentProblem: When deepspeed or a compiler is missing.
        ComposerDSError: When the ranks build different models.
    """
    global _building
    settings = Settings(zero_stage, offload_optimizer, offload_param, read_ds_config(ds_config))
    _check(settings)
    if settings.stage != 3:
        yield
        return
    check_environment()
    dist.initialize_dist(device)
    forget_destroyed_groups()
    zero = {key: settings.zero[key] for key in PARTITION_SETTINGS if settings.zero.get(key, 'auto') != 'auto'}
    if settings.offload('offload_param') == 'cpu':
        given = mapping(settings.zero.get('offload_param'))
        zero['offload_param'] = {**{k: v for k, v in given.items() if v != 'auto'}, 'device': 'cpu'}
    _building = Construction(zero)
    try:
        with ExitStack() as stack:
            stack.enter_context(_loading_one_by_one())
            hooks = (
                register_module_parameter_registration_hook(_building.parameter_registered),
                register_module_module_registration_hook(_building.module_registered),
            )
            for hook in hooks:
                stack.callback(hook.remove)
            with _building:
                yield
        _building.finish(_refuse)
    finally:
        _building = None


def is_building() -> bool:
    """Say whether this runs inside of a :func:`partitioned_init` that partitions.

    Returns:
        bool: Whether it does.
    """
    return _building is not None


def _check(settings: Settings) -> None:
    problems = []
    if settings.zero_stage is None and settings.zero.get('stage', 'auto') == 'auto':
        problems.append(
            'partitioned_init() was not told the ZeRO stage, and without one nothing is partitioned. Give it what you '
            'give to DeepSpeed: partitioned_init(zero_stage=3).'
        )
    elif settings.stage not in (0, 1, 2, 3):
        problems.append(f'partitioned_init(zero_stage={settings.stage!r}): allowed are 0, 1, 2 and 3.')
    elif settings.zero_stage is not None and settings.zero.get('stage', settings.stage) not in ('auto', settings.stage):
        problems.append(
            f'partitioned_init(zero_stage={settings.zero_stage}) and ds_config.zero_optimization.stage='
            f'{settings.zero["stage"]} disagree; leave one out.'
        )
    devices = {offload_device(settings.zero.get('offload_param')), settings.offload_param or 'none'} - {'none', 'auto'}
    if devices - {'cpu'}:
        problems.append(
            f"partitioned_init: offload_param={sorted(devices - {'cpu'})[0]!r}; allowed are None and 'cpu'."
        )
    if settings.stage == 3 and settings.zero.get('zero_hpz_partition_size', 1) not in (1, 'auto'):
        problems.append(
            'ds_config.zero_optimization.zero_hpz_partition_size: its second copy of the weights cannot be made for a '
            'model that is built partitioned; leave it out, or build the model without partitioned_init.'
        )
    if is_building():
        problems.append('partitioned_init inside of partitioned_init: leave the inner one out.')
    if settings.stage == 3 and _others_partition():
        problems.append(
            'partitioned_init: a living transformers.integrations.HfDeepSpeedConfig, or a deepspeed.zero.Init around '
            'it, partitions models, too; leave those out: Hugging Face models need nothing else here.'
        )
    if problems:
        raise ConfigError(problems)


def _others_partition() -> bool:
    # Private to deepspeed (0.19): how many zero.Init contexts are open.
    zero_init = sys.modules.get('deepspeed.runtime.zero.partition_parameters')
    transformers = sys.modules.get('transformers.integrations.deepspeed')
    if zero_init is not None and zero_init.zero_init_context:
        return True
    return transformers is not None and transformers.is_deepspeed_zero3_enabled()


@contextmanager
def _loading_one_by_one() -> Iterator[None]:
    """Keep transformers (5) from reading all of a checkpoint ahead, in threads, of the model that takes it."""
    name = 'HF_DEACTIVATE_ASYNC_LOAD'
    before = os.environ.get(name)
    os.environ[name] = '1'
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _refuse(module: torch.nn.Module, *_: Any) -> None:
    if not is_building():
        raise ComposerDSError(
            f'The weights of {type(module).__name__} are cut over the ranks, as partitioned_init has built them, and '
            'only DeepSpeed(zero_stage=3) can train them. To read or change them before that, do it inside of another '
            '"with composer_ds.partitioned_init(...)"; to use the model without DeepSpeed, call '
            'composer_ds.make_whole(model) on every rank.'
        )
