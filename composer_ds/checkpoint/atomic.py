"""Files that appear complete or not at all: written under a temporary name, flushed, then renamed.

A save is killed, or the power fails, between any two of these calls; what then stands in the folder:

==========================================  ==============================================================
after                                       in the folder
==========================================  ==============================================================
writing ``.incomplete-ba5.pt``              the old files, and a leftover that the next start removes
linking ``.incomplete-latest.pt -> ba5.pt`` the same, and a second leftover
renaming ``.incomplete-ba5.pt`` to ba5.pt   a complete ba5.pt; ``latest`` is behind. The link without its
                                            ``.incomplete-ba5.pt`` says so, and the next start moves it
renaming ``.incomplete-latest.pt``          the new state
==========================================  ==============================================================

The middle link is there because Composer refuses to train when the folder holds a checkpoint that is newer than the
one it resumed from.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re

__all__ = ['discard', 'finish', 'flush_folder', 'leftovers', 'publish', 'temporary_path']

# In front, not behind: Composer tells by a name's end how a file is compressed, and by its beginning that it is none
# of its own checkpoints.
_PREFIX = '.incomplete-'


def temporary_path(path: str) -> str:
    """Return the name under which a file is written.

    Args:
        path (str): The final name.

    Returns:
        str: In the same folder, so that renaming is atomic.
    """
    folder, name = os.path.split(path)
    return os.path.join(folder, _PREFIX + name)


def publish(path: str, latest: str | None = None) -> None:
    """Give the complete file at ``temporary_path(path)`` its final name, then let a symlink point to it.

    Called on one rank. Everything is on the disk when it returns, also if the power fails.

    Args:
        path (str): The final name; a file of this name is replaced.
        latest (str | None): The symlink, which is replaced; None makes none. Default: None.

    Raises:
        OSError: When the disk is full, say. Nothing is published then, or :func:`finish` ends it at the next start.
    """
    with open(temporary_path(path), 'rb+') as file:
        os.fsync(file.fileno())
    if latest is None:
        _rename(path)
        return
    folder, link = os.path.dirname(latest) or '.', temporary_path(latest)
    os.makedirs(folder, exist_ok=True)
    _remove(link)
    os.symlink(os.path.relpath(path, folder), link)
    _rename(path)
    _rename(latest)


def discard(path: str, latest: str | None = None) -> None:
    """Remove what an unfinished write left, unless the file already has its final name. Called on one rank.

    Args:
        path (str): The final name.
        latest (str | None): As in :func:`publish`. Default: None.
    """
    if os.path.lexists(temporary_path(path)):
        if latest is not None:
            _remove(temporary_path(latest))
        _remove(temporary_path(path))


def leftovers(folder: str, filename: str) -> list[str]:
    """List the temporary files that killed processes left.

    Args:
        folder (str): Where checkpoints are saved.
        filename (str): Their name below it, with Composer's placeholders: ``'ep{epoch}-ba{batch}-rank{rank}.pt'``.

    Returns:
        list[str]: Their final names.
    """
    pattern = '*'.join(glob.escape(part) for part in re.split(r'\{[^{}]*\}', filename))
    found = glob.glob(temporary_path(os.path.join(glob.escape(folder), pattern)))
    return [os.path.join(os.path.dirname(name), os.path.basename(name).removeprefix(_PREFIX)) for name in found]


def finish(latest: str) -> None:
    """End a :func:`publish` that was killed. Called on one rank, before anybody reads the symlink.

    Args:
        latest (str): The final name of the symlink.
    """
    link = temporary_path(latest)
    target = os.path.join(os.path.dirname(latest), os.readlink(link)) if os.path.islink(link) else latest
    if target != latest and os.path.exists(target) and not os.path.lexists(temporary_path(target)):
        _rename(latest)
    else:
        _remove(link)


def flush_folder(folder: str | os.PathLike) -> None:
    """Let the names in a folder survive a power failure.

    Args:
        folder (str | os.PathLike): The folder; empty for the current one.
    """
    # Not every network file system can flush a folder; those keep their own order.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder or '.', os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _rename(path: str) -> None:
    os.replace(temporary_path(path), path)
    flush_folder(os.path.dirname(path))


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
