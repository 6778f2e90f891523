"""Checkpoints as W&B artifacts that say where they are. Nothing is uploaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.callbacks import CheckpointSaver
from composer.utils import format_name_with_dist

from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver
from composer_ds.sharded.manifest import MANIFEST, read_manifest
from composer_ds.sharded.remote import RemoteFolder

if TYPE_CHECKING:
    from composer.core import State

__all__ = ['CheckpointReferences']


class CheckpointReferences:
    """Finds checkpoints that were saved since it looked last. On the rank that logs.

    Args:
        state (State): Composer's state; what its callbacks have saved so far is not new.
    """

    def __init__(self, state: State):
        self._seen: set[str] = set()
        for _ in self._saved(state):
            pass

    def new(self, state: State) -> Iterator[tuple[Any, list[str]]]:
        """Make an artifact of each new checkpoint. Called when all ranks have left the save behind.

        Args:
            state (State): Composer's state.

        Yields:
            tuple[Any, list[str]]: A ``wandb.Artifact`` and its aliases.
        """
        import wandb

        for path, epoch, batch in self._saved(state):
            name = re.sub(r'[^a-zA-Z0-9._-]', '.', f'{state.run_name}-checkpoint')  # all that W&B allows
            artifact = wandb.Artifact(name, 'model', metadata={'epoch': epoch, 'batch': batch, 'path': path})
            # A checksum would be that of the content, which may be large or far away.
            artifact.add_reference(path if '://' in path else Path(path).resolve().as_uri(), checksum=False)
            yield artifact, ['latest', f'ep{epoch}-ba{batch}']

    def _saved(self, state: State) -> Iterator[tuple[str, int, int]]:
        for callback in state.callbacks:
            if isinstance(callback, CheckpointSaver):
                yield from self._files(callback)
            elif isinstance(callback, ShardedCheckpointSaver):
                yield from self._sharded(callback, state)

    def _files(self, saver: CheckpointSaver) -> Iterator[tuple[str, int, int]]:
        for path, time in saver.all_saved_checkpoints_to_timestamp.items():
            if path not in self._seen and Path(path).exists():
                self._seen.add(path)
                yield path, time.epoch.value, time.batch.value

    def _sharded(self, saver: ShardedCheckpointSaver, state: State) -> Iterator[tuple[str, int, int]]:
        # What is in an object store cannot be told from here: the local copy is removed.
        folder = format_name_with_dist(saver.folder, state.run_name)
        if RemoteFolder.is_one(folder):
            return
        # Complete ones have a manifest; a save in the background gets it later.
        for manifest in Path(folder).glob(f'*/{MANIFEST}'):
            path = manifest.parent
            if str(path) not in self._seen:
                self._seen.add(str(path))
                time = read_manifest(path).time
                yield str(path), time['epoch'], time['batch']
