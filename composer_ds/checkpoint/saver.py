"""Composer's ``CheckpointSaver``, whose saves can be killed at any moment.

Composer (0.32.1) writes under the final name, and takes ``latest`` away before it makes the new one. At ``BEFORE_LOAD``
every ``CheckpointSaver`` of the Trainer is given a subclass of its class, in place: the Trainer holds on to the object.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger
from composer.utils import checkpoint, create_symlink_file, dist, format_name_with_dist

from composer_ds.announcements import announce_saved
from composer_ds.checkpoint.atomic import discard, finish, leftovers
from composer_ds.checkpoint.writing import save_checkpoint

__all__ = ['SafeCheckpointSaver', 'save_safely']


class SafeCheckpointSaver(CheckpointSaver):
    """Never constructed: :func:`save_safely` makes it, or a subclass of it, the class of the user's object.

    Private methods of Composer's class are overridden. What Composer's own do is told by
    ``tests/unit/test_checkpoint_saver.py``, which fails when they change.
    """

    last_saved: str | None = None
    """The newest checkpoint of this run, on rank 0."""

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        filename = self.filename.format(state, keep_placeholders=True)
        path = checkpoint.get_save_filename(state, filename)
        started = time.monotonic()
        moves_latest = self.latest_filename is not None and self.num_checkpoints_to_keep != 0
        timestamps = dict(self.all_saved_checkpoints_to_timestamp)
        # Before the save: a checkpoint lists itself, too.
        self.all_saved_checkpoints_to_timestamp[path] = state.timestamp
        try:
            saved_path = save_checkpoint(
                state,
                filename,
                weights_only=self.weights_only,
                ignore_keys=self.ignore_keys,
                latest=self.latest_filename.format(state) if self.latest_filename and moves_latest else None,
            )
        except BaseException:
            self.all_saved_checkpoints_to_timestamp = timestamps
            raise
        self.last_checkpoint_batch = state.timestamp.batch
        self.symlink_count += 1
        self.rank_saves_symlinks = saved_path is not None
        if saved_path is not None:
            batch, size_bytes = state.timestamp.batch.value, os.path.getsize(saved_path)
            announce_saved('the checkpoint', saved_path, batch, size_bytes, started)
            self.last_saved = f'{saved_path} (batch {batch})'
            if self.remote_uploader is not None and self.remote_file_name is not None:
                self.last_saved += f', uploaded as {self.remote_file_name.format(state).lstrip("/")}'
        if self.remote_file_name is not None:
            self._upload(state, logger, saved_path)
        if saved_path is not None:
            self.saved_checkpoints.append(saved_path)
            if self.num_checkpoints_to_keep >= 0:
                self._rotate_checkpoints()

    def _upload(self, state: State, logger: Logger, saved_path: str | None) -> None:
        """Upload the file, then a symlink file that names it: what Composer does, without its sharded checkpoints.

        Collective when there is an uploader.
        """
        assert self.remote_file_name is not None
        remote_path = self.remote_file_name.format(state).lstrip('/')
        mine: list[str] = []
        if saved_path is not None:
            try:
                self._upload_checkpoint(remote_path, saved_path, mine, logger)
            except FileExistsError as error:
                raise FileExistsError(
                    f'{remote_path} cannot be uploaded: {error}. To replace it, set save_overwrite=True '
                    f'(now {self.overwrite}).'
                ) from error
        all_remote_paths = [] if self.remote_uploader is None else dist.all_gather_object(mine)
        if saved_path is None or self.latest_remote_file_name is None:
            return
        remote_symlink = self.latest_remote_file_name.format(state).lstrip('/') + '.symlink'
        symlink_file = os.path.join(self.tmp_dir_for_symlink.name, f'latest.{self.symlink_count}.symlink')
        create_symlink_file(remote_path, symlink_file)
        if self.remote_uploader is None:
            logger.upload_file(remote_file_name=remote_symlink, file_path=symlink_file, overwrite=True)
            return
        uploaded = self.remote_uploader.check_remote_files_exist_async(
            remote_checkpoint_file_names=list(itertools.chain.from_iterable(all_remote_paths)),
            max_wait_time_in_seconds=self.upload_timeout_in_seconds,
            wait_before_next_try_in_seconds=self._symlink_upload_wait_before_next_try_in_seconds,
        )
        self.symlink_upload_tasks.append((uploaded, symlink_file, remote_symlink))

    def _rotate_checkpoints(self, sharding_enabled: bool = False) -> None:
        while len(self.saved_checkpoints) > self.num_checkpoints_to_keep:
            oldest = self.saved_checkpoints.pop(0)
            # With one name for all saves, Composer would remove the newest.
            if oldest not in self.saved_checkpoints and os.path.exists(oldest):
                os.remove(oldest)


def save_safely(state: State) -> Callable[[], None]:
    """Make the saves of every ``CheckpointSaver`` safe, and tidy up after processes that were killed.

    Called at ``BEFORE_LOAD``, on every rank, before autoresume looks for ``latest``.

    Args:
        state (State): Composer's state, whose callbacks are looked through.

    Returns:
        Callable[[], None]: Gives the callbacks their own classes back.
    """
    savers = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
    if dist.get_global_rank() == 0:
        _tidy_up(state, savers)
    classes = [type(saver) for saver in savers]
    for saver in savers:
        saver.__class__ = _safe_class(type(saver))

    def undo() -> None:
        for saver, cls in zip(savers, classes, strict=True):
            saver.__class__ = cls

    return undo


def _safe_class(cls: type[CheckpointSaver]) -> Any:
    # Behind a subclass of the user's: what that overrides stays overridden, and its super() finds ours.
    bases = (SafeCheckpointSaver,) if cls is CheckpointSaver else (cls, SafeCheckpointSaver)
    # The qualified name is the key in checkpoints.
    names = {'__module__': cls.__module__, '__qualname__': cls.__qualname__, '__doc__': cls.__doc__}
    return type(cls.__name__, bases, names)


def _tidy_up(state: State, savers: list[CheckpointSaver]) -> None:
    """Finish or remove what killed processes left. All symlinks first: they are judged by the files that are left."""
    for saver in savers:
        if saver.latest_filename is not None:
            for latest in leftovers(
                format_name_with_dist(saver.folder, state.run_name), saver.latest_filename.filename
            ):
                finish(latest)
    for saver in savers:
        for path in leftovers(format_name_with_dist(saver.folder, state.run_name), saver.filename.filename):
            discard(path)
