"""Checkpoints that Composer wrote up to 0.27 when it was given a ``deepspeed_config``.

Every rank wrote an archive of its own, ``ep0-ba5-rank0.tar``, ``ep0-ba5-rank1.tar`` and so on (or ``.tar.gz``, ...),
with the files that DeepSpeed had written on that rank in a folder ``deepspeed``, and on rank 0 ``composer_states.pt``,
too.
"""

from __future__ import annotations

import itertools
import re
import shutil
import tarfile
from pathlib import Path

from composer_ds.errors import CheckpointError

__all__ = ['COMPOSER_STATES', 'is_archive_of_composer', 'rank_archives', 'unpack']

COMPOSER_STATES = 'composer_states.pt'
_TAG = 'deepspeed'
_ENDS = ('.tar', '.tar.gz', '.tgz', '.tar.bz2', '.tar.lzma')
_RANK = re.compile(r'rank_?(?:\d+|\{rank\})')


def is_archive_of_composer(path: Path) -> bool:
    """Tell whether a file is such an archive, or a name with ``{rank}`` stands for some.

    Args:
        path (Path): The file.

    Returns:
        bool: Whether its folder ``deepspeed`` is found among its first entries.
    """
    if not path.name.endswith(_ENDS):
        return False
    try:
        first = rank_archives(path)[0]
        with tarfile.open(first) as archive:
            # Behind the root, composer_states.pt and nothing else.
            for member in itertools.islice(archive, 8):
                if member.name.removeprefix('./').split('/')[0] == _TAG:
                    return True
    except (CheckpointError, OSError, tarfile.TarError, EOFError):
        pass
    return False


def rank_archives(path: Path) -> list[Path]:
    """Find the archives of all ranks.

    Args:
        path (Path): One of them, or a path with ``{rank}`` in place of the number.

    Returns:
        list[Path]: Those that are there, in the order of ranks.

    Raises:
        CheckpointError: When there is none.
    """
    places = list(_RANK.finditer(path.name))
    if not places:
        if not path.is_file():
            raise CheckpointError(f'{path} is not there.')
        return [path]
    before, after = path.name[: places[-1].start()], path.name[places[-1].end() :]
    alike = re.compile(re.escape(before) + r'rank_?(\d+)' + re.escape(after))
    if not path.parent.is_dir():
        raise CheckpointError(f'{path.parent} is not there.')
    found = [(int(match[1]), entry) for entry in path.parent.iterdir() if (match := alike.fullmatch(entry.name))]
    if not found:
        raise CheckpointError(f'{path} is not there.')
    return [entry for _, entry in sorted(found)]


def unpack(path: Path, into: Path) -> Path:
    """Unpack the archives of all ranks into one folder.

    Args:
        path (Path): One of them, or a path with ``{rank}``.
        into (Path): An empty folder, with room for all of them.

    Returns:
        Path: The folder with DeepSpeed's files; ``composer_states.pt`` is there, too.

    Raises:
        CheckpointError: When one is damaged, or the folder has no room.
    """
    for archive_path in rank_archives(path):
        try:
            with tarfile.open(archive_path) as archive:
                for member in archive:
                    parts = member.name.removeprefix('./').split('/')
                    # Nothing but files at the two known places: an archive can name any path.
                    known = parts == [COMPOSER_STATES] or (len(parts) == 2 and parts[0] == _TAG)
                    if not (known and member.isfile() and parts[-1].endswith('.pt')):
                        continue
                    source = archive.extractfile(member)
                    assert source is not None
                    with source, open(into / parts[-1], 'wb') as target:
                        shutil.copyfileobj(source, target, 2**20)
        except (tarfile.TarError, EOFError) as error:
            raise CheckpointError(f'{archive_path} is damaged: {error}') from error
        except OSError as error:
            raise CheckpointError(f'{archive_path} cannot be unpacked into {into}: {error}') from error
    return into
