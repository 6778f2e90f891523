"""ZeRO stages 1, 2 and 3: the fp32 master weights and the optimizer state are in one file for each rank."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_ds.deepspeed_format.contents import Contents, flat_state, module_contents, settings_of
from composer_ds.deepspeed_format.folders import ShardNames
from composer_ds.deepspeed_format.frozen import add_fragments, name_frozen
from composer_ds.deepspeed_format.layout import CutSingly, CutTogether, part_numel
from composer_ds.deepspeed_format.shards import Shards
from composer_ds.errors import CheckpointError

__all__ = ['read_stage_1_or_2', 'read_stage_3', 'stored_world_size']

_OPTIMIZER = 'optimizer_state_dict'
_PARTS_1_2, _STATE_1_2 = 'single_partition_of_fp32_groups', 'base_optimizer_state'
_PARTS_3, _STATE_3 = 'fp32_flat_groups', 'optimizer_state_dict'
Check = Callable[[str, Any], None]


def stored_world_size(stored: Mapping[str, Any]) -> int:
    """Return over how many ranks a checkpoint is spread.

    Args:
        stored (Mapping[str, Any]): The optimizer's part of any rank's file.

    Returns:
        int: The number of ranks.
    """
    counts = stored['partition_count']
    return max(counts) if isinstance(counts, (list, tuple)) else counts


def read_stage_1_or_2(
    shards: Shards, names: ShardNames, model: str, param_shapes: Sequence[dict[str, Any]]
) -> tuple[Contents, Check]:
    """Find all tensors of a checkpoint of stage 1 or 2.

    Args:
        shards (Shards): The files.
        names (ShardNames): Their names.
        model (str): The one with the module's state.
        param_shapes (Sequence[dict[str, Any]]): Of the trained parameters, for each group.

    Returns:
        tuple[Contents, Check]: The tensors, and a check of each rank's file.
    """
    contents = module_contents(shards, model, partitioned=False)
    first = min(names.optimizer)
    stored = _stored(shards, names.optimizer[first], _PARTS_1_2)
    world_size = stored_world_size(stored)
    files = tuple(names.optimizer_name(rank) for rank in range(world_size))
    base = stored[_STATE_1_2]
    # A list under "elastic_checkpoint": one entry a group, without padding, and without the settings.
    rigid = isinstance(base, dict)
    groups = base['param_groups'] if rigid else [{} for _ in base]
    ids = [group['params'][0] if rigid else index for index, group in enumerate(groups)]
    entries = [(base['state'].get(id, {}) if rigid else base[id]) for id in ids]
    parts = stored[_PARTS_1_2]
    # DeepSpeed's ZeRO optimizer cuts the padding off the weights that it saves, and names its stage;
    # its BF16_Optimizer does neither.
    paddings = stored['group_paddings'] if 'zero_stage' in stored else [0] * len(parts)
    partitions = [part.numel() + padding for part, padding in zip(parts, paddings, strict=True)]
    tensors, scalars, why = flat_state(entries, partitions if rigid else [part.numel() for part in parts])
    contents.state_absent_because = why
    layouts = []
    gaps = stored.get('param_alignment_paddings') or [[0] * len(shapes) for shapes in param_shapes]
    for index, (shapes, group) in enumerate(zip(param_shapes, groups, strict=True)):
        places, end = {}, 0
        for (name, shape), gap in zip(shapes.items(), gaps[index], strict=True):
            place = CutTogether(files, (_OPTIMIZER, _PARTS_1_2, index), end, partitions[index])
            places[name], end = (place, math.prod(shape)), end + math.prod(shape)
            last, end = end, end + gap
            below = (_OPTIMIZER, _STATE_1_2, *(('state', ids[index]) if rigid else (index,)))
            state = {
                key: (dtype, CutTogether(files, (*below, key), place.offset, partitions[index]))
                for key, dtype in tensors[index].items()
            }
            contents.add_trained(name, shape, parts[index].dtype, place, state, scalars[index])
        contents.param_groups.append({'params': list(shapes), **settings_of(group)})
        layouts.append((places, last if shapes else 0, partitions[index]))
    name_frozen(contents)
    # With this setting DeepSpeed (to 0.19.8) stores where the parameters would be without it.
    zero = (shards.content(model).get('ds_config') or {}).get('zero_optimization') or {}
    in_turns = bool(zero.get('round_robin_gradients'))

    def check(file: str, content: Any) -> None:
        if file in files:
            stored = _stored(shards, file, _PARTS_1_2, content)
            _check_stage_1_or_2(shards.folder / file, stored, files.index(file), world_size, layouts, in_turns)

    return contents, check


def _check_stage_1_or_2(
    file: Path, stored: dict[str, Any], rank: int, world_size: int, layouts: Sequence[Any], in_turns: bool
) -> None:
    if stored_world_size(stored) != world_size:
        raise CheckpointError(
            f'{file} is of a run on {stored_world_size(stored)} ranks, the others of one on {world_size}.'
        )
    for index, (places, end, partition) in enumerate(layouts):
        has = stored[_PARTS_1_2][index].numel()
        needed = min(max(0, end - rank * partition), partition)
        if has < needed:
            raise CheckpointError(f'{file} holds {has:,} elements of parameter group {index}, not {needed:,}.')
        # DeepSpeed stores where it thinks that each parameter is. Should a version lay them out in another way, this
        # tells, before a wrong weight is read.
        if 'param_slice_mappings' not in stored or in_turns:
            continue
        theirs = {name: (run.start, run.numel) for name, run in stored['param_slice_mappings'][index].items()}
        ours = {}
        for name, (place, numel) in places.items():
            for run in place.pieces(0, numel):
                if run.shard == file.name:
                    ours[name] = run.start, run.numel
        if theirs != ours:
            name = next(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
            raise CheckpointError(
                f'{file} lays out its parameters in a way that is not known here: of {name}, it says '
                f'that it holds (start, length) {theirs.get(name)}, but {ours.get(name)} follows from the shapes. '
                "Convert the checkpoint with DeepSpeed's zero_to_fp32.py, which lies beside it."
            )


def read_stage_3(
    shards: Shards, names: ShardNames, model: str, param_shapes: Sequence[dict[str, Any]]
) -> tuple[Contents, Check]:
    """Find all tensors of a checkpoint of stage 3.

    Args:
        shards (Shards): The files.
        names (ShardNames): Their names.
        model (str): The one with the module's state, of any rank.
        param_shapes (Sequence[dict[str, Any]]): Of the trained parameters, for each sub group.

    Returns:
        tuple[Contents, Check]: The tensors, and a check of each rank's file.

    Raises:
        CheckpointError: When the weights are elsewhere, or laid out in an unknown way.
    """
    contents = module_contents(shards, model, partitioned=True)
    file = names.optimizer[min(names.optimizer)]
    stored = _stored(shards, file, _PARTS_3)
    if 'ds_zero_partition_groups' in stored:
        raise CheckpointError(
            f"{shards.folder / file} spreads experts over ranks; DeepSpeed's ds_to_universal reads it."
        )
    world_size = stored_world_size(stored)
    files = tuple(names.optimizer_name(rank) for rank in range(world_size))
    shapes = {name: shape for group in param_shapes for name, shape in group.items()}
    sizes = [part.numel() for part in stored[_PARTS_3]]
    needed = sum(part_numel(math.prod(shape), world_size) for shape in shapes.values())
    if sum(sizes) != needed:
        nvme = ' They are in offloaded_tensors (NVMe), which cannot be read.' if needed and not sum(sizes) else ''
        raise CheckpointError(
            f'{shards.folder / file} holds {sum(sizes):,} elements of the weights; {needed:,} were expected, from the '
            f'shapes of the parameters in {model}.{nvme}'
        )
    starts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
    groups = stored[_STATE_3]['param_groups']
    ids = [(id, index) for index, group in enumerate(groups) for id in group['params']]
    known = len(ids) == len(sizes)
    if not known:
        ids = [(-1, 0)] * len(sizes)
    entries = [stored[_STATE_3]['state'].get(id, {}) for id, _ in ids]
    tensors, scalars, why = flat_state(entries, sizes)
    contents.state_absent_because = why if known else 'the files do not say which of it belongs to which weights'
    contents.param_groups = [{'params': [], **settings_of(group)} for group in groups]
    weights_keys = tuple((_OPTIMIZER, _PARTS_3, block) for block in range(len(sizes)))
    offset = 0
    for name, shape in shapes.items():
        part = part_numel(math.prod(shape), world_size)
        block = min(max(0, bisect_right(starts, offset) - 1), len(sizes) - 1)
        place = CutSingly(files, part, offset, starts, weights_keys)
        state = {
            key: (
                dtype,
                CutSingly(files, part, offset, starts, tuple((_OPTIMIZER, _STATE_3, 'state', i, key) for i, _ in ids)),
            )
            for key, dtype in tensors[block].items()
        }
        contents.add_trained(name, shape, stored[_PARTS_3][block].dtype, place, state, scalars[block])
        contents.param_groups[ids[block][1]]['params'].append(name)
        offset += part
    if not known:
        contents.param_groups = []
    add_fragments(contents, shards, names, model)

    def check(shard: str, content: Any) -> None:
        if shard in files:
            found = [part.numel() for part in _stored(shards, shard, _PARTS_3, content)[_PARTS_3]]
            if found != sizes:
                raise CheckpointError(f'{shards.folder / shard} is of another run than {file}: its partitions differ.')

    return contents, check


def _stored(shards: Shards, file: str, weights: str, content: Any = None) -> dict[str, Any]:
    content = shards.content(file) if content is None else content
    stored = content.get(_OPTIMIZER) if isinstance(content, dict) else None
    if not isinstance(stored, dict) or weights not in stored:
        raise CheckpointError(f'{shards.folder / file} holds no partitions of the weights (under {weights!r}).')
    return stored
