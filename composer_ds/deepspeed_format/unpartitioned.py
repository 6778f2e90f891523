"""Stage 0: every rank has everything, and one file holds the module and the whole state of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from composer_ds.deepspeed_format.contents import Contents, flat_state, module_contents, settings_of
from composer_ds.deepspeed_format.layout import CutTogether, Keys, Place, Whole
from composer_ds.deepspeed_format.shards import Shards

__all__ = ['read_stage_0']

# Of each master weight, so many elements are compared with the weight in 16 bits.
_COMPARED_ELEMENTS = 4096
_UNCERTAIN = (
    'a checkpoint of stage 0 stores it by number, and which parameter has which number is certain only with one '
    'parameter group and nothing frozen, or with an optimizer that was given named parameters'
)


@dataclass
class _Slot:
    """What the optimizer has for one of its parameters."""

    shape: torch.Size | None = None
    master: Place | None = None
    state: dict[str, tuple[torch.dtype, Place]] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


def read_stage_0(shards: Shards, model: str) -> Contents:
    """Find all tensors of a checkpoint without ZeRO.

    The optimizer's state is by number, and nothing says which parameter has which number, except when the optimizer
    was given named parameters. By torch's convention the numbers follow the order of ``module.parameters()``; this is
    taken for granted only where there is one parameter group, no parameter is left out, and all shapes (and, in 16
    bits, the first elements of the master weights) agree.

    Args:
        shards (Shards): The files.
        model (str): The one with the module and the optimizer.

    Returns:
        Contents: The tensors. Without optimizer state and master weights where the order is not certain; then the
            weights are the module's, in its dtype, and ``state_absent_because`` says why.
    """
    contents = module_contents(shards, model, partitioned=False)
    optimizer = shards.content(model).get('optimizer')
    if not isinstance(optimizer, dict):
        contents.state_absent_because = 'none was saved'
        return contents
    groups = optimizer.get('optimizer_state_dict', optimizer)['param_groups']
    names = [name for name, tensor in contents.tensors.items() if tensor.kind == 'unknown']
    if named := all('param_names' in group for group in groups):
        known, names = set(names), [name for group in groups for name in group['param_names']]
        named = known.issuperset(names)
    if not named and len(groups) > 1:
        slots = None
    elif 'fp32_groups_flat' in optimizer:
        slots = _flat_slots(optimizer, model, [math.prod(contents.tensors[name].shape) for name in names])
    else:
        slots = _slots(optimizer, model)
    if slots is None or len(slots) != len(names) or not _agree(shards, contents, names, slots):
        contents.state_absent_because = _UNCERTAIN
        return contents
    for name, slot in zip(names, slots, strict=True):
        tensor = contents.tensors[name]
        if slot.master is None:
            contents.add_trained(
                name, tensor.shape, tensor.dtype, contents.places[name, None], slot.state, slot.scalars
            )
        else:
            contents.add_trained(name, tensor.shape, torch.float32, slot.master, slot.state, slot.scalars)
    for group in groups:
        of_group = group['param_names'] if named else names
        contents.param_groups.append({'params': list(of_group), **settings_of(group)})
    return contents


def _slots(optimizer: Mapping[str, Any], model: str) -> list[_Slot] | None:
    """Of a plain optimizer in fp32, and of DeepSpeed's "unfused" one in 16 bits: a number for each parameter."""
    in_16_bits = 'fp32_groups' in optimizer
    inner = optimizer['optimizer_state_dict'] if in_16_bits else optimizer
    below: Keys = ('optimizer', 'optimizer_state_dict', 'state') if in_16_bits else ('optimizer', 'state')
    slots = []
    for index, group in enumerate(inner['param_groups']):
        for position, id in enumerate(group['params']):
            slot = _Slot()
            if in_16_bits:
                slot.shape = optimizer['fp32_groups'][index][position].shape
                slot.master = Whole(model, ('optimizer', 'fp32_groups', index, position))
            for key, value in inner['state'].get(id, {}).items():
                # Adam counts its steps in a tensor without dimensions; a parameter may have none either.
                if isinstance(value, torch.Tensor) and key != 'step':
                    if slot.shape is not None and value.shape != slot.shape:
                        return None
                    slot.shape = value.shape
                    slot.state[key] = value.dtype, Whole(model, (*below, id, key))
                elif value is not None:
                    slot.scalars[key] = value.item() if isinstance(value, torch.Tensor) else value
            slots.append(slot)
    return slots


def _flat_slots(optimizer: Mapping[str, Any], model: str, sizes: list[int]) -> list[_Slot] | None:
    """Of DeepSpeed's "fused" optimizer in 16 bits: a vector for each parameter group, and here there is one group."""
    if len(optimizer['fp32_groups_flat']) != 1 or optimizer['fp32_groups_flat'][0].numel() != sum(sizes):
        return None
    inner = optimizer['optimizer_state_dict']
    id = inner['param_groups'][0]['params'][0]
    tensors, scalars, why = flat_state([inner['state'].get(id, {})], [sum(sizes)])
    if why is not None:
        return None
    slots, offset = [], 0
    for size in sizes:
        state: dict[str, tuple[torch.dtype, Place]] = {
            key: (
                dtype,
                CutTogether((model,), ('optimizer', 'optimizer_state_dict', 'state', id, key), offset, sum(sizes)),
            )
            for key, dtype in tensors[0].items()
        }
        master = CutTogether((model,), ('optimizer', 'fp32_groups_flat', 0), offset, sum(sizes))
        slots.append(_Slot(None, master, state, scalars[0]))
        offset += size
    return slots


def _agree(shards: Shards, contents: Contents, names: list[str], slots: list[_Slot]) -> bool:
    """Compare what is known of each parameter from both sides."""
    for name, slot in zip(names, slots, strict=True):
        tensor, weights = contents.tensors[name], contents.places[name, None]
        if slot.shape is not None and slot.shape != tensor.shape:
            return False
        if slot.master is None:
            continue
        numel = min(_COMPARED_ELEMENTS, math.prod(tensor.shape))
        master = shards.read(slot.master.pieces(0, numel), numel, torch.float32)
        if not torch.equal(master.to(tensor.dtype), shards.read(weights.pieces(0, numel), numel, tensor.dtype)):
            return False
    return True
