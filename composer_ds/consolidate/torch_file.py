"""A ``.pt`` file with the weights of a model, written in a stream."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch._utils import _rebuild_tensor_v3  # its name stands in files that torch has written since 2.1

__all__ = ['TorchFile']

_ALIGNMENT_BYTES = 64
"""Where records begin, as torch has them, so that ``torch.load(mmap=True)`` gives aligned tensors."""


class _Placeholder:
    """A tensor whose elements are yet to come."""

    def __init__(self, number: int, shape: torch.Size, dtype: torch.dtype):
        self.number, self.shape, self.dtype = number, shape, dtype
        self.size_bytes = shape.numel() * dtype.itemsize


class _Storage:
    def __init__(self, owner: _Placeholder):
        self.owner = owner


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, with a reference to a record for every tensor."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return 'storage', torch.UntypedStorage, str(obj.owner.number), 'cpu', obj.owner.size_bytes
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Placeholder):
            stride = torch.empty(obj.shape, device='meta').stride()
            return _rebuild_tensor_v3, (_Storage(obj), 0, obj.shape, stride, False, OrderedDict(), obj.dtype)
        return NotImplemented


class TorchFile:
    """Writes what ``torch.save({'state': {'model': {name: tensor, ...}, ...}})`` would, a run of elements at a time.

    Args:
        path (Path): The file.
        tensors (Sequence[tuple[str, torch.Size, torch.dtype]]): What will be written, in this order.
        tied (dict[str, str]): Further names, and the one in ``tensors``.
        rest (dict[str, Any]): What else stands beside ``model``.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[tuple[str, torch.Size, torch.dtype]],
        *,
        tied: dict[str, str],
        rest: dict[str, Any],
    ):
        self._path = path
        self._waiting = [_Placeholder(number, shape, dtype) for number, (_, shape, dtype) in enumerate(tensors)]
        model = {name: placeholder for (name, _, _), placeholder in zip(tensors, self._waiting, strict=True)}
        model |= {name: model[original] for name, original in tied.items()}
        self._content = {'state': {'model': model, **rest}}

    def __enter__(self) -> TorchFile:
        pickled = io.BytesIO()
        _Pickler(pickled, protocol=2).dump(self._content)
        self._archive = zipfile.ZipFile(self._path, 'w', zipfile.ZIP_STORED)
        self._open: Any = None
        self._left_bytes = 0
        self._add('data.pkl', pickled.getvalue())
        self._add('byteorder', sys.byteorder.encode())
        self._begin_next()
        return self

    def write(self, run: torch.Tensor) -> None:
        """Append elements, which may not reach beyond the tensor whose turn it is.

        Args:
            run (torch.Tensor): Shape ``(numel,)``, of the dtype of the tensor.
        """
        if run.numel() == 0:
            return
        data = cast(Any, run.view(torch.uint8).numpy())
        assert self._open is not None and data.nbytes <= self._left_bytes
        self._open.write(data)
        self._left_bytes -= data.nbytes
        if self._left_bytes == 0:
            self._open.close()
            self._open = None
            self._begin_next()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            # The disk may be full: what is left to write fails again, and the file is of no use.
            with contextlib.suppress(OSError, ValueError):
                if self._open is not None:
                    self._open.close()
                self._archive.close()
            return
        assert self._open is None and not self._waiting, 'some tensors were not written'
        self._add('version', b'3\n')
        self._archive.close()
        with open(self._path, 'rb+') as file:
            os.fsync(file.fileno())

    def _begin_next(self) -> None:
        """Begin the record of the next tensor that has elements."""
        while self._waiting and self._open is None:
            placeholder = self._waiting.pop(0)
            name = f'data/{placeholder.number}'
            if placeholder.size_bytes:
                self._open, self._left_bytes = self._begin(name), placeholder.size_bytes
            else:
                self._add(name, b'')

    def _add(self, name: str, content: bytes) -> None:
        with self._begin(name) as record:
            record.write(content)

    def _begin(self, name: str) -> Any:
        info = zipfile.ZipInfo(f'archive/{name}')
        # Header, name, the size fields of zip64 that force_zip64 adds, and an extra field for the padding.
        begins = self._archive.start_dir + 30 + len(info.filename) + 20 + 4
        padding = -begins % _ALIGNMENT_BYTES
        info.extra = struct.pack('<2sH', b'FB', padding) + bytes(padding)
        return self._archive.open(info, 'w', force_zip64=True)
