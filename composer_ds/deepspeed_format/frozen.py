"""Frozen parameters: whole in the module's state, but cut into fragments under stage 3."""

from __future__ import annotations

import math

import torch

from composer_ds.checkpoint.source import StoredTensor
from composer_ds.deepspeed_format.contents import Contents
from composer_ds.deepspeed_format.folders import ShardNames
from composer_ds.deepspeed_format.layout import CutSingly, part_numel
from composer_ds.deepspeed_format.shards import Shards

__all__ = ['add_fragments', 'name_frozen']


def name_frozen(contents: Contents) -> None:
    """Call frozen what no optimizer has, under stages 1 and 2.

    Args:
        contents (Contents): With all trained parameters; changed in place.
    """
    for name, tensor in contents.tensors.items():
        if tensor.kind == 'unknown':
            contents.tensors[name] = StoredTensor(name, tensor.shape, tensor.dtype, 'frozen')


def add_fragments(contents: Contents, shards: Shards, names: ShardNames, model: str) -> None:
    """Add the frozen parameters of a checkpoint of stage 3.

    Args:
        contents (Contents): With all others; changed in place.
        shards (Shards): The files.
        names (ShardNames): Their names.
        model (str): The one with the module's state, of any rank.
    """
    content = shards.content(model)
    files = tuple(names.model_name(rank) for rank in range(content['dp_world_size']))
    fragments = content.get('frozen_param_fragments') or {}
    for name, shape in (content.get('frozen_param_shapes') or {}).items():
        # DeepSpeed also puts parameters without elements here, whoever trains them.
        if name in contents.tied or name in contents.tensors:
            continue
        contents.tensors[name] = StoredTensor(name, torch.Size(shape), fragments[name].dtype, 'frozen')
        part = part_numel(math.prod(shape), len(files))
        contents.places[name, None] = CutSingly(files, part, 0, (0,), (('frozen_param_fragments', name),))
    contents.lost = [name for name in contents.lost if name not in contents.tensors]
    # In the order of the module, in which ``state_dict`` has them.
    order = {name: index for index, name in enumerate(content['module'])}
    ordered = sorted(contents.tensors, key=lambda name: order.get(name, len(order)))
    contents.tensors = {name: contents.tensors[name] for name in ordered}
