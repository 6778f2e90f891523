"""Where the weights go: a folder or a file that appears complete or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from composer_ds.checkpoint.atomic import flush_folder, temporary_path
from composer_ds.checkpoint.source import CheckpointSource
from composer_ds.errors import CheckpointError, ConfigError

__all__ = ['Output']

# Weights of a former model: beside new ones of another number of shards, from_pretrained would take the wrong ones.
_WEIGHTS = re.compile(
    r'(model|adapter_model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?'
    r'|(model\.safetensors|pytorch_model\.bin)\.index\.json'
)


class Output:
    """A place to write to.

    Args:
        path (Path): A folder, or a file when its name ends in ``.pt``.
        overwrite (bool): Whether something may be there already.

    Raises:
        ConfigError: When something is there, or the place is no good.
    """

    def __init__(self, path: Path, overwrite: bool):
        self.given = path
        self.path = Path(os.path.abspath(path))
        self.is_file = path.suffix == '.pt'
        self._work = Path(temporary_path(str(self.path)))
        if path.suffix in ('.safetensors', '.bin', '.pth', '.ckpt'):
            raise ConfigError(f'{path}: give a folder, for safetensors files, or a file whose name ends in .pt')
        if not os.path.lexists(self.path):
            return
        if self.path.is_dir() == self.is_file:
            raise ConfigError(f'{path} is a {"folder" if self.is_file else "file"}; give another name')
        if not overwrite and (self.is_file or any(self.path.iterdir())):
            raise ConfigError(f'{path} exists; give another name, or --overwrite to replace the weights in it')

    def keep_apart_from(self, source: CheckpointSource) -> None:
        """Refuse to write over what is read.

        Args:
            source (CheckpointSource): The checkpoint.

        Raises:
            ConfigError: When one lies inside of the other.
        """
        read, written = source.path.resolve(), self.path.resolve()
        if read == written or written in read.parents or (read in written.parents and read.is_dir()):
            raise ConfigError(f'{self.given}: the weights would be written into the checkpoint {source.path}')

    def require_room(self, size_bytes: int) -> None:
        """Fail early when the disk has too little room.

        Args:
            size_bytes (int): Of all weights.

        Raises:
            CheckpointError: When there is less.
        """
        parent = next(one for one in self.path.parents if one.exists())
        free_bytes = shutil.disk_usage(parent).free
        if free_bytes < size_bytes:
            raise CheckpointError(
                f'{self.given} was not written: it needs {size_bytes:,} bytes, and {free_bytes:,} are free there'
            )

    @contextmanager
    def being_written(self) -> Iterator[Path]:
        """Make a temporary folder, whose content gets its final name when all went well, and is removed otherwise.

        Yields:
            Path: The folder; a file is to be written in it under its own name.

        Raises:
            CheckpointError: When the disk is full, say.
        """
        try:
            shutil.rmtree(self._work, ignore_errors=True)  # of a run that was killed
            self._work.mkdir(parents=True)
            yield self._work
            self._publish()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f'{self.given} was not written: {reason}. Nothing was left there.') from error
        finally:
            # Also after Ctrl-C.
            shutil.rmtree(self._work, ignore_errors=True)

    def _publish(self) -> None:
        if self.is_file:
            os.replace(self._work / self.path.name, self.path)
        elif not os.path.lexists(self.path):
            os.rename(self._work, self.path)
        elif not any(self.path.iterdir()):
            self.path.rmdir()
            os.rename(self._work, self.path)
        else:
            self._replace_folder()
        flush_folder(self.path.parent)

    def _replace_folder(self) -> None:
        """Replace old weights; other files of the folder stay."""
        new = {one.name for one in self._work.iterdir()}
        replaced = self.path.with_name('.replaced-' + self.path.name)
        os.rename(self.path, replaced)
        os.rename(self._work, self.path)
        for old in replaced.iterdir():
            if old.name not in new and not _WEIGHTS.fullmatch(old.name):
                os.rename(old, self.path / old.name)
        shutil.rmtree(replaced)
