"""The folder of a sharded checkpoint: written under a temporary name, checked, renamed; and the folder around it."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from composer_ds.checkpoint.atomic import flush_folder, temporary_path
from composer_ds.sharded.manifest import LATEST, MANIFEST, STATE, FileEntry, Manifest, read_manifest

__all__ = ['ChecksumWriter', 'begin', 'complete_ones', 'file_entry', 'finish', 'point_latest', 'remove']

_BLOCK_BYTES = 2**24


class ChecksumWriter(FileSystemWriter):
    """DCP's writer of files, which also adds up their checksums.

    Args:
        folder (Path): Where to write.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, overwrite=True)
        self.fs = self.checksums = _ChecksumFileSystem()


class _ChecksumFileSystem(FileSystem):
    def __init__(self):
        self.files: dict[str, FileEntry] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if 'w' not in mode:
                yield stream
                return
            checked = _ChecksumStream(stream)
            yield checked
            name = Path(path).name.removesuffix('.tmp')  # DCP renames its .metadata.tmp
            self.files[name] = FileEntry(size_bytes=checked.size_bytes, crc32=checked.crc32)


class _ChecksumStream:
    """A file that is written from beginning to end."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.size_bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size_bytes += memoryview(data).nbytes
        return self._stream.write(data)

    def seekable(self) -> bool:
        return False  # so nobody goes back

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def file_entry(path: Path) -> FileEntry:
    """Read a file for its length and checksum.

    Args:
        path (Path): The file.

    Returns:
        FileEntry: For the manifest, or to compare with it.
    """
    crc32, size_bytes = 0, 0
    with open(path, 'rb') as file:
        while block := file.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
            size_bytes += len(block)
    return FileEntry(size_bytes=size_bytes, crc32=crc32)


def begin(folder: Path) -> Path:
    """Make the temporary folder of a checkpoint; what a killed save left under this name is removed.

    Args:
        folder (Path): The checkpoint.

    Returns:
        Path: Where to write.
    """
    temporary = Path(temporary_path(str(folder)))
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and give the folder its final name. What had this name before is removed.

    Args:
        folder (Path): The checkpoint.
        manifest (Manifest): Written last.
    """
    temporary = Path(temporary_path(str(folder)))
    if (temporary / STATE).exists():  # DCP has flushed its own files
        with open(temporary / STATE, 'rb+') as file:
            os.fsync(file.fileno())
    _write_durably(temporary / MANIFEST, manifest.model_dump_json(indent=1) + '\n')
    if folder.exists():
        remove(folder)
    os.replace(temporary, folder)
    flush_folder(folder.parent)


def point_latest(folder: Path) -> None:
    """Let ``latest`` name a checkpoint.

    Args:
        folder (Path): The checkpoint.
    """
    _write_durably(folder.parent / LATEST, folder.name + '\n')


def _write_durably(path: Path, text: str) -> None:
    temporary = Path(temporary_path(str(path)))
    with open(temporary, 'w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_folder(path.parent)


def remove(folder: Path) -> None:
    """Remove a checkpoint: first what makes it complete, so that a half-removed one is nobody's checkpoint.

    Args:
        folder (Path): The checkpoint.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def complete_ones(folder: Path) -> list[tuple[Path, Manifest]]:
    """List the complete checkpoints of a folder, by their manifests.

    Args:
        folder (Path): Holds checkpoints.

    Returns:
        list[tuple[Path, Manifest]]: The one with the fewest batches first.
    """
    found = [(path.parent, read_manifest(path.parent)) for path in folder.glob(f'[!.]*/{MANIFEST}')]
    return sorted(found, key=lambda one: (one[1].time['batch'], one[0].stat().st_mtime))
