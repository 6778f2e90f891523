"""Checkpoints that DeepSpeed's ``ds_to_universal`` made: a folder for each parameter, ``zero/NAME/``.

Buffers and frozen parameters are in the files of the ranks, which it copies beside ``zero``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from composer_ds.deepspeed_format.contents import Contents, module_contents, settings_of
from composer_ds.deepspeed_format.folders import ShardNames
from composer_ds.deepspeed_format.frozen import add_fragments, name_frozen
from composer_ds.deepspeed_format.layout import Whole
from composer_ds.deepspeed_format.shards import Shards
from composer_ds.errors import CheckpointError

__all__ = ['read_universal']

_SETTINGS = 'zero/optimizer_state.pt'


def read_universal(shards: Shards, names: ShardNames, model: str, param_shapes: Sequence[dict[str, Any]]) -> Contents:
    """Find all tensors of a universal checkpoint. State that is in no file of its own is not read: Adam's is.

    Args:
        shards (Shards): The files.
        names (ShardNames): Their names.
        model (str): The one with the module's state, of any rank.
        param_shapes (Sequence[dict[str, Any]]): Of the trained parameters, for each (sub) group.

    Returns:
        Contents: The tensors.

    Raises:
        CheckpointError: When the parameters' folders disagree with the shapes.
    """
    partitioned = None not in names.model
    contents = module_contents(shards, model, partitioned)
    for name, shape in ((name, shape) for group in param_shapes for name, shape in group.items()):
        folder = f'zero/{name}'
        weights = _tensor(shards, f'{folder}/fp32.pt')
        # Of stage 3 they are flat, with the padding of the last rank.
        if weights is None or weights.numel() < math.prod(shape):
            raise CheckpointError(f'{shards.folder / folder} has no fp32.pt with {math.prod(shape):,} elements.')
        state = {
            key: (value.dtype, Whole(f'{folder}/{key}.pt', _keys(shards, f'{folder}/{key}.pt')))
            for key in sorted(path.stem for path in (shards.folder / folder).glob('*.pt') if path.stem != 'fp32')
            if (value := _tensor(shards, f'{folder}/{key}.pt')) is not None and value.shape == weights.shape
            if key != 'step'
        }
        place = Whole(f'{folder}/fp32.pt', _keys(shards, f'{folder}/fp32.pt'))
        step = _tensor(shards, f'{folder}/step.pt')
        scalars = {} if step is None or step.numel() != 1 else {'step': step.item()}
        contents.add_trained(name, shape, weights.dtype, place, state, scalars)
    if partitioned:
        add_fragments(contents, shards, names, model)
    else:
        name_frozen(contents)
    if (shards.folder / _SETTINGS).is_file():
        groups = shards.content(_SETTINGS)['param_groups']
        contents.param_groups = [{'params': [], **settings_of(group)} for group in groups]
        # One entry for each (sub) group of parameters, numbered through all parameter groups.
        owners = [index for index, group in enumerate(groups) for _ in group['params']]
        # Of stage 3, what is not a tensor has no files of its own.
        state = shards.content(_SETTINGS).get('optimizer_state_dict', {}).get('state', {})
        ids = [id for group in groups for id in group['params']]
        for index, id, group in zip(owners, ids, param_shapes, strict=True):
            contents.param_groups[index]['params'] += list(group)
            for name in group if 'step' in state.get(id, {}) else ():
                contents.scalar_state.setdefault(name, {'step': float(state[id]['step'])})
    return contents


def _tensor(shards: Shards, shard: str) -> torch.Tensor | None:
    if not (shards.folder / shard).is_file():
        return None
    value = shards.content(shard)
    value = value.get('param') if isinstance(value, dict) else value
    return torch.tensor(value) if isinstance(value, (int, float)) else value


def _keys(shards: Shards, shard: str) -> tuple[str, ...]:
    return ('param',) if isinstance(shards.content(shard), dict) else ()
