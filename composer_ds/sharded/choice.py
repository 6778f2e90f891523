"""What to load: ``DeepSpeed(load_sharded=...)``, and which checkpoint that is."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from composer.core import State
from composer.utils import dist as composer_dist
from composer.utils import format_name_with_dist

from composer_ds.checkpoint.agreement import agreeing
from composer_ds.errors import CheckpointError, ConfigError
from composer_ds.sharded.remote import RemoteFolder, discard_download
from composer_ds.sharded.siblings import complete_ones, newest_of

__all__ = ['LoadSharded', 'chosen_path', 'later_ones', 'newest', 'read_load_sharded']


@dataclass(frozen=True)
class LoadSharded:
    """What to load, and how. A path alone will do where the defaults do.

    Args:
        path (str): A checkpoint, or a folder with ``latest``, with Composer's placeholders; or their URI in an object
            store. A checkpoint of DeepSpeed's own, of any trainer, gives weights and optimizer state.
        weights_only (bool): Whether to load the model alone, and begin anew with everything else. A file of Composer
            may be given, too, then. Default: False.
        strict (bool): Whether names of the model and the checkpoint must be the same; otherwise those that both have
            are loaded. Default: True.
        schedulers (bool): Whether to load the state of the learning-rate schedulers. Default: True.
        verify (bool): Whether to compare all files with their checksums first. Default: True.
        trusted (bool): Whether to unpickle objects of any class, which can run any code. Default: False.
    """

    path: str
    weights_only: bool = False
    strict: bool = True
    schedulers: bool = True
    verify: bool = True
    trusted: bool = False


def read_load_sharded(given: str | Path | Mapping[str, Any] | LoadSharded | None) -> LoadSharded | None:
    """Read the argument ``load_sharded`` of ``DeepSpeed``.

    Args:
        given (str | Path | Mapping[str, Any] | LoadSharded | None): A path, or the fields of :class:`LoadSharded`.

    Returns:
        LoadSharded | None: It.

    Raises:
        ConfigError: When there are other fields.
    """
    if given is None or isinstance(given, LoadSharded):
        return given
    if isinstance(given, (str, Path)):
        return LoadSharded(str(given))
    names = [one.name for one in fields(LoadSharded)]
    if not isinstance(given, Mapping):
        raise ConfigError(f'load_sharded={given!r}: a path is needed, or a mapping with {", ".join(names)}')
    problems = [f'load_sharded.{key}: unknown; allowed are {", ".join(names)}' for key in given if key not in names]
    if 'path' not in given:
        problems.append('load_sharded.path: missing; it names a checkpoint, or a folder with latest')
    problems += [
        f'load_sharded.{key}={value!r}: true or false is needed'
        for key, value in given.items()
        if key in names and key != 'path' and not isinstance(value, bool)
    ]
    if problems:
        raise ConfigError(problems)
    return LoadSharded(**{**given, 'path': str(given['path'])})


def chosen_path(wanted: str, state: State) -> str:
    """Find the checkpoint that is meant; what lies in an object store is downloaded to every node.

    Collective.

    Args:
        wanted (str): As in :class:`LoadSharded`.
        state (State): Composer's state, for placeholders.

    Returns:
        str: A path, alike on all ranks; ``discard_download`` removes what was downloaded.

    Raises:
        CheckpointError: On every rank, when there is none.
    """
    wanted = format_name_with_dist(wanted, state.run_name)
    if not RemoteFolder.is_one(wanted):
        return _agree_on(wanted)
    parent, _, last = wanted.rstrip('/').rpartition('/')
    inside = RemoteFolder(wanted)
    around = inside if parent.endswith(':/') else RemoteFolder(parent)  # a bucket has nothing around it
    with _agreeing():
        latest = inside.latest() if composer_dist.get_local_rank() == 0 else None
    # Of rank 0: a save may have moved it meanwhile.
    latest, token = _agree_on((latest, uuid.uuid4().hex[:12]))
    remote, name = (around, last) if latest is None else (inside, latest)
    folder = remote.place_of(name, token)
    try:
        with _agreeing():
            if composer_dist.get_local_rank() == 0:
                try:
                    remote.download_manifest(name, folder)
                except CheckpointError as error:
                    beginning = '' if latest else f'{wanted} holds neither a checkpoint nor latest. '
                    raise CheckpointError(f'{beginning}{error}') from error
        with _agreeing():
            remote.download_files(name, folder)
    except CheckpointError:
        discard_download(str(folder))
        raise
    return str(folder)


def newest(folder: str, state: State) -> str | None:
    """Find the newest complete checkpoint of a folder, if there is one.

    Collective.

    Args:
        folder (str): Of a ``ShardedCheckpointSaver``, with Composer's placeholders, or a URI.
        state (State): Composer's state, for placeholders.

    Returns:
        str | None: A path or URI, alike on all ranks.

    Raises:
        CheckpointError: On every rank, when a manifest cannot be read.
    """
    folder = format_name_with_dist(folder, state.run_name)
    remote = RemoteFolder(folder) if RemoteFolder.is_one(folder) else None
    found: str | None = None
    with _agreeing():
        if dist.get_rank() == 0 and remote is not None:
            name = remote.latest()
            found = None if name is None else f'{remote.uri}/{name}'
        elif dist.get_rank() == 0:
            path = newest_of(Path(folder))
            found = None if path is None else str(path)
    return _agree_on(found)


def later_ones(folder: Path, remote: RemoteFolder | None, batch: int) -> list[str]:
    """List the checkpoints of a later batch. Called on one rank.

    Args:
        folder (Path): Holds checkpoints.
        remote (RemoteFolder | None): Holds them instead, if given; there the newest one counts.
        batch (int): The batch.

    Returns:
        list[str]: Their paths and batches.
    """
    if remote is None:
        found = [(str(path), manifest) for path, manifest in complete_ones(folder)]
    else:
        name = remote.latest()
        found = [] if name is None else [(f'{remote.uri}/{name}', remote.manifest(name))]
    return [f'{path} (batch {one.time["batch"]})' for path, one in found if one.time['batch'] > batch]


def _agree_on(value: Any) -> Any:
    """Take rank 0's. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _agreeing() -> Any:
    return agreeing(None, lambda error: str(error) if isinstance(error, CheckpointError) else repr(error))
