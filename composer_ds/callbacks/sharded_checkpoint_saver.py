"""``ShardedCheckpointSaver``: every rank saves its own partitions, in the background if asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from composer import Callback
from composer.core import Event, State, Time
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist, format_name_with_dist, format_name_with_dist_and_time

from composer_ds.errors import ConfigError
from composer_ds.sharded.files import complete_ones, remove
from composer_ds.sharded.preemption import Preemption
from composer_ds.sharded.remote import RemoteFolder
from composer_ds.sharded.writing import Save, agreeing

__all__ = ['ShardedCheckpointSaver']

log = logging.getLogger(__name__)

# How long a rank waits for the slowest disk.
_TIMEOUT = timedelta(hours=2)


class ShardedCheckpointSaver(Callback):
    """Saves sharded checkpoints: every rank writes the partitions that it owns.

    A checkpoint resumes at any world size, under any ZeRO stage, offload and precision: see
    ``DeepSpeed(load_sharded=...)``. It needs :class:`~composer_ds.DeepSpeed` among the algorithms.

    Args:
        folder (str): Where checkpoints are saved, with Composer's placeholders, such as ``'ckpts/{run_name}'``. On all
            nodes, shared or not; or the URI of an object store (``'s3://bucket/path'``). Default:
            ``'{run_name}/sharded'``.
        interval (str | int | Time | Callable[[State, Event], bool]): When, as ``save_interval`` of Composer's Trainer.
            The last batch is saved, too. Default: ``'1ep'``.
        filename (str): The name of a checkpoint below ``folder``, with Composer's placeholders. Default:
            ``'ep{epoch}-ba{batch}'``.
        num_checkpoints_to_keep (int): How many complete ones remain in ``folder``, those of earlier runs included; -1
            for all. In an object store all remain. Default: -1.
        weights_only (bool): Whether to save nothing but the model. Default: False.
        asynchronous (bool): Whether training goes on while the files are written: it waits only until the partitions
            are copied to host memory, which needs the memory for one copy of them. Default: False.
        autoresume (bool): Whether a Trainer goes on from the newest complete checkpoint in ``folder``, where there is
            one. It comes before ``DeepSpeed(load_sharded=...)`` and ``load_path``. Default: False.
        overwrite (bool): Whether to save into a folder that holds checkpoints of a later batch than the one at which
            training starts. Default: False.
        save_on_sigterm (bool): Whether a SIGTERM lets the ranks save after the batch at hand, and end training.
            Default: True.
    """

    def __init__(
        self,
        folder: str = '{run_name}/sharded',
        interval: str | int | Time | Callable[[State, Event], bool] = '1ep',
        filename: str = 'ep{epoch}-ba{batch}',
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        asynchronous: bool = False,
        autoresume: bool = False,
        overwrite: bool = False,
        save_on_sigterm: bool = True,
    ):
        problems = _problems_of(filename, num_checkpoints_to_keep)
        if weights_only and autoresume:
            problems.append(
                'ShardedCheckpointSaver(weights_only=True, autoresume=True): weights alone say not where a run was; '
                'leave one of them out'
            )
        if problems:
            raise ConfigError(problems)
        self.folder = folder
        self.filename = filename
        self.save_interval: Any = interval if callable(interval) else create_interval_scheduler(interval)
        self.num_checkpoints_to_keep = num_checkpoints_to_keep
        self.weights_only = weights_only
        self.asynchronous = asynchronous
        self.autoresume = autoresume
        self.overwrite = overwrite
        self._preemption = Preemption() if save_on_sigterm else None
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future | None = None
        self._group: Any = None
        self._store: RemoteFolder | None = None
        self._saved_at = -1

    @property
    def group(self) -> torch.distributed.ProcessGroup:
        """All ranks, on the CPU, for saves alone. Made at the first use. Collective."""
        if self._group is None:
            self._group = torch.distributed.new_group(backend='gloo', timeout=_TIMEOUT)
        return self._group

    def local_folder(self, state: State) -> Path:
        """Return where the files lie while they are written, and if the folder is local also afterwards.

        Args:
            state (State): Composer's state.

        Returns:
            Path: Alike on all ranks.
        """
        folder = format_name_with_dist(self.folder, state.run_name)
        return RemoteFolder.cache(folder) if RemoteFolder.is_one(folder) else Path(folder)

    def _remote(self, state: State) -> RemoteFolder | None:
        folder = format_name_with_dist(self.folder, state.run_name)
        if self._store is None and RemoteFolder.is_one(folder):
            self._store = RemoteFolder(folder)
        return self._store

    def fit_start(self, state: State, logger: Logger) -> None:
        """Refuse to mix two runs in one folder. Called by Composer, on every rank.

        Collective.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.

        Raises:
            ConfigError: On every rank.
        """
        if self._preemption is not None:
            self._preemption.watch()
        later = [self._later_one(state) if dist.get_global_rank() == 0 else None]
        torch.distributed.broadcast_object_list(later, src=0, group=self.group)
        if later[0] is not None:
            raise ConfigError(later[0])

    def _later_one(self, state: State) -> str | None:
        if self.overwrite:
            return None
        now = state.timestamp.batch.value
        later = [(path, one.time['batch']) for path, one in complete_ones(self.local_folder(state))]
        ahead = [f'{path} (batch {batch})' for path, batch in later if batch > now]
        if not ahead:
            return None
        return (
            f'ShardedCheckpointSaver(folder={self.folder!r}): training starts at batch {now}, and the folder holds '
            f'{", ".join(ahead)}. Give autoresume=True to go on from the newest, another folder, or overwrite=True.'
        )

    def batch_end(self, state: State, logger: Logger) -> None:
        """Stop training after a SIGTERM, which also makes Composer save. Called after every batch, on every rank.

        Collective when ``save_on_sigterm`` is on.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        if self._preemption is not None and self._preemption.is_asked_for():
            if dist.get_global_rank() == 0:
                log.warning('SIGTERM: training ends after batch %d, and is saved.', state.timestamp.batch.value)
            state.stop_training()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save when it is time. Called by Composer after every batch, on every rank. Collective when it saves.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._save_if_due(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save when it is time. Called by Composer after every epoch, on every rank. Collective when it saves.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save when it is time. Called by Composer after every iteration, on every rank. Collective when it saves.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._save_if_due(state, Event.ITERATION_CHECKPOINT)

    def _save_if_due(self, state: State, event: Event) -> None:
        due = self.save_interval(state, event) or (self._preemption is not None and self._preemption.asked_for)
        if due and self._saved_at != state.timestamp.batch.value:
            self.save(state)

    def save(self, state: State) -> Path:
        """Save a checkpoint now; between two batches.

        Collective: every rank calls it.

        Args:
            state (State): Composer's state: ``trainer.state``.

        Returns:
            Path: The checkpoint; complete when :meth:`wait` has returned.

        Raises:
            CheckpointError: On every rank, when this save or the one before it failed.
        """
        self.wait()
        started = time.monotonic()
        folder = self.local_folder(state)
        name = format_name_with_dist_and_time(self.filename, state.run_name, state.timestamp)
        save = Save(folder / name, self.group, self.weights_only)
        save.prepare(state, to_host=self.asynchronous)
        stalled_sec = time.monotonic() - started
        self._saved_at = state.timestamp.batch.value
        remote = self._remote(state)
        if self.asynchronous:
            self._thread = self._thread or ThreadPoolExecutor(1, 'sharded checkpoint')
            self._writing = self._thread.submit(self._write, save, remote, started, stalled_sec)
        else:
            self._write(save, remote, started, None)
        return save.folder

    def _write(self, save: Save, remote: RemoteFolder | None, started: float, stalled_sec: float | None) -> None:
        save.write()
        if remote is not None:
            with agreeing(self.group, lambda error: f'{save.folder.name} was not uploaded: {error!r}'):
                remote.upload_files(save)
            with agreeing(self.group, lambda error: f'{save.folder.name} was not uploaded: {error!r}'):
                remote.publish(save)
        elif save.is_first_of_folder:
            self._rotate(save.folder)
        # Ranks that leave while others still use the group would break it.
        torch.distributed.barrier(self.group)
        if dist.get_global_rank() == 0:
            stalled = '' if stalled_sec is None else f'; training waited {stalled_sec:.1f} s'
            log.info('Saved %s in %.1f s%s', save.folder, time.monotonic() - started, stalled)

    def _rotate(self, newest: Path) -> None:
        if self.num_checkpoints_to_keep >= 0:
            others = [path for path, _ in complete_ones(newest.parent) if path != newest]
            keep = max(self.num_checkpoints_to_keep, 1) - 1
            for path in others[: len(others) - keep]:
                remove(path)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete.

        Collective.

        Raises:
            CheckpointError: On every rank, when it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for the last save. Called by Composer when the Trainer is closed, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.

        Raises:
            CheckpointError: On every rank, when it could not be written.
        """
        if self._preemption is not None:
            self._preemption.leave()
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None


def _problems_of(filename: str, num_checkpoints_to_keep: int) -> list[str]:
    problems = []
    if '{rank}' in filename or '/' in filename:
        problems.append(
            f'ShardedCheckpointSaver(filename={filename!r}): the name of one folder for all ranks is needed, without '
            "{rank} and '/'; write 'ep{epoch}-ba{batch}', and put the rest into folder"
        )
    elif '{batch}' not in filename and '{epoch}' not in filename and '{sample}' not in filename:
        problems.append(
            f'ShardedCheckpointSaver(filename={filename!r}): every checkpoint would replace the one before it while it '
            "is the only one; write 'ba{batch}', say"
        )
    if num_checkpoints_to_keep < -1 or num_checkpoints_to_keep == 0:
        problems.append(
            f'ShardedCheckpointSaver(num_checkpoints_to_keep={num_checkpoints_to_keep}): allowed are -1 for all, and 1 '
            'or more: the newest is never removed'
        )
    return problems
