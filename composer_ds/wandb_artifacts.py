"""Checkpoints as W&B artifacts that say where they are. Nothing is uploaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.callbacks import CheckpointSaver
from composer.utils import format_name_with_dist_and_time

from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver

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
        """Make an artifact of each new checkpoint. Called when all ranks have left the save behind.

        Args:
            state (State): Composer's state.

        Yields:
            tuple[Any, list[str]]: A ``wandb.Artifact`` and its aliases.
        """
        import wandb

        for path, time in self._saved(state):
            epoch, batch = time.epoch.value, time.batch.value
            name = re.sub(r'[^a-zA-Z0-9._-]', '.', f'{state.run_name}-checkpoint')  # all that W&B allows
            artifact = wandb.Artifact(name, 'model', metadata={'epoch': epoch, 'batch': batch, 'path': path})
            # A checksum would be that of the content, which may be large or far away.
            artifact.add_reference(path if '://' in path else Path(path).resolve().as_uri(), checksum=False)
            yield artifact, ['latest', f'ep{epoch}-ba{batch}']

    def _saved(self, state: State) -> Iterator[tuple[str, Timestamp]]:
        for callback in state.callbacks:
            if isinstance(callback, CheckpointSaver):
                found = callback.all_saved_checkpoints_to_timestamp.items()
            elif isinstance(callback, ShardedCheckpointSaver):
                found = callback.complete
            else:
                continue
            for path, time in found:
                if path not in self._seen and (place := _place(callback, path, time, state)) is not None:
                    self._seen.add(path)
                    yield place, time


def _place(saver: CheckpointSaver | ShardedCheckpointSaver, path: str, time: Timestamp, state: State) -> str | None:
    """Where a checkpoint lies, or where in an object store Composer uploads it to; None where it is not yet there."""
    if isinstance(saver, ShardedCheckpointSaver):
        return path
    uploader, name = saver.remote_uploader, saver.remote_file_name
    if uploader is None or name is None:
        return path if Path(path).exists() else None
    key = format_name_with_dist_and_time(name.filename, state.run_name, time).lstrip('/')
    return f'{uploader.remote_backend_name}://{uploader.remote_bucket_name}/{key}'
