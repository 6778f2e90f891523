"""Whether a checkpoint belongs to this model and this optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer_ds.checkpoint.source import CheckpointSource
from composer_ds.errors import CheckpointError
from composer_ds.faces import OptimizerFace
from composer_ds.partitions import full_shape

__all__ = ['names_in_checkpoint', 'problems_of_optimizer']

# Composer's HuggingFaceModel has its model under this name; other trainers save the model itself.
_PREFIX = 'model.'
_SHOWN = 5


def names_in_checkpoint(source: CheckpointSource, named: Mapping[str, Any], strict: bool) -> dict[str, str]:
    """Find the stored tensor for each tensor of the model.

    Args:
        source (CheckpointSource): The checkpoint.
        named (Mapping[str, Any]): The model's parameters and buffers, by name.
        strict (bool): Whether a missing or unexpected name is an error.

    Returns:
        dict[str, str]: By the model's name, the name in ``source.tensors``.

    Raises:
        CheckpointError: With all names and shapes that do not fit.
    """
    stored = {name: name for name in source.tensors} | source.tied
    names = {name for name, value in named.items() if torch.is_tensor(value)}
    stored = max(_with_other_prefix(stored), key=lambda one: len(one.keys() & names))
    missing, unexpected = sorted(names - stored.keys()), sorted(stored.keys() - names)
    shapes = [
        f'{name} has the shape {tuple(source.tensors[stored[name]].shape)} in the checkpoint, and '
        f'{tuple(full_shape(named[name]))} in the model'
        for name in names & stored.keys()
        if source.tensors[stored[name]].shape != full_shape(named[name])
    ]
    problems = sorted(shapes)
    if not names & stored.keys():
        problems.append(f'no name is that of a tensor of the model ({_some(stored)} instead of {_some(names)})')
    elif strict and missing:
        problems.append(f'it lacks {_some(missing)}')
    if strict and unexpected and names & stored.keys():
        problems.append(f'the model lacks {_some(unexpected)}')
    if problems:
        raise CheckpointError(
            f'{source.path} is of another model: {"; ".join(problems)}. Build the model as it was'
            + ('.' if shapes or not strict else ', or give load_sharded strict=False to load what both have.')
        )
    return {name: stored[name] for name in names & stored.keys()}


def _with_other_prefix(stored: dict[str, str]) -> list[dict[str, str]]:
    """Return the names as they are, and with and without the prefix of Composer's HuggingFaceModel."""
    found = [stored, {_PREFIX + name: to for name, to in stored.items()}]
    if all(name.startswith(_PREFIX) for name in stored):
        found.append({name.removeprefix(_PREFIX): to for name, to in stored.items()})
    return found


def _some(names: Any) -> str:
    names = sorted(names)
    return ', '.join(names[:_SHOWN]) + (f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else '')


def problems_of_optimizer(
    saved_class: str | None, saved_groups: list[dict[str, Any]], names: Mapping[str, str], optimizer: OptimizerFace
) -> list[str]:
    """Find where the optimizer is another one than that of the checkpoint.

    Args:
        saved_class (str | None): The class of the saved one; None where the checkpoint does not say.
        saved_groups (list[dict[str, Any]]): Its parameter groups, with names as ``params``.
        names (Mapping[str, str]): From :func:`names_in_checkpoint`.
        optimizer (OptimizerFace): Ours.

    Returns:
        list[str]: One sentence each.
    """
    instead = 'Build the optimizer as it was, or give load_sharded weights_only=True to begin with a new one.'
    if saved_class not in (None, type(optimizer).__qualname__):
        return [f'The checkpoint is of the optimizer {saved_class}, this is {type(optimizer).__qualname__}. {instead}']
    own = optimizer._partitions.names
    ours = [[names.get(own.get(p, ''), '?') for p in group['params'] if p in own] for group in optimizer.param_groups]
    trained = {name for group in ours for name in group}
    theirs = [[name for name in group['params'] if name in trained] for group in saved_groups]
    if [sorted(group) for group in ours if group] != [sorted(group) for group in theirs if group]:
        return [
            f'The checkpoint has parameter groups of {[len(group) for group in theirs]} trained parameters, this '
            f'optimizer has {[len(group) for group in ours]}, or other parameters in them. {instead}'
        ]
    if saved_class is None:
        lacking = optimizer.param_groups[0].keys() - saved_groups[0].keys() - {'initial_lr'}
        # Settings that versions of torch have added, with defaults.
        lacking -= {'foreach', 'maximize', 'capturable', 'differentiable', 'fused', 'decoupled_weight_decay'}
        if lacking:
            return [f'The checkpoint is of another optimizer: its settings lack {_some(lacking)}. {instead}']
    return []
