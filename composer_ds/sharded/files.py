"""The files of a sharded checkpoint: written under a temporary name, with checksums, then renamed together."""

from __future__ import annotations

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from composer_ds.sharded.manifest import MANIFEST, FileEntry, Manifest
from composer_ds.sharded.siblings import put_in_place, temporary_folder, write_durably

__all__ = ['ChecksumWriter', 'file_entry', 'finish']

# DCP (torch 2.7) asks for tensor.storage() itself, and the user can do nothing about it. Not catch_warnings around the
# write: it changes the filters of all threads.
warnings.filterwarnings(
    'ignore', 'TypedStorage is deprecated', UserWarning, r'torch\.distributed\.checkpoint\.filesystem'
)

_BLOCK_BYTES = 2**22


class ChecksumWriter(FileSystemWriter):
    """DCP's writer of files, which also adds up their checksums.

    Args:
        folder (Path): Where to write.
        tell (Callable[[int], None]): Called with the number of bytes that were written since. Default: does nothing.
    """

    def __init__(self, folder: Path, tell: Callable[[int], None] = lambda _: None):
        super().__init__(folder, overwrite=True)
        self.fs = self.checksums = _ChecksumFileSystem(tell)


class _ChecksumFileSystem(FileSystem):
    def __init__(self, tell: Callable[[int], None]):
        self._tell = tell
        self.files: dict[str, FileEntry] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if 'w' not in mode:
                yield stream
                return
            checked = _ChecksumStream(stream, self._tell)
            yield checked
            name = Path(path).name.removesuffix('.tmp')  # DCP renames its .metadata.tmp
            self.files[name] = FileEntry(size_bytes=checked.size_bytes, crc32=checked.crc32)


class _ChecksumStream:
    """A file that is written from beginning to end."""

    def __init__(self, stream: Any, tell: Callable[[int], None]):
        self._stream = stream
        self._tell = tell
        self.size_bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size_bytes += memoryview(data).nbytes
        written = self._stream.write(data)
        self._tell(memoryview(data).nbytes)
        return written

    def seekable(self) -> bool:
        return False  # so nobody goes back

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def file_entry(path: Path, tell: Callable[[int], None] = lambda _: None) -> FileEntry:
    """Read a file for its length and checksum.

    Args:
        path (Path): The file.
        tell (Callable[[int], None]): Called with the number of bytes that were read since. Default: does nothing.

    Returns:
        FileEntry: For the manifest, or to compare with it.
    """
    crc32, size_bytes = 0, 0
    with open(path, 'rb') as file:
        while block := file.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
            size_bytes += len(block)
            tell(len(block))
    return FileEntry(size_bytes=size_bytes, crc32=crc32)


def finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and give the folder its final name.

    Args:
        folder (Path): The checkpoint.
        manifest (Manifest): Written last.
    """
    temporary = temporary_folder(folder)
    for path in temporary.iterdir():
        # DCP (torch 2.7) flushes its .metadata before the last bytes are written.
        with open(path, 'rb+') as file:
            os.fsync(file.fileno())
    write_durably(temporary / MANIFEST, manifest.model_dump_json(indent=1) + '\n')
    put_in_place(folder)
