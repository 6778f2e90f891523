"""Folders that appear complete or not at all: filled under a temporary name, flushed, then renamed.

A folder that replaces another one of its name needs two renames, since only an empty folder can be renamed over. A
process that is killed between them leaves the old one as ``.replaced-NAME``; the next start gives it its name back.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from composer_ds.checkpoint.atomic import flush_folder, leftovers, temporary_path

__all__ = ['begin_folder', 'discard_folder', 'publish_folder', 'tidy_up_folders']

_REPLACED = '.replaced-'


def begin_folder(path: Path) -> Path:
    """Make the temporary folder; what a killed process left under this name is removed. Called on one rank.

    Args:
        path (Path): The final name.

    Returns:
        Path: To be filled, and then given to :func:`publish_folder` or :func:`discard_folder` by its final name.
    """
    temporary = Path(temporary_path(str(path)))
    discard_folder(path)
    temporary.mkdir(parents=True)
    return temporary


def publish_folder(path: Path) -> None:
    """Give the folder its final name, in the place of an older one. Called on one rank.

    Args:
        path (Path): The final name.

    Raises:
        OSError: When the disk is full, say. The older one has its name then.
    """
    temporary = Path(temporary_path(str(path)))
    for inner, _, files in os.walk(temporary):
        for name in files:
            with open(os.path.join(inner, name), 'rb+') as file:
                os.fsync(file.fileno())
        flush_folder(inner)
    replaced = path.with_name(_REPLACED + path.name)
    if path.exists():
        _remove(replaced)
        os.rename(path, replaced)
    try:
        os.rename(temporary, path)
    except OSError:
        if replaced.exists():
            os.rename(replaced, path)
        raise
    flush_folder(path.parent)
    _remove(replaced)


def discard_folder(path: Path) -> None:
    """Remove what an unfinished export left. Called on one rank.

    Args:
        path (Path): The final name.
    """
    _remove(Path(temporary_path(str(path))))


def tidy_up_folders(folder: str, name: str) -> None:
    """Remove or finish what killed processes left. Called on one rank, before anything is written.

    Args:
        folder (str): Holds the folders.
        name (str): Their name in it, with Composer's placeholders: ``'ep{epoch}-ba{batch}'``.
    """
    for path in map(Path, leftovers(folder, name)):
        discard_folder(path)
    for replaced in Path(folder).glob(f'{_REPLACED}*'):
        path = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if path.exists():
            _remove(replaced)
        else:
            os.rename(replaced, path)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
