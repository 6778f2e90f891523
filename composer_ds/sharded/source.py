"""Reading sharded checkpoints offline, on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from composer_ds.checkpoint.records import Record, records_of
from composer_ds.checkpoint.source import StoredTensor
from composer_ds.checkpoint.unpickling import load
from composer_ds.errors import CheckpointError
from composer_ds.sharded.dcp_metadata import METADATA, read_metadata
from composer_ds.sharded.files import file_entry
from composer_ds.sharded.manifest import (
    LATEST,
    MANIFEST,
    STATE,
    Manifest,
    read_manifest,
    state_key,
    weights_key,
)

__all__ = ['ShardedSource']


class ShardedSource:
    """A sharded checkpoint. Implements ``CheckpointSource``.

    DCP's reader loads each stored run whole, as large as a rank's part of a tensor, even for a few elements of it.
    This one reads the elements at their place in the file, so memory is bounded by what is asked for.

    Args:
        path (str | Path): The checkpoint, or the folder around it with ``latest``, whose newest complete one is taken.
        trusted (bool): Whether to unpickle classes in ``state.pt`` that are not harmless. Default: False.

    Raises:
        CheckpointError: When there is no complete checkpoint, or its manifest is damaged.
    """

    format = 'sharded checkpoint'
    checks_what_it_reads = True

    def __init__(self, path: str | Path, trusted: bool = False):
        self.path = _follow_latest(Path(path))
        self.manifest = read_manifest(self.path)
        self._trusted = trusted
        self._records: dict[MetadataIndex, Record] = {}
        self.tensors = {
            name: StoredTensor(
                name,
                torch.Size(entry.shape),
                entry.torch_dtype,
                entry.kind,
                {key: getattr(torch, dtype) for key, dtype in entry.state.items()},
            )
            for name, entry in self.manifest.tensors.items()
        }
        self.tied = self.manifest.tied
        self.facts = _facts(self.manifest)
        self.is_weights_only = self.manifest.weights_only

    @functools.cached_property
    def integrations(self) -> dict[str, Any]:
        """What Composer saved of a Hugging Face model: its configuration and tokenizer."""
        if STATE not in self.manifest.files:
            return {}
        return self.rest.get('state', {}).get('integrations') or {}

    @functools.cached_property
    def rest(self) -> dict[str, Any]:
        """Everything but tensors of the model and the optimizer: what ``state.pt`` holds."""
        self._require_undamaged(STATE)
        return load(self.path / STATE, self._trusted)

    @functools.cached_property
    def _metadata(self) -> Any:
        self._require_undamaged(METADATA)
        return read_metadata(self.path)

    def read(self, name: str, start: int, numel: int, state: str | None = None) -> torch.Tensor:
        """Read a run of a tensor; see ``CheckpointSource``.

        Args:
            name (str): A name in ``tensors``.
            start (int): Where the run begins in the flattened tensor.
            numel (int): Its length.
            state (str | None): A key of the tensor's optimizer state; None for the weights. Default: None.

        Returns:
            torch.Tensor: Shape ``(numel,)``.

        Raises:
            CheckpointError: When a file is missing or damaged.
        """
        stored = self.tensors[name]
        dtype = stored.dtype if state is None else stored.state[state]
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        key = weights_key(name) if state is None else state_key(name, state)
        described = self._metadata.state_dict_metadata.get(key)
        if not isinstance(described, TensorStorageMetadata) or described.properties.dtype != dtype:
            raise CheckpointError(f'{self.path} contradicts itself: {METADATA} and {MANIFEST} disagree about {key}')
        runs, position = [], start
        for chunk in sorted(described.chunks, key=lambda chunk: chunk.offsets[0]):
            begin, length = chunk.offsets[0], chunk.sizes[0]
            if begin <= position < begin + length and position < start + numel:
                count = min(start + numel, begin + length) - position
                runs.append(self._record(key, begin).read(position - begin, count, dtype))
                position += count
        if position < start + numel:
            raise CheckpointError(f'{self.path} contradicts itself: elements {position} and up of {key} are not stored')
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def _record(self, key: str, begin: int) -> Record:
        index = MetadataIndex(key, torch.Size((begin,)))
        if index not in self._records:
            place = self._metadata.storage_data[index]
            found = records_of(self.path / place.relative_path, place.offset, place.length)
            if len(found) != 1:
                raise CheckpointError(f'{self.path / place.relative_path} is damaged: {key} is not where it should be')
            self._records[index] = next(iter(found.values()))
        return self._records[index]

    def missing(self) -> list[str]:
        """Find files of the manifest that are not there, or shorter or longer than they were written.

        Returns:
            list[str]: One sentence each.
        """
        found = []
        for name, entry in self.manifest.files.items():
            try:
                size_bytes = (self.path / name).stat().st_size
            except FileNotFoundError:
                found.append(f'{name} is missing ({entry.size_bytes:,} bytes)')
            else:
                if size_bytes != entry.size_bytes:
                    found.append(f'{name} has {size_bytes:,} bytes instead of {entry.size_bytes:,}')
        return found

    def damaged(self, tell: Callable[[int], None] = lambda _: None) -> list[str]:
        """Compare every file that is there with its checksum. Reads everything.

        Args:
            tell (Callable[[int], None]): Called with the number of bytes that were read since. Default: does nothing.

        Returns:
            list[str]: One sentence for each damaged file.
        """
        return [f'{name} {found}' for name in self.manifest.files if (found := self.damage_of(name, tell)) is not None]

    def damage_of(self, name: str, tell: Callable[[int], None] = lambda _: None) -> str | None:
        """Compare one file with its checksum.

        Args:
            name (str): A name in the manifest.
            tell (Callable[[int], None]): As in :meth:`damaged`.

        Returns:
            str | None: What is wrong, as the end of a sentence; None for nothing, or a file that is missing.
        """
        try:
            found = file_entry(self.path / name, tell)
        except FileNotFoundError:
            return None
        except OSError as error:
            return f'cannot be read: {error}'
        return None if found.crc32 == self.manifest.files[name].crc32 else 'does not match its checksum'

    def _require_undamaged(self, name: str) -> None:
        if not (self.path / name).exists():
            raise CheckpointError(f'{self.path / name} is missing: the checkpoint is not complete')
        found = self.damage_of(name)
        if found is not None:
            raise CheckpointError(f'{self.path / name} {found}')


def _facts(manifest: Manifest) -> dict[str, Any]:
    offload = {'optimizer': manifest.offload_optimizer, 'parameters': manifest.offload_param}
    return {
        'run': manifest.run_name,
        **{unit: manifest.time[unit] for unit in ('epoch', 'batch', 'sample', 'token') if unit in manifest.time},
        'optimizer steps': {k: v for k, v in manifest.optimizer_steps.items() if k in ('applied', 'skipped')},
        'world size': manifest.world_size,
        'ZeRO stage': manifest.zero_stage,
        'offload': {what: where for what, where in offload.items() if where != 'none'},
        'precision': manifest.precision,
        'optimizer': manifest.optimizer,
        'versions': manifest.versions,
    }


def _follow_latest(path: Path) -> Path:
    if (path / MANIFEST).exists() or not (path / LATEST).is_file():
        return path
    name = (path / LATEST).read_text(encoding='utf-8').strip()
    if not (path / name).is_dir():
        raise CheckpointError(f'{path / LATEST} names {name!r}, which is not there; give one of the other checkpoints')
    return path / name
