"""Checkpoints as W&B artifacts that say where they are. Nothing is uploaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.callbacks import CheckpointSaver
from composer.utils import format_name_with_dist

from composer_ds.sharded.manifest import MANIFEST
from composer_ds.sharded.remote import RemoteFolder

if TYPE_CHECKING:
    from composer.core import State, Timestamp

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
        """Make an artifact of each new checkpoint.

        Args:
            state (State): Composer's state.

        Yields:
            tuple[Any, list[str]]: A ``wandb.Artifact`` and its aliases.
        """
        import wandb

        for path, time in self._saved(state):
            name = re.sub(r'[^a-zA-Z0-9._-]', '.', f'{state.run_name}-checkpoint')  # all that W&B allows
            epoch, batch = time.epoch.value, time.batch.value
            artifact = wandb.Artifact(name, 'model', metadata={'epoch': epoch, 'batch': batch, 'path': path})
            # A checksum would be that of the content, which may be large or far away.
            artifact.add_reference(path if '://' in path else Path(path).resolve().as_uri(), checksum=False)
            yield artifact, ['latest', f'ep{epoch}-ba{batch}']

    def _saved(self, state: State) -> Iterator[tuple[str, Timestamp]]:
        for callback in state.callbacks:
            if isinstance(callback, CheckpointSaver):
                yield from self._files(callback)
            # Not by its class, which imports this package's training.
            elif type(callback).__name__ == 'ShardedCheckpointSaver':
                yield from self._sharded(callback, state)

    def _files(self, saver: CheckpointSaver) -> Iterator[tuple[str, Timestamp]]:
        for path, time in saver.all_saved_checkpoints_to_timestamp.items():
            if path not in self._seen and Path(path).exists():
                self._seen.add(path)
                yield path, time

    def _sharded(self, saver: Any, state: State) -> Iterator[tuple[str, Timestamp]]:
        # Complete ones have a manifest; a save in the background gets it later. In an object store, what is there
        # cannot be told from here: the local copy is removed.
        folder = format_name_with_dist(saver.folder, state.run_name)
        if RemoteFolder.is_one(folder):
            return
        for manifest in Path(folder).glob(f'*/{MANIFEST}'):
            path = str(manifest.parent)
            if path not in self._seen:
                self._seen.add(path)
                yield path, state.timestamp
