"""From which checkpoint a Trainer goes on: what Composer loads, ``load_sharded``, or the newest of a saver's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from composer.core import State
from composer.loggers import Logger

from composer_ds.announcements import announce
from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver
from composer_ds.errors import ConfigError
from composer_ds.sharded.choice import LoadSharded, chosen_path, newest, read_load_sharded
from composer_ds.sharded.loading import load_sharded
from composer_ds.sharded.remote import discard_download
from composer_ds.sharded.source import ShardedSource
from composer_ds.trainer_frame import given_load_path

__all__ = ['LoadSharded', 'load_what_is_chosen', 'read_load_sharded', 'refuse_two_checkpoints']


def refuse_two_checkpoints(wanted: LoadSharded | None) -> None:
    """Refuse two checkpoints to begin with. Called at ``BEFORE_LOAD``, on every rank.

    Args:
        wanted (LoadSharded | None): What ``DeepSpeed`` was given.

    Raises:
        ConfigError: When the Trainer was given another.
    """
    load_path = given_load_path()
    if wanted is not None and load_path is not None:
        raise ConfigError(
            f'Trainer(load_path={load_path!r}) and DeepSpeed(load_sharded={wanted.path!r}) both name a checkpoint to '
            'begin with; give one of them'
        )


def load_what_is_chosen(wanted: LoadSharded | None, state: State, logger: Logger) -> None:
    """Load a sharded checkpoint, if there is one to load. Called at ``AFTER_LOAD``, on every rank.

    Collective. What was saved last comes first: the newest of the folder of a ``ShardedCheckpointSaver`` with
    ``autoresume``, or what Composer's own ``autoresume`` has loaded; then ``load_sharded``.

    Args:
        wanted (LoadSharded | None): What ``DeepSpeed`` was given.
        state (State): Composer's state.
        logger (Logger): Composer's logger.
    """
    loaded_batch = state.timestamp.batch.value
    savers = [one for one in state.callbacks if isinstance(one, ShardedCheckpointSaver) and one.autoresume]
    for saver in savers:
        saver.recover(state)
        found = newest(saver.folder, state)
        if found is None:
            announce(f'autoresume: {saver.folder} holds no complete checkpoint yet.')
            continue
        with _local(found, state) as path:
            batch = ShardedSource(path).manifest.time['batch']
            if batch > loaded_batch:
                load_sharded(LoadSharded(path), state, logger)
                return
        announce(f'autoresume: {found} is of batch {batch}, no later than batch {loaded_batch}, which was loaded.')
    if wanted is not None and loaded_batch == 0:
        with _local(wanted.path, state) as path:
            load_sharded(dataclasses.replace(wanted, path=path), state, logger)
    elif wanted is not None:
        announce(f'{wanted.path} is not loaded: autoresume has found a later checkpoint.')


@contextmanager
def _local(wanted: str, state: State) -> Iterator[str]:
    """Download a checkpoint while it is needed, if it lies in an object store. Collective."""
    path = chosen_path(wanted, state)
    try:
        yield path
        dist.barrier()  # until all have read it
    finally:
        discard_download(path)
