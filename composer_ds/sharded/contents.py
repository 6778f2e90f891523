"""What this rank contributes to a sharded checkpoint: its partitions, and on rank 0 all that is not partitioned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from composer.core import State
from composer.utils import dist, ensure_tuple, reproducibility

from composer_ds.checkpoint.agreement import agreeing
from composer_ds.consolidation import PendingTensor, consolidating_later
from composer_ds.errors import CheckpointError
from composer_ds.faces import ModelFace, OptimizerFace
from composer_ds.frozen import run_of_frozen
from composer_ds.partitions import Partitions, full_numel, full_shape
from composer_ds.sharded.manifest import TensorEntry, state_key, weights_key
from composer_ds.sharded.run_tensor import RunTensor

__all__ = ['Contents', 'collect', 'named_tensors']


@dataclass
class Contents:
    """What is written.

    Args:
        shards (dict[str, RunTensor]): This rank's runs, by DCP's keys; they lie in the live memory of the engine.
        tensors (dict[str, TensorEntry]): Of the manifest, alike on all ranks.
        tied (dict[str, str]): Of the manifest, alike on all ranks.
        param_groups (list[list[str]]): Names of parameters; empty without optimizer.
        optimizer (str | None): The class of the optimizer.
        rest (dict[str, Any]): What goes into ``state.pt``.
        pending (list[PendingTensor]): Tensors in ``rest`` that are put together when it is written.
    """

    shards: dict[str, RunTensor]
    tensors: dict[str, TensorEntry]
    tied: dict[str, str]
    param_groups: list[list[str]] = field(default_factory=list)
    optimizer: str | None = None
    rest: dict[str, Any] = field(default_factory=dict)
    pending: list[PendingTensor] = field(default_factory=list)

    def to_host(self) -> None:
        """Copy the runs to host memory, so that training can go on while they are written."""
        for key, shard in self.shards.items():
            # A run lies in a longer flat partition, of which nothing else is to be kept alive.
            run = torch.empty_like(shard.run, device='cpu', pin_memory=shard.run.is_cuda)
            run.copy_(shard.run, non_blocking=True)
            self.shards[key] = RunTensor(run, shard.start, shard.shape[0])
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def collect(state: State, weights_only: bool = False) -> Contents:
    """Collect what a checkpoint holds.

    Collective: called between two batches, on every rank.

    Args:
        state (State): Composer's state.
        weights_only (bool): Whether to leave out everything but the model. Default: False.

    Returns:
        Contents: Of this rank.

    Raises:
        CheckpointError: On every rank, when the model's ``state_dict`` leaves out what is trained.
    """
    model: Any = state.model
    assert isinstance(model, ModelFace)
    partitions = model._partitions
    tensors: dict[str, TensorEntry] = {}
    tied: dict[str, str] = {}
    shards: dict[str, RunTensor] = {}
    others: dict[str, Any] = {}
    first: dict[int, str] = {}
    kinds = {id(parameter): 'frozen' for parameter in model.parameters()}
    kinds |= {id(parameter): 'trained' for parameter in partitions.names}
    kinds |= {id(buffer): 'buffer' for buffer in model.buffers()}
    for name, tensor in named_tensors(model).items():
        if id(tensor) not in kinds:
            others[name] = tensor  # an extra state, or computed by the model's own state_dict()
        elif id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            kind: Any = kinds[id(tensor)]
            run, start = _run_of(tensor, kind, partitions)
            shards[weights_key(name)] = RunTensor(run, start, full_numel(tensor))
            tensors[name] = TensorEntry(shape=tuple(full_shape(tensor)), dtype=_name_of(run.dtype), kind=kind)
    contents = Contents(shards, tensors, tied)
    if not weights_only:
        left_out = [name for parameter, name in partitions.names.items() if id(parameter) not in first]
        if left_out:
            raise CheckpointError(
                f'{type(model).__name__}.state_dict() leaves out {", ".join(left_out)}, which are trained: no run '
                'could go on from such a checkpoint. Save weights_only=True, or let state_dict() name them.'
            )
        optimizer: Any = ensure_tuple(state.optimizers)[0]
        contents.rest, contents.pending = _rest_of(state, state.serialized_attributes)
        contents.rest['rng'] = reproducibility.get_rng_state()
        contents.rest['optimizer'] = _add_optimizer(contents, optimizer, partitions, first)
    else:
        # Composer then adds what it knows of a Hugging Face model: its configuration and tokenizer.
        contents.rest, contents.pending = _rest_of(state, [])
    contents.rest['others'] = others
    contents.shards = {key: shard for key, shard in shards.items() if shard.run.numel()}
    return contents


def named_tensors(model: Any) -> dict[str, Any]:
    """List what the model's ``state_dict`` names: the live parameters and buffers themselves.

    Args:
        model (Any): The model face.

    Returns:
        dict[str, Any]: By the user's names; tied ones under each.
    """
    with model._empty.shown():
        return dict(model._user_model.state_dict(keep_vars=True))


def _run_of(tensor: Any, kind: str, partitions: Partitions) -> tuple[torch.Tensor, int]:
    """Find this rank's run of a tensor, and where it begins; an empty one where others write it."""
    if kind == 'trained':
        fragment = partitions.fragment(partitions.names[tensor])
        if fragment is not None:
            return fragment.master, fragment.start
        return torch.empty(0), 0
    if hasattr(tensor, 'ds_id'):
        return run_of_frozen(tensor)
    whole = tensor.detach().contiguous().reshape(-1)
    return (whole, 0) if dist.get_global_rank() == 0 else (whole[:0], 0)


def _rest_of(state: State, wanted: list[str]) -> tuple[dict[str, Any], list[PendingTensor]]:
    """Collect Composer's state without model and optimizer. Collective."""
    attributes = state.serialized_attributes
    state.serialized_attributes = [name for name in wanted if name not in ('model', 'optimizers')]
    try:
        # What callbacks and algorithms do in their state_dict() may fail on one rank; the others go on to a collective.
        with agreeing(None, repr), consolidating_later() as pending:
            composers = state.state_dict()
    finally:
        state.serialized_attributes = attributes
    return {'state': composers}, pending


def _add_optimizer(
    contents: Contents, optimizer: OptimizerFace, partitions: Partitions, first: dict[int, str]
) -> dict[str, Any]:
    """Add the optimizer's runs to the shards; return its settings and what is not a tensor. Collective."""
    contents.optimizer = type(optimizer).__qualname__
    contents.param_groups = [
        [first[id(p)] for p in group['params'] if id(p) in first] for group in optimizer.param_groups
    ]
    scalars: dict[str, dict[str, Any]] = {}
    for name, layout in optimizer.layouts().items():
        runs = {key: dtype for key, dtype in layout.items() if isinstance(dtype, torch.dtype)}
        parameter = partitions.parameters[name]
        stored_name = first[id(parameter)]
        scalars[stored_name] = {key: copy.deepcopy(value) for key, value in layout.items() if key not in runs}
        entry = contents.tensors[stored_name]
        state = {key: _name_of(dtype) for key, dtype in runs.items()}
        contents.tensors[stored_name] = entry.model_copy(update={'state': state})
    for fragment, key, run in _runs_of_optimizer(optimizer, partitions):
        shard = RunTensor(run, fragment.start, full_numel(fragment.parameter))
        contents.shards[state_key(first[id(fragment.parameter)], key)] = shard
    settings = [{k: copy.deepcopy(v) for k, v in group.items() if k != 'params'} for group in optimizer.param_groups]
    return {'param_groups': settings, 'scalars': scalars}


def _runs_of_optimizer(optimizer: OptimizerFace, partitions: Partitions) -> Iterator[tuple[Any, str, torch.Tensor]]:
    for fragment in partitions.fragments:
        for key, value in optimizer._partitioned.state_of(fragment).items():
            if torch.is_tensor(value) and key != 'step':
                yield fragment, key, value.detach()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')
