"""Writing a checkpoint tensor by tensor, each put together when its turn has come.

The file is what ``torch.save`` would write: a zip archive with the pickled object in ``data.pkl``, and the elements of
every storage in a record ``data/N`` of its own. Rank 0 holds two tensors at a time, and receives one while it writes
the other; the other ranks hold what they are sending. The archive is written by torch's own writer (2.6 to 2.7,
privately), because Python's ``zipfile`` takes more than twice as long.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from typing import Any

import torch
from composer.utils import dist
from torch._C import PyTorchFileWriter  # pyright: ignore[reportAttributeAccessIssue]
from torch._utils import _rebuild_tensor_v2  # its name stands in every file that torch has written since 1.6

from composer_ds.arrivals import in_turn
from composer_ds.consolidation import PendingTensor
from composer_ds.progress import BytesBar

__all__ = ['write_stream']


def write_stream(
    state_dict: dict[str, Any], pending: list[PendingTensor], path: str, bar: BytesBar | None = None
) -> Exception | None:
    """Write a state dict in which some tensors are yet to be put together.

    Collective: every rank calls it; rank 0 writes. An error with the file is returned and not raised, because the other
    ranks are in the middle of sending: rank 0 takes what they send, and leaves the file.

    Args:
        state_dict (dict[str, Any]): What to write; only that of rank 0 counts.
        pending (list[PendingTensor]): All tensors that may be in it, in an order that is alike on all ranks.
        path (str): The file.
        bar (BytesBar | None): On rank 0, to be told how far it is. Default: none.

    Returns:
        Exception | None: What went wrong with the file, on rank 0.
    """
    numbers: list[Any] = [None]
    if dist.get_global_rank() == 0:
        pickler = _Pickler()
        number_of = {id(tensor): number for number, tensor in enumerate(pending)}
        try:
            pickler.dump(state_dict)
            numbers = [[number_of[id(tensor)] for tensor in pickler.pending]]
        except Exception as error:  # an object that cannot be pickled
            numbers = [error]
    dist.broadcast_object_list(numbers, src=0)
    if isinstance(numbers[0], Exception):
        return numbers[0] if dist.get_global_rank() == 0 else None
    arriving = in_turn(pending[number].begin for number in numbers[0])
    if dist.get_global_rank() != 0:
        for _ in arriving:
            pass
        return None
    if bar is not None:
        bar.begin(sum(_size_bytes(storage) for storage in pickler.records))
    try:
        with open(path, 'wb') as file:
            checked: Any = _File(file)
            writer: Any = PyTorchFileWriter(checked)
            writer.write_record('data.pkl', pickler.pickled.getvalue(), pickler.pickled.tell())
            writer.write_record('byteorder', sys.byteorder, len(sys.byteorder))
            for number, storage in enumerate(pickler.records):
                whole: Any = next(arriving) if isinstance(storage, PendingTensor) else storage.cpu()
                size_bytes = _size_bytes(storage)
                if torch.is_tensor(whole):
                    # It may lie at the beginning of a longer storage, which is used again.
                    whole = (whole.clone() if whole.storage_offset() else whole).untyped_storage()
                writer.write_record(f'data/{number}', whole, size_bytes)
                checked.check()
                if bar is not None:
                    bar.advance(size_bytes)
            writer.write_end_of_file()
            checked.check()
    except Exception as error:
        for _ in arriving:
            pass
        return error
    return None


class _File:
    """A file for torch's writer, whose destructor ends the process when a write raises (2.7)."""

    def __init__(self, file: Any):
        self._file = file
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, or keep the error for :meth:`check`. Called by torch, and again when the writer is taken down."""
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        return len(data)

    def check(self) -> None:
        """Raise what went wrong since the last time."""
        if self._error is not None:
            raise self._error


class _Pickler:
    """Pickles as ``torch.save`` does, with every storage as a reference to a record."""

    def __init__(self):
        self.pickled = io.BytesIO()
        self.records: list[PendingTensor | torch.UntypedStorage] = []
        """What is in each record."""
        self._number_of: dict[Any, int] = {}

    @property
    def pending(self) -> list[PendingTensor]:
        """The records that are yet to be put together, in their order."""
        return [record for record in self.records if isinstance(record, PendingTensor)]

    def dump(self, obj: Any) -> None:
        """Pickle an object into :attr:`pickled`.

        Args:
            obj (Any): A state dict.
        """
        owner = self

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj: Any) -> Any:
                if isinstance(obj, _Reference):
                    return ('storage', _storage_class(obj.pending.dtype), owner.record(obj.pending), 'cpu', obj.numel)
                if isinstance(obj, torch.storage.TypedStorage):
                    return (
                        'storage',
                        _storage_class(obj.dtype),
                        owner.record(obj._untyped_storage),
                        'cpu',
                        obj._size(),
                    )
                if isinstance(obj, torch.UntypedStorage):
                    return ('storage', torch.UntypedStorage, owner.record(obj), 'cpu', obj.nbytes())
                return None

            def reducer_override(self, obj: Any) -> Any:
                if isinstance(obj, PendingTensor):
                    stride = torch.empty(obj.shape, device='meta').stride()
                    return _rebuild_tensor_v2, (_Reference(obj), 0, obj.shape, stride, False, OrderedDict())
                return NotImplemented

        Pickler(self.pickled, protocol=2).dump(obj)

    def record(self, data: PendingTensor | torch.UntypedStorage) -> str:
        """Return the number of the record for a storage; tensors that share one share its record.

        Args:
            data (PendingTensor | torch.UntypedStorage): The storage.

        Returns:
            str: As torch names records.
        """
        key = ('storage', data._cdata) if isinstance(data, torch.UntypedStorage) else ('pending', id(data))
        if key not in self._number_of:
            self._number_of[key] = len(self.records)
            self.records.append(data)
        return str(self._number_of[key])


class _Reference:
    """Stands for the storage of a pending tensor while it is pickled."""

    def __init__(self, pending: PendingTensor):
        self.pending = pending
        self.numel = pending.shape.numel()


def _size_bytes(storage: PendingTensor | torch.UntypedStorage) -> int:
    if isinstance(storage, PendingTensor):
        return storage.shape.numel() * storage.dtype.itemsize
    return storage.nbytes()


def _storage_class(dtype: torch.dtype) -> Any:
    return getattr(torch, torch.empty(0, dtype=dtype)._typed_storage()._pickle_storage_type())
