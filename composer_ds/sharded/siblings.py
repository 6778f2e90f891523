"""The checkpoints of one folder: which are complete, which is the newest, what is removed; and what kills left.

A save or a removal is killed between any two of these calls; what then stands in the folder:

============================================  ========================================================================
after                                         in the folder
============================================  ========================================================================
writing into ``.incomplete-ba5``              the old checkpoints, and a leftover that the next start removes
writing its manifest                          the same, but the leftover is complete: the next start gives it its name
renaming an old ba5 to ``.incomplete-old-``   the same, and a leftover that the next start removes
renaming ``.incomplete-ba5`` to ba5           a complete ba5; ``latest`` is behind, and autoresume knows
moving ``latest``                             the new state
renaming an old ba3 to ``.incomplete-old-``   the new state, and a leftover that the next start removes
============================================  ========================================================================
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from composer_ds.checkpoint.atomic import flush_folder, leftovers, temporary_path
from composer_ds.sharded.manifest import LATEST, MANIFEST, Manifest, read_manifest

__all__ = [
    'complete_ones',
    'newest_of',
    'point_latest',
    'problems_of_name',
    'put_in_place',
    'recover',
    'rotate',
    'temporary_folder',
    'write_durably',
]

log = logging.getLogger(__name__)

_OLD = 'old-'


def temporary_folder(folder: Path) -> Path:
    """Return where a checkpoint is written until it is complete.

    Args:
        folder (Path): The checkpoint.

    Returns:
        Path: Beside it.
    """
    return Path(temporary_path(str(folder)))


def problems_of_name(filename: str) -> list[str]:
    """Find why checkpoints cannot have such names.

    Args:
        filename (str): A name with Composer's placeholders.

    Returns:
        list[str]: One sentence each.
    """
    if '{rank}' in filename or '/' in filename:
        return [
            f'ShardedCheckpointSaver(filename={filename!r}): the name of one folder for all ranks is needed, without '
            "{rank} and '/'; write 'ep{epoch}-ba{batch}', and put the rest into folder"
        ]
    if '{batch}' not in filename and '{epoch}' not in filename and '{sample}' not in filename:
        return [
            f'ShardedCheckpointSaver(filename={filename!r}): every checkpoint would replace the one before it while it '
            "is the only one; write 'ba{batch}', say"
        ]
    return []


def complete_ones(folder: Path) -> list[tuple[Path, Manifest]]:
    """List the complete checkpoints of a folder, by their manifests.

    Args:
        folder (Path): Holds checkpoints.

    Returns:
        list[tuple[Path, Manifest]]: The one with the fewest batches first.
    """
    found = [(path.parent, read_manifest(path.parent)) for path in folder.glob(f'[!.]*/{MANIFEST}')]
    return sorted(found, key=lambda one: (one[1].time['batch'], one[0].stat().st_mtime))


def newest_of(folder: Path) -> Path | None:
    """Find the checkpoint to go on from: that of ``latest``, or one that was complete when a kill left it behind.

    Not simply that of the most batches: with ``overwrite`` an earlier run may have gone further.

    Args:
        folder (Path): Holds checkpoints.

    Returns:
        Path | None: It; None when there is no complete one.
    """
    complete = complete_ones(folder)
    latest = folder / LATEST
    name = latest.read_text(encoding='utf-8').strip() if latest.is_file() else None
    named = [(path, manifest.time['batch']) for path, manifest in complete if path.name == name]
    if not named:
        return complete[-1][0] if complete else None
    moved_at = latest.stat().st_mtime_ns
    after = [
        path
        for path, manifest in complete
        if manifest.time['batch'] > named[0][1] and (path / MANIFEST).stat().st_mtime_ns >= moved_at
    ]
    return after[-1] if after else named[0][0]


def put_in_place(folder: Path) -> None:
    """Give a complete checkpoint its name. What had this name before is removed afterwards.

    Args:
        folder (Path): The checkpoint, which is still in its temporary folder.
    """
    old = _put_away(folder) if folder.exists() else None
    os.replace(temporary_folder(folder), folder)
    flush_folder(folder.parent)
    if old is not None:
        shutil.rmtree(old)


def _put_away(folder: Path) -> Path:
    """Take a checkpoint its name, so that a half-removed one is nobody's checkpoint; return where it is now."""
    old = temporary_folder(folder.with_name(_OLD + folder.name))
    if old.exists():
        shutil.rmtree(old)
    os.replace(folder, old)
    return old


def point_latest(folder: Path) -> None:
    """Let ``latest`` name a checkpoint.

    Args:
        folder (Path): The checkpoint.
    """
    write_durably(folder.parent / LATEST, folder.name + '\n')


def write_durably(path: Path, text: str) -> None:
    """Write a small file, or leave the one that is there.

    Args:
        path (Path): The file.
        text (str): Its content.
    """
    temporary = Path(temporary_path(str(path)))
    try:
        with open(temporary, 'w', encoding='utf-8') as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


def rotate(newest: Path, number: int) -> None:
    """Remove the oldest checkpoints of a folder. What cannot be removed stays, with a warning.

    Args:
        newest (Path): The one that was saved last; never removed.
        number (int): How many remain, ``newest`` included.
    """
    batches = {path: manifest.time['batch'] for path, manifest in complete_ones(newest.parent)}
    now = batches.pop(newest)
    # With overwrite, there may be later ones of an earlier run: they go first.
    others = sorted(batches, key=lambda path: (batches[path] <= now, batches[path]))
    for path in others[: len(others) - max(number, 1) + 1]:
        try:
            shutil.rmtree(_put_away(path))
        except OSError as error:
            log.warning('The old checkpoint %s cannot be removed: %s', path, error)


def recover(folder: Path, filename: str) -> None:
    """End what killed saves and removals began. Called when nobody is writing.

    Args:
        folder (Path): Holds checkpoints.
        filename (str): Their names, with Composer's placeholders.
    """
    for name in leftovers(str(folder), _OLD + filename):
        shutil.rmtree(temporary_folder(Path(name)))
    for name in leftovers(str(folder), filename):
        path, hidden = Path(name), temporary_folder(Path(name))
        if (hidden / MANIFEST).exists():
            put_in_place(path)
        else:
            shutil.rmtree(hidden)
    Path(temporary_path(str(folder / LATEST))).unlink(missing_ok=True)
