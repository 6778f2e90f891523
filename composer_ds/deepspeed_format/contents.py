"""What a checkpoint holds, in DeepSpeed's names: the common part of all ZeRO stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from composer_ds.checkpoint.source import StoredTensor
from composer_ds.deepspeed_format.layout import Place, Whole
from composer_ds.deepspeed_format.shards import Shards
from composer_ds.errors import CheckpointError

__all__ = ['Contents', 'flat_state', 'module_contents', 'settings_of']


@dataclass
class Contents:
    """Tensors and where they are.

    Args:
        tensors (dict[str, StoredTensor]): By name, each tensor once.
        tied (dict[str, str]): Further names of the same tensor.
        places (dict[tuple[str, str | None], Place]): By name and key of the optimizer state; None for the weights.
        param_groups (list[dict[str, Any]]): The optimizer's, with the names of the parameters under ``'params'``.
        scalar_state (dict[str, dict[str, Any]]): By name, the optimizer state that is not a tensor like the parameter.
        state_absent_because (str | None): Why there is no optimizer state.
        lost (list[str]): Names of parameters of which no file holds the elements.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    places: dict[tuple[str, str | None], Place] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    scalar_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    state_absent_because: str | None = None
    lost: list[str] = field(default_factory=list)

    def add_trained(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        place: Place,
        state: Mapping[str, tuple[torch.dtype, Place]] | None = None,
        scalars: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a trained parameter, or replace what is known of it.

        Args:
            name (str): Its name.
            shape (Sequence[int]): Its shape.
            dtype (torch.dtype): Of the master weights.
            place (Place): Where they are.
            state (Mapping[str, tuple[torch.dtype, Place]] | None): Its optimizer state. Default: None.
            scalars (Mapping[str, Any] | None): Its optimizer state that is not a tensor like it. Default: None.
        """
        state = state or {}
        dtypes = {key: dtype_and_place[0] for key, dtype_and_place in state.items()}
        self.tensors[name] = StoredTensor(name, torch.Size(shape), dtype, 'trained', dtypes)
        self.places[name, None] = place
        for key, (_, state_place) in state.items():
            self.places[name, key] = state_place
        if scalars:
            self.scalar_state[name] = dict(scalars)


def module_contents(shards: Shards, shard: str, partitioned: bool) -> Contents:
    """Read what the module's own state says: names in order, buffers, ties, and all weights that are whole there.

    Args:
        shards (Shards): The files.
        shard (str): The one with the module's state.
        partitioned (bool): Whether its parameters are placeholders, as under stage 3; these become ``lost`` until
            another file has them.

    Returns:
        Contents: Parameters are of kind ``'unknown'``.

    Raises:
        CheckpointError: When the module's state is not there.
    """
    content = shards.content(shard)
    module = content.get('module') if isinstance(content, dict) else None
    if not isinstance(module, dict):
        raise CheckpointError(
            f"{shards.folder / shard} holds no state of a module, under the key 'module': it is of a pipeline, or not "
            'of DeepSpeed.'
        )
    buffers = set(content.get('buffer_names') or ())
    shared = content.get('shared_params') or {}
    contents, seen = Contents(), {}
    for name, value in module.items():
        # Quantised modules, and some of their own making, put other things into their state.
        if not isinstance(value, torch.Tensor):
            continue
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if name in shared and (partitioned or module.get(shared[name], value).shape == value.shape):
            contents.tied[name] = shared[name]
        elif (name in buffers or not partitioned) and value.numel() and same in seen:
            contents.tied[name] = seen[same]
        elif partitioned and name not in buffers:
            contents.lost.append(name)
        else:
            seen[same] = name
            kind = 'buffer' if name in buffers else 'unknown'
            contents.tensors[name] = StoredTensor(name, value.shape, value.dtype, kind)
            contents.places[name, None] = Whole(shard, ('module', name))
    return contents


def flat_state(
    entries: Sequence[Mapping[str, Any]], sizes: Sequence[int]
) -> tuple[list[dict[str, torch.dtype]], list[dict[str, Any]], str | None]:
    """Sort an optimizer's state of flat vectors into what is cut like the vector and what is one value for all of it.

    Args:
        entries (Sequence[Mapping[str, Any]]): The state of each vector.
        sizes (Sequence[int]): Elements of each vector.

    Returns:
        tuple[list[dict[str, torch.dtype]], list[dict[str, Any]], str | None]: For each vector the dtypes of the
            first and the second kind itself, and why not, when there is something of neither kind.
    """
    tensors, scalars = [], []
    for entry, size in zip(entries, sizes, strict=True):
        tensors.append({})
        scalars.append({})
        for key, value in entry.items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                scalars[-1][key] = value.item() if isinstance(value, torch.Tensor) else value
            elif value.numel() == size:
                tensors[-1][key] = value.dtype
            else:
                why = f'its {key!r} has {value.numel():,} elements for {size:,} of the weights'
                return [{} for _ in entries], [{} for _ in entries], f'the optimizer does not go by elements: {why}'
    return tensors, scalars, None


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group.

    Args:
        group (Mapping[str, Any]): As the optimizer stored it.

    Returns:
        dict[str, Any]: Without the parameters.
    """
    # A copy of a tensor (a learning rate can be one): what is mapped must not outlive its file.
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ('params', 'param_names')
    }
