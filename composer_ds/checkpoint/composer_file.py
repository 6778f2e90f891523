"""Consolidated checkpoints: the ``.pt`` files that Composer writes, and plain state dicts of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from composer_ds.checkpoint.damage import damage
from composer_ds.checkpoint.records import Record, records_of
from composer_ds.checkpoint.source import StoredTensor
from composer_ds.checkpoint.unpickling import load
from composer_ds.errors import CheckpointError

__all__ = ['ComposerFileSource', 'composer_facts']


class ComposerFileSource:
    """A file of Composer, or a state dict that ``torch.save`` wrote. Implements ``CheckpointSource``.

    Only the description of the tensors is read when it is opened.

    Args:
        path (str | Path): The file; a symlink such as ``latest-rank0.pt`` is followed.
        trusted (bool): Whether to unpickle classes that are not harmless, which can run any code. Default: False.

    Raises:
        CheckpointError: When it is damaged, holds no tensors, or classes that are not harmless.
    """

    format = 'Composer checkpoint'
    checks_what_it_reads = True

    def __init__(self, path: str | Path, trusted: bool = False):
        self.path = Path(path)
        content = load(self.path, trusted, data=False)
        self._records = {record.offset: record for record in records_of(self.path).values()}
        self._whole: tuple[Any, torch.Tensor] | None = None
        self.tensors: dict[str, StoredTensor] = {}
        self.tied: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self.integrations: dict[str, Any] = {}
        state = content.get('state') if isinstance(content, dict) else None
        optimizers: dict[str, Any] = {}
        if isinstance(state, dict) and isinstance(state.get('model'), dict):
            self._model = _without_ddp(state['model'])
            self.facts = composer_facts(state)
            self.integrations = state.get('integrations') or {}
            optimizers = state.get('optimizers') or {}
            self.is_weights_only = 'timestamp' not in state
        else:
            self.format = 'state dict of torch'
            self._model = _tensors_of(content)
            self.is_weights_only = True
        if not any(torch.is_tensor(value) for value in self._model.values()):
            raise CheckpointError(
                f'{self.path} is neither a checkpoint of Composer, with its weights under state, model, nor a state '
                'dict with a tensor under each name'
            )
        self._describe(optimizers)

    def _describe(self, optimizers: dict[str, Any]) -> None:
        self._optimizer_state, trained = _by_name(optimizers)
        if optimizers:
            self.facts['optimizer'] = next(iter(optimizers))
        first: dict[Any, str] = {}
        for name, tensor in self._model.items():
            if not torch.is_tensor(tensor):
                continue  # an extra state of a module
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise CheckpointError(f'{self.path}: {name} is sparse or quantized, which cannot be read in runs')
            storage = tensor.untyped_storage()
            place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
            if tensor.numel() and place in first:
                self.tied[name] = first[place]
                continue
            first[place] = name
            state = {
                key: value.dtype
                for key, value in self._optimizer_state.get(name, {}).items()
                if torch.is_tensor(value) and value.shape == tensor.shape and key != 'step'
            }
            kind = 'trained' if name in trained else 'unknown'
            self.tensors[name] = StoredTensor(name, tensor.shape, tensor.dtype, kind, state)
        # A name of a parameter in the optimizer may be one of the further names.
        for name, original in self.tied.items():
            if name in trained:
                old = self.tensors[original]
                self._optimizer_state.setdefault(original, self._optimizer_state.get(name, {}))
                state = {
                    key: value.dtype
                    for key, value in self._optimizer_state[original].items()
                    if torch.is_tensor(value) and value.shape == old.shape and key != 'step'
                }
                self.tensors[original] = StoredTensor(original, old.shape, old.dtype, 'trained', state)

    def read(self, name: str, start: int, numel: int, state: str | None = None) -> torch.Tensor:
        """Read a run; see ``CheckpointSource``. A tensor whose elements lie in another order is read whole.

        Args:
            name (str): A name in ``tensors``.
            start (int): Where the run begins in the flattened tensor.
            numel (int): Its length.
            state (str | None): A key of the tensor's optimizer state; None for the weights. Default: None.

        Returns:
            torch.Tensor: Shape ``(numel,)``.

        Raises:
            CheckpointError: When the file is damaged.
        """
        tensor = self._model[name] if state is None else self._optimizer_state[name][state]
        if numel == 0:
            return torch.empty(0, dtype=tensor.dtype)
        offset = tensor.untyped_storage()._checkpoint_offset
        record: Record | None = self._records.get(offset)
        if record is None:
            raise CheckpointError(f'{self.path} is damaged: the elements of {name} are not where they should be')
        if tensor.is_contiguous():
            return record.read(tensor.storage_offset() + start, numel, tensor.dtype)
        if self._whole is None or self._whole[0] is not tensor:
            self._whole = None
            elements = record.read(0, record.size_bytes // tensor.dtype.itemsize, tensor.dtype)
            whole = elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            self._whole = tensor, whole.reshape(-1)
        return self._whole[1][start : start + numel].clone()

    def missing(self) -> list[str]:
        """Find what the checkpoint lacks: nothing, for it is one file.

        Returns:
            list[str]: Empty.
        """
        return []

    def damaged(self) -> list[str]:
        """Read the whole file, and compare every record with its checksum.

        Returns:
            list[str]: One sentence, or none.
        """
        found = damage(str(self.path))
        return [] if found is None else [f'{self.path.name} {found}']


def composer_facts(state: dict[str, Any]) -> dict[str, Any]:
    """Say what Composer's state tells about the run.

    Args:
        state (dict[str, Any]): What a checkpoint has under ``state``.

    Returns:
        dict[str, Any]: For people, in order.
    """
    facts: dict[str, Any] = {}
    if state.get('run_name'):
        facts['run'] = state['run_name']
    timestamp = (state.get('timestamp') or {}).get('Timestamp') or {}
    facts |= {unit: timestamp[unit] for unit in ('epoch', 'batch', 'sample', 'token') if unit in timestamp}
    for entry in state.get('algorithms') or []:
        steps = entry[1].get('optimizer_steps') if len(entry) == 2 and isinstance(entry[1], dict) else None
        if isinstance(steps, dict):
            facts['optimizer steps'] = {key: steps[key] for key in ('applied', 'skipped') if key in steps}
    metadata = state.get('metadata') or {}
    facts |= {key.replace('_', ' '): metadata[key] for key in ('world_size', 'precision') if key in metadata}
    composer = (metadata.get('composer_env_info') or {}).get('composer_version')
    versions = {'mosaicml': composer, 'torch': metadata.get('torch_version')}
    if any(versions.values()):
        facts['versions'] = {name: str(version) for name, version in versions.items() if version}
    return facts


def _tensors_of(content: Any) -> dict[str, Any]:
    """Take a state dict, also from where other trainers put it."""
    if not isinstance(content, dict):
        return {}
    for key in ('state_dict', 'model_state_dict', 'model', 'module'):
        inner = content.get(key)
        if isinstance(inner, dict) and any(torch.is_tensor(value) for value in inner.values()):
            return _without_ddp(inner)
    return _without_ddp({name: value for name, value in content.items() if isinstance(name, str)})


def _without_ddp(model: dict[str, Any]) -> dict[str, Any]:
    """Remove what Composer before 0.17 and DDP itself put in front of every name."""
    if model and all(name.startswith('module.') for name in model):
        return {name.removeprefix('module.'): value for name, value in model.items()}
    return model


def _by_name(optimizers: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """Find the optimizer's state and what it trains, where the checkpoint names the parameters (Composer >= 0.17)."""
    state: dict[str, dict[str, Any]] = {}
    trained: set[str] = set()
    for optimizer in optimizers.values():
        for group in _groups(optimizer):
            trained |= {name for name in group.get('params', ()) if isinstance(name, str)}
        if isinstance(optimizer, dict) and isinstance(optimizer.get('state'), dict):
            state |= {name: value for name, value in optimizer['state'].items() if isinstance(value, dict)}
    return {name: value for name, value in state.items() if isinstance(name, str)}, trained


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    groups = optimizer.get('param_groups') if isinstance(optimizer, dict) else None
    yield from (group for group in groups or () if isinstance(group, dict))
