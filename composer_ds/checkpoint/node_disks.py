"""Nodes with disks of their own: autoresume finds the checkpoint that rank 0 wrote on the disk of its node.

Composer's CheckpointSaver writes on rank 0 only, and its autoresume wants the file on every node: with disks that are
not shared the run that saves cannot resume ("Downloading the checkpoint to all nodes failed").
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from composer.core import State
from composer.utils import dist, format_name_with_dist
from rich.filesize import decimal

from composer_ds.announcements import announce
from composer_ds.checkpoint.agreement import agreeing
from composer_ds.errors import CheckpointError

__all__ = ['latest_of', 'lend']

_CHUNK_BYTES = 2**24


def latest_of(save_folder: str | None, save_latest_filename: str | None, run_name: str) -> Path | None:
    """Find where autoresume looks for a checkpoint, as rank 0 names it.

    Collective.

    Args:
        save_folder (str | None): The Trainer's.
        save_latest_filename (str | None): The Trainer's.
        run_name (str): For the placeholders of both.

    Returns:
        Path | None: None where it is no place on a disk.
    """
    path = None
    if save_folder and save_latest_filename and '://' not in save_folder:
        names = (format_name_with_dist(name, run_name) for name in (save_folder, save_latest_filename))
        path = Path(os.path.abspath(os.path.join(*names)))
    paths = [path]
    dist.broadcast_object_list(paths)
    return paths[0]


def lend(state: State, latest: Path) -> Callable[[], None]:
    """Copy rank 0's newest checkpoint to the nodes that do not have it, until it is loaded.

    Collective: called at ``BEFORE_LOAD``, on every rank.

    Args:
        state (State): Composer's state, for the device that communicates.
        latest (Path): The symlink or file, alike on every rank.

    Returns:
        Callable[[], None]: Removes the copy, on the rank that wrote one; no collective.

    Raises:
        CheckpointError: On every rank: another node has a checkpoint and rank 0's has none, or a copy cannot be
            written.
    """
    there = dist.all_gather_object(latest.exists())
    if not there[0]:
        if any(there):
            raise CheckpointError(
                f'autoresume: rank {there.index(True)} finds {latest} on the disk of its node, and rank 0 has none '
                "there. Rank 0's counts, so training would begin anew. Start the nodes in the same order as before, "
                'give a save_folder that all nodes share, or remove that file'
            )
        return lambda: None
    borrows = not there[dist.get_global_rank()] and dist.get_local_rank() == 0
    borrowers = sum(dist.all_gather_object(borrows))
    if borrowers == 0:
        return lambda: None
    size = dist.all_gather_object(latest.stat().st_size if dist.get_global_rank() == 0 else 0)[0]
    announce(
        f'autoresume: {latest} is on the disk of the first node only. It is copied to {borrowers} other '
        f'node{"s" * (borrowers > 1)} ({decimal(size)}), and removed there when it is loaded.'
    )
    with agreeing(None, lambda error: f'autoresume: {latest} cannot be copied to this node: {error}'):
        _copy(state, latest, size, borrows)
    return (lambda: latest.unlink(missing_ok=True)) if borrows else (lambda: None)


def _copy(state: State, latest: Path, size: int, borrows: bool) -> None:
    """Send the file from rank 0; a rank that cannot read or write takes part until the end."""
    error: OSError | None = None
    incomplete = latest.with_name(f'.borrowed-{latest.name}')
    source = latest.open('rb') if dist.get_global_rank() == 0 else None
    target = None
    try:
        if borrows:
            latest.parent.mkdir(parents=True, exist_ok=True)
            target = incomplete.open('wb')
    except OSError as raised:
        error = raised
    for start in range(0, size, _CHUNK_BYTES):
        chunk = torch.zeros(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
        if source is not None:
            data = bytearray(source.read(len(chunk)))
            if len(data) == len(chunk):
                chunk = torch.frombuffer(data, dtype=torch.uint8)
            else:
                error = OSError(f'it ends after {start + len(data):,} of {size:,} bytes')
        chunk = state.device.tensor_to_device(chunk)
        dist.broadcast(chunk, src=0)
        if target is not None and error is None:
            try:
                target.write(chunk.cpu().numpy().data)
            except OSError as raised:
                error = raised
    if source is not None:
        source.close()
    if target is not None:
        target.close()
        if error is None:
            incomplete.replace(latest)
        else:
            incomplete.unlink(missing_ok=True)
    if error is not None:
        raise error
