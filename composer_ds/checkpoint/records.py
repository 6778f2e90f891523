"""Reading runs of elements straight from a file that ``torch.save`` wrote, without the rest of it.

Such a file is a zip archive in which every tensor's storage is an uncompressed record with a CRC-32. Reading a run at
its place needs no more memory than the run, whatever the size of the tensor; ``torch.load`` reads a tensor whole, and
memory that is mapped counts as used.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, cast

import torch

from composer_ds.errors import CheckpointError

__all__ = ['Record', 'records_of']

_LOCAL_HEADER_BYTES = 30  # of a zip archive, before the name and the extra field


class Record:
    """The bytes of one storage in a file.

    When its bytes are read from the first to the last, in order and once, they are compared with the checksum: so a
    consolidation notices damage without reading the file twice.

    Args:
        path (Path): The file.
        offset (int): Where the bytes begin in it.
        size_bytes (int): How many.
        crc32 (int): Their checksum; 0 where there is none.
    """

    def __init__(self, path: Path, offset: int, size_bytes: int, crc32: int):
        self.path = path
        self.offset = offset
        self.size_bytes = size_bytes
        self.crc32 = crc32
        self._read_bytes = 0
        self._sum = 0

    def read(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Read elements.

        Args:
            start (int): The first, counted from the beginning of the storage.
            numel (int): How many.
            dtype (torch.dtype): Their dtype.

        Returns:
            torch.Tensor: Shape ``(numel,)``.

        Raises:
            CheckpointError: When the file ends too early, cannot be read, or does not match its checksum.
        """
        run = torch.empty(numel, dtype=dtype)
        if numel == 0:
            return run
        data = cast(Any, run.view(torch.uint8).numpy())
        first_byte = start * dtype.itemsize
        if first_byte + data.nbytes > self.size_bytes:
            raise CheckpointError(f'{self.path} is damaged: a tensor is larger than what is stored of it')
        try:
            with open(self.path, 'rb', buffering=0) as file:
                file.seek(self.offset + first_byte)
                view, filled = memoryview(data), 0
                while filled < data.nbytes:
                    count = file.readinto(view[filled:])
                    if not count:
                        raise CheckpointError(f'{self.path} is truncated: it ends inside of a tensor')
                    filled += count
        except OSError as error:
            raise CheckpointError(f'{self.path} cannot be read: {error}') from error
        self._check(first_byte, data)
        return run

    def _check(self, first_byte: int, data: Any) -> None:
        if first_byte == 0:
            self._read_bytes = self._sum = 0
        if not self.crc32 or first_byte != self._read_bytes:
            return
        self._sum = zlib.crc32(data, self._sum)
        self._read_bytes += data.nbytes
        if self._read_bytes == self.size_bytes and self._sum != self.crc32:
            raise CheckpointError(f'{self.path} is damaged: a tensor in it does not match its checksum')


def records_of(path: Path, start: int = 0, size_bytes: int | None = None) -> dict[str, Record]:
    """List the storages in an archive of torch, or in one that is a part of a larger file.

    Args:
        path (Path): The file.
        start (int): Where the archive begins. Default: 0.
        size_bytes (int | None): Its length; None: to the end of the file. Default: None.

    Returns:
        dict[str, Record]: By the numbers that torch gives them.

    Raises:
        CheckpointError: When the file is damaged.
    """
    try:
        with open(path, 'rb') as file:
            part = _Part(file, start, size_bytes)
            with zipfile.ZipFile(part) as archive:
                found = {}
                for info in archive.infolist():
                    folder, _, name = info.filename.partition('/')[2].rpartition('/')
                    if folder != 'data':
                        continue
                    part.seek(info.header_offset)
                    header = part.read(_LOCAL_HEADER_BYTES)
                    if info.compress_type != zipfile.ZIP_STORED or len(header) < _LOCAL_HEADER_BYTES:
                        raise CheckpointError(f'{path} is damaged: its list of records contradicts itself')
                    begins = info.header_offset + _LOCAL_HEADER_BYTES + sum(struct.unpack_from('<HH', header, 26))
                    found[name] = Record(path, start + begins, info.file_size, info.CRC)
                return found
    except FileNotFoundError:
        raise CheckpointError(f'{path} is missing') from None
    except CheckpointError:
        raise
    # A flipped bit in the list of records makes zipfile raise almost anything.
    except Exception as error:
        raise CheckpointError(f'{path} is damaged: {type(error).__name__}: {error}') from error


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, size_bytes: int | None):
        super().__init__()
        self._file = file
        self._start = start
        self._size_bytes = file.seek(0, io.SEEK_END) - start if size_bytes is None else size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        count = min(len(buffer), max(0, self._size_bytes - self._position))
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
