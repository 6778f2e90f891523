"""``ShardedCheckpointSaver``: every rank saves its own partitions, in the background if asked."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from composer import Callback
from composer.core import Event, State, Time, Timestamp
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist, format_name_with_dist, format_name_with_dist_and_time

from composer_ds.announcements import announce, announce_saved, describe_duration
from composer_ds.checkpoint.agreement import agreeing
from composer_ds.errors import ConfigError
from composer_ds.running import running_deepspeed
from composer_ds.sharded.choice import later_ones
from composer_ds.sharded.preemption import Preemption, SaveInterval
from composer_ds.sharded.remote import RemoteFolder
from composer_ds.sharded.siblings import problems_of_name, recover, rotate
from composer_ds.sharded.writing import Save

__all__ = ['ShardedCheckpointSaver']

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
        save_on_sigterm (bool): Whether a SIGTERM lets the ranks save after the optimizer step at hand, and end
            training. Default: True.
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
        problems = problems_of_name(filename)
        if num_checkpoints_to_keep < -1 or num_checkpoints_to_keep == 0:
            problems.append(
                f'ShardedCheckpointSaver(num_checkpoints_to_keep={num_checkpoints_to_keep}): allowed are -1 for all, '
                'and 1 or more: the newest is never removed'
            )
        if weights_only and autoresume:
            problems.append(
                'ShardedCheckpointSaver(weights_only=True, autoresume=True): weights alone say not where a run was; '
                'leave one of them out'
            )
        if problems:
            raise ConfigError(problems)
        self.folder = folder
        self.filename = filename
        self._preemption = Preemption() if save_on_sigterm else None
        # A public name, and a function: DeepSpeed lets it wait for the end of an optimizer step, as Composer's.
        self.save_interval: Any = SaveInterval(
            interval if callable(interval) else create_interval_scheduler(interval), self._preemption
        )
        self.num_checkpoints_to_keep = num_checkpoints_to_keep
        self.weights_only = weights_only
        self.asynchronous = asynchronous
        self.autoresume = autoresume
        self.overwrite = overwrite
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future | None = None
        self._group: Any = None
        self._store: RemoteFolder | None = None
        self._saved_at = -1
        self.last_saved: str | None = None
        """The newest complete checkpoint of this run."""
        self.complete: list[tuple[str, Timestamp]] = []
        """Folder or URI of each checkpoint that this saver has written, and when in training; rotated ones, too."""

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

    def recover(self, state: State) -> None:
        """End what a killed save left in the folder.

        Collective: called before anything is loaded from the folder or saved there.

        Args:
            state (State): Composer's state.

        Raises:
            CheckpointError: On every rank, when one cannot.
        """
        self.wait()
        folder, remote = self.local_folder(state), self._remote(state)
        for first in (dist.get_global_rank() == 0, dist.get_local_rank() == 0):  # on disks of the nodes' own, too
            with agreeing(self.group, lambda error: f'What a killed save left in {folder} cannot be removed: {error}'):
                if first and remote is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                elif first:
                    recover(folder, self.filename)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Refuse to mix two runs in one folder. Called by Composer, on every rank.

        Collective.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.

        Raises:
            ConfigError: On every rank.
        """
        running_deepspeed(state, 'ShardedCheckpointSaver')
        if self._preemption is not None:
            self._preemption.watch()
        self.recover(state)
        remote, now = self._remote(state), state.timestamp.batch.value
        ahead: list[Any] = [[]]
        with agreeing(self.group, str):
            if dist.get_global_rank() == 0 and not self.overwrite:
                ahead[0] = later_ones(self.local_folder(state), remote, now)
        torch.distributed.broadcast_object_list(ahead, src=0, group=self.group)
        if ahead[0]:
            raise ConfigError(
                f'ShardedCheckpointSaver(folder={self.folder!r}): training starts at batch {now}, and the folder holds '
                f'{", ".join(ahead[0])}. Give autoresume=True to go on from the newest, another folder, or '
                'overwrite=True.'
            )

    def batch_end(self, state: State, logger: Logger) -> None:
        """Hear of a SIGTERM on any rank. Called after every batch, on every rank.

        Collective when ``save_on_sigterm`` is on.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        if self._preemption is not None:
            self._preemption.is_asked_for()

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Save when it is time. Called by Composer on every event, on every rank. Collective when it saves.

        Args:
            event (Event): After a batch, an epoch and an iteration it may be time.
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        if event in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT):
            self._save_if_due(event, state)
        else:
            super().run_event(event, state, logger)

    def _save_if_due(self, event: Event, state: State) -> None:
        if not self.save_interval(state, event):
            return
        if self._saved_at != state.timestamp.batch.value:
            self.save(state)
        if self._preemption is not None and self._preemption.asked_for:
            self.wait()
            announce(f'SIGTERM: saved after batch {state.timestamp.batch.value}; training ends.')
            # Afterwards, so that the checkpoint is one of a run that goes on.
            state.stop_training()

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
        started = time.monotonic()
        self.wait()
        name = format_name_with_dist_and_time(self.filename, state.run_name, state.timestamp)
        save = Save(self.local_folder(state) / name, self.group, self.weights_only)
        save.prepare(state, to_host=self.asynchronous)
        stalled_sec = time.monotonic() - started
        self._saved_at = state.timestamp.batch.value
        remote = self._remote(state)
        if self.asynchronous:
            self._thread = self._thread or ThreadPoolExecutor(1, 'sharded checkpoint')
            self._writing = self._thread.submit(self._write, save, remote, state.timestamp, started, stalled_sec)
        else:
            self._write(save, remote, state.timestamp, started, None)
        return save.folder

    def _write(
        self, save: Save, remote: RemoteFolder | None, at: Timestamp, started: float, stalled_sec: float | None
    ) -> None:
        save.write()
        if remote is not None:
            remote.upload(save)
        elif save.is_first_of_folder and self.num_checkpoints_to_keep > 0:
            rotate(save.folder, self.num_checkpoints_to_keep)
        # Ranks that leave while others still use the group would break it.
        torch.distributed.barrier(self.group)
        place = str(save.folder) if remote is None else f'{remote.uri}/{save.folder.name}'
        self.complete.append((place, at))
        batch = at.batch.value
        self.last_saved = f'{place} (batch {batch})'
        stalled = '' if stalled_sec is None else f'; training waited {describe_duration(stalled_sec)}'
        announce_saved('the sharded checkpoint', place, batch, save.size_bytes, started, stalled)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete.

        Collective.

        Raises:
            CheckpointError: On every rank, when it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait for the last save. Called by Composer at the end of training, on every rank. Collective.

        Not left to :meth:`close`, whose errors Composer only logs.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self.wait()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for the last save. Called by Composer when the Trainer is closed, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        if self._preemption is not None:
            self._preemption.leave()
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
