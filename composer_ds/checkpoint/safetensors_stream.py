"""Safetensors files that are written run by run, so that nobody holds the tensors in them.

The format (https://huggingface.co/docs/safetensors): the length of the header in 8 bytes, the header in JSON with the
dtype, shape and place of every tensor, then the elements without gaps. All places are known from the shapes.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save

from composer_ds.checkpoint.atomic import discard, flush_folder, leftovers, publish, temporary_path

__all__ = ['SafetensorsStream', 'layout_of']

_HEADER_ALIGNMENT_BYTES = 8  # of the first element, by the format; then every tensor of a dtype is aligned, too


class SafetensorsStream:
    """Writes tensors whose shapes are known beforehand, one after the other, in files of a limited size.

    Used as a context manager. The files have their names when it is left, and none of them has when it is left by an
    exception. Another export in the folder is replaced; a reader never sees parts of both.

    Args:
        folder (str | Path): An existing folder.
        tensors (Sequence[tuple[str, Sequence[int], torch.dtype]]): Name, shape and dtype of each, in the order in which
            they will be written.
        max_shard_size (str | int): The size of a file, such as ``'5GB'``, or bytes; a larger tensor has a file of its
            own. Default: ``'5GB'``.
        metadata (Mapping[str, str] | None): Put into the header of every file. Default: ``{'format': 'pt'}``, which
            transformers wants.
        base_name (str): How the files begin: ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on
            with ``model.safetensors.index.json``. Default: ``'model'``.

    Raises:
        ValueError: When there are no tensors, a name is given twice, or the size cannot be read.
    """

    def __init__(
        self,
        folder: str | Path,
        tensors: Sequence[tuple[str, Sequence[int], torch.dtype]],
        *,
        max_shard_size: str | int = '5GB',
        metadata: Mapping[str, str] | None = None,
        base_name: str = 'model',
    ):
        self.folder = Path(folder)
        self.size_bytes = sum(_size_bytes(shape, dtype) for _, shape, dtype in tensors)
        """Of all tensors."""
        self._tensors = list(tensors)
        self._base_name = base_name
        by_file = layout_of(tensors, max_shard_size, base_name)
        metadata = {'format': 'pt'} if metadata is None else metadata
        declared = {name: (shape, dtype) for name, shape, dtype in tensors}
        self._files = {
            file: _File(self.folder / file, {name: declared[name] for name in names}, metadata)
            for file, names in by_file.items()
        }
        self._file_of = {name: self._files[file] for file, names in by_file.items() for name in names}
        self._number = 0
        """Which tensor is being written."""
        self._written = 0
        """How many of its elements are."""

    @property
    def file_names(self) -> list[str]:
        """All files, the one that makes the export complete last."""
        return [*self._files, *([self._index_name] if len(self._files) > 1 else [])]

    @property
    def _index_name(self) -> str:
        return f'{self._base_name}.safetensors.index.json'

    def __enter__(self) -> SafetensorsStream:
        for path in leftovers(str(self.folder), f'{self._base_name}{{}}'):
            if self._is_ours(os.path.basename(path)):
                discard(path)
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    def write(self, run: torch.Tensor) -> None:
        """Append elements of the tensor whose turn it is.

        Args:
            run (torch.Tensor): Any shape, read in row-major order; any device; cast to the tensor's dtype. Its memory
                may be used again afterwards.

        Raises:
            ValueError: When it has more elements than the tensor has left.
            OSError: When the disk is full, say.
        """
        if run.numel() == 0:
            return
        self._skip_complete()
        if self._number == len(self._tensors):
            raise ValueError(f'{run.numel()} elements too many: all {len(self._tensors)} tensors are complete')
        name, shape, dtype = self._tensors[self._number]
        left = math.prod(shape) - self._written
        if run.numel() > left:
            raise ValueError(f'{name}: {run.numel()} elements were given, and {left} of {math.prod(shape)} are missing')
        data: Any = run.detach().to('cpu', dtype).contiguous().view(-1).view(torch.uint8).numpy()
        self._file_of[name].write(name, self._written * dtype.itemsize, memoryview(data))
        self._written += run.numel()
        self._skip_complete()

    def finish(self) -> None:
        """Give the files their names. Called when all tensors are written; by leaving the context, otherwise.

        Raises:
            ValueError: When elements are missing. Nothing is left then.
            OSError: When the disk is full, say. Nothing is left then.
        """
        try:
            self._skip_complete()
            if self._number < len(self._tensors):
                name, shape, _ = self._tensors[self._number]
                raise ValueError(
                    f'{name}: {self._written} of {math.prod(shape)} elements were given, and nothing of the '
                    f'{len(self._tensors) - self._number - 1} tensors after it'
                )
            if len(self._files) > 1:
                self._write_index()
            self._publish()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written, unless it has its names already."""
        for file in self._files.values():
            file.close()
        for name in (*self._files, self._index_name):
            discard(str(self.folder / name))

    def _skip_complete(self) -> None:
        """Go to the next tensor that lacks elements; those without any are complete from the beginning."""
        while self._number < len(self._tensors):
            name, shape, _ = self._tensors[self._number]
            if self._written < math.prod(shape):
                return
            self._file_of[name].complete(name)
            self._number, self._written = self._number + 1, 0

    def _write_index(self) -> None:
        index = {
            'metadata': {
                'total_parameters': sum(math.prod(shape) for _, shape, _ in self._tensors),
                'total_size': self.size_bytes,
            },
            'weight_map': {name: file.path.name for name, file in self._file_of.items()},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + '\n'
        with open(temporary_path(str(self.folder / self._index_name)), 'w', encoding='utf-8') as file:
            file.write(text)

    def _publish(self) -> None:
        """Rename all files; killed anywhere in between, a reader finds the old export, the new one, or none.

        transformers reads ``model.safetensors`` where there is one, and otherwise what the index names.
        """
        *shards, last = self.file_names
        stale = [name for name in os.listdir(self.folder) if self._is_ours(name) and name not in self.file_names]
        if any((self.folder / name).exists() for name in shards):
            (self.folder / self._index_name).unlink(missing_ok=True)  # it would name new shards beside old ones
            flush_folder(self.folder)
        for name in (*shards, last):
            publish(str(self.folder / name))
        # The index before the shards that it names.
        for name in sorted(stale, key=lambda name: name != self._index_name):
            (self.folder / name).unlink()

    def _is_ours(self, name: str) -> bool:
        pattern = rf'{re.escape(self._base_name)}(-\d+-of-\d+)?\.safetensors(\.index\.json)?'
        return re.fullmatch(pattern, name) is not None


def layout_of(
    tensors: Sequence[tuple[str, Sequence[int], torch.dtype]], max_shard_size: str | int, base_name: str = 'model'
) -> dict[str, list[str]]:
    """Distribute tensors over files, as huggingface_hub does.

    Args:
        tensors (Sequence[tuple[str, Sequence[int], torch.dtype]]): Name, shape and dtype of each.
        max_shard_size (str | int): Such as ``'5GB'``, or bytes.
        base_name (str): How the files begin. Default: ``'model'``.

    Returns:
        dict[str, list[str]]: Names of files, and of the tensors in them.

    Raises:
        ValueError: When there are no tensors, a name is given twice, or the size cannot be read.
    """
    sizes = {name: _size_bytes(shape, dtype) for name, shape, dtype in tensors}
    if not sizes or len(sizes) < len(tensors):
        raise ValueError(f'{len(tensors)} tensors with {len(sizes)} different names: at least one, and no name twice')
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size_bytes: size_bytes,
        filename_pattern=f'{base_name}{{suffix}}.safetensors',
        max_shard_size=max_shard_size,
    )
    return split.filename_to_tensors


class _File:
    """One file, and where each of its tensors belongs.

    Args:
        path (Path): Its final name.
        tensors (Mapping[str, tuple[Sequence[int], torch.dtype]]): By name, shape and dtype.
        metadata (Mapping[str, str]): Put into the header.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], metadata: Mapping[str, str]
    ):
        self.path = path
        self._open: int | None = None
        self._incomplete = set(tensors)
        header: dict[str, Any] = {'__metadata__': dict(metadata)} if metadata else {}
        places: dict[str, int] = {}
        size_bytes = 0
        # The largest elements first, as safetensors has it: without gaps, that is what aligns every tensor.
        for name, (shape, dtype) in sorted(tensors.items(), key=lambda one: -one[1][1].itemsize):
            places[name] = size_bytes
            size_bytes += _size_bytes(shape, dtype)
            header[name] = {
                'dtype': _name_of(dtype),
                'shape': list(shape),
                'data_offsets': [places[name], size_bytes],
            }
        text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
        text += b' ' * (-len(text) % _HEADER_ALIGNMENT_BYTES)
        self._header = len(text).to_bytes(8, 'little') + text
        self._places = {name: len(self._header) + place for name, place in places.items()}

    def write(self, name: str, offset_bytes: int, data: memoryview) -> None:
        """Write a part of a tensor.

        Args:
            name (str): The tensor.
            offset_bytes (int): Where in the tensor.
            data (memoryview): Bytes.
        """
        self._write(self._places[name] + offset_bytes, data)

    def complete(self, name: str) -> None:
        """Note that a tensor is written; flush the file to the disk when all are.

        Args:
            name (str): The tensor.
        """
        self._incomplete.discard(name)
        if not self._incomplete:
            self._write(0, memoryview(self._header))
            assert self._open is not None
            os.fsync(self._open)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def _write(self, position: int, data: memoryview) -> None:
        if self._open is None:
            self._open = os.open(temporary_path(str(self.path)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        while data:
            count = os.pwrite(self._open, data, position)
            position, data = position + count, data[count:]


def _size_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """Ask safetensors what it calls a dtype."""
    data = save({'tensor': torch.empty(0, dtype=dtype)})
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], 'little')])['tensor']['dtype']
