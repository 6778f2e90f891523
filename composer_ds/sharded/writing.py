"""Writing a sharded checkpoint, in two halves: what reads the engine, and what may go on in the background.

Every rank takes part in both. What goes wrong on one rank is raised on all, as the same error, and leaves the folder
without the new checkpoint and with all older ones.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from composer.core import State
from composer.utils.dist import get_global_rank, get_local_rank
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from composer_ds.checkpoint.agreement import agreeing, cause_of
from composer_ds.checkpoint.folder import begin_folder
from composer_ds.checkpoint.stream import write_stream
from composer_ds.errors import CheckpointError
from composer_ds.progress import bar_if_long
from composer_ds.running import running_deepspeed
from composer_ds.sharded.contents import Contents, collect
from composer_ds.sharded.dcp_metadata import METADATA
from composer_ds.sharded.files import ChecksumWriter, file_entry, finish
from composer_ds.sharded.manifest import LATEST, STATE, FileEntry, Manifest
from composer_ds.sharded.siblings import point_latest, temporary_folder

__all__ = ['Save']

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Save:
    """One save: :meth:`prepare`, then :meth:`write`.

    Args:
        folder (Path): The checkpoint, alike on all ranks.
        group (dist.ProcessGroup): Of all ranks, on the CPU, used by nobody else.
        weights_only (bool): Whether to leave out everything but the model.
    """

    folder: Path
    group: dist.ProcessGroup
    weights_only: bool = False

    def prepare(self, state: State, to_host: bool) -> None:
        """Collect what is written, and write ``state.pt``. The engine may go on afterwards if it was copied to host.

        Collective: called between two batches, on every rank.

        Args:
            state (State): Composer's state.
            to_host (bool): Whether to copy the runs to host memory.

        Raises:
            CheckpointError: On every rank, when one could not do its part.
        """
        with self._agreeing():
            self._contents = collect(state, self.weights_only)
            self._manifest = _describe(state, self._contents, self.weights_only)
        self.files: dict[str, FileEntry] = {}
        """Those that this rank has written."""
        self._begin()
        path = self.temporary / STATE
        with self._agreeing():
            error = write_stream(self._contents.rest, self._contents.pending, str(path))
            if error is not None:
                raise error
            if get_global_rank() == 0:
                self.files[STATE] = file_entry(path)
        self._contents.rest, self._contents.pending = {}, []
        if to_host:
            with self._agreeing():
                self._contents.to_host()

    @property
    def temporary(self) -> Path:
        """Where the checkpoint is written until it is complete."""
        return temporary_folder(self.folder)

    def write(self) -> None:
        """Write the shards, then the manifest; rename the folder and move ``latest``.

        Collective, through ``group`` alone: it may run in a thread, while the ranks train.

        Raises:
            CheckpointError: On every rank, when one could not do its part.
        """
        with self._agreeing():
            with bar_if_long(f'Saving {self.folder}') as bar:
                bar.begin(sum(shard.run.nbytes for shard in self._contents.shards.values()))
                writer = ChecksumWriter(self.temporary, bar.advance)
                planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
                save(dict(self._contents.shards), storage_writer=writer, planner=planner, process_group=self.group)
            self.files |= writer.checksums.files
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, self.files, group=self.group)
        files = {name: entry for one in everyones for name, entry in one.items()}
        self.size_bytes = sum(entry.size_bytes for entry in files.values())
        manifest = self._manifest.model_copy(update={'files': dict(sorted(files.items()))})
        self._share_small_files()
        with self._agreeing():
            if self.is_first_of_folder:
                finish(self.folder, manifest)
        with agreeing(self.group, self._report_latest):
            if self.is_first_of_folder:
                point_latest(self.folder)

    def _begin(self) -> None:
        """Make the folder, on every node that does not see rank 0's."""
        token = [uuid.uuid4().hex]
        dist.broadcast_object_list(token, src=0, group=self.group)
        self.is_first_of_folder = get_global_rank() == 0
        with self._agreeing():
            if get_global_rank() == 0:
                (begin_folder(self.folder) / token[0]).touch()
        with self._agreeing():
            if get_local_rank() == 0 and not (self.temporary / token[0]).exists():
                begin_folder(self.folder)
                self.is_first_of_folder = True
        with self._agreeing():
            if get_global_rank() == 0:
                (self.temporary / token[0]).unlink()

    def _share_small_files(self) -> None:
        """Give nodes with a disk of their own what rank 0 alone has written. Collective."""
        firsts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(firsts, self.is_first_of_folder, group=self.group)
        if sum(firsts) == 1:
            return
        with self._agreeing():
            content: list[Any] = [None]
            if get_global_rank() == 0:
                names = [name for name in (METADATA, STATE) if (self.temporary / name).exists()]
                content = [{name: (self.temporary / name).read_bytes() for name in names}]
            dist.broadcast_object_list(content, src=0, group=self.group)
            if self.is_first_of_folder and get_global_rank() != 0:
                for name, data in content[0].items():
                    (self.temporary / name).write_bytes(data)

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        try:
            with agreeing(self.group, self._report):
                yield
        except CheckpointError:
            if getattr(self, 'is_first_of_folder', False):
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise

    def _report(self, error: BaseException) -> str:
        cause = cause_of(error)
        if isinstance(cause, CheckpointError):
            return f'The checkpoint {self.folder} was not saved. {cause}'
        if not isinstance(cause, OSError) or cause.errno is None:
            return (
                f'The checkpoint {self.folder} was not saved: {type(cause).__name__}: {cause}. Older ones are intact.'
            )
        name = errno.errorcode.get(cause.errno, cause.errno)
        said = f'The checkpoint {self.folder} was not saved: {os.strerror(cause.errno)} ({name})'
        if cause.errno not in _NO_ROOM:
            return f'{said}, {cause.filename or self.folder.parent}. Older ones are intact.'
        return (
            f'{said}{_free(self.folder.parent)}. Older ones are intact. Make room, keep fewer '
            '(num_checkpoints_to_keep) or save to another folder, and resume.'
        )

    def _report_latest(self, error: BaseException) -> str:
        return f'The checkpoint {self.folder} is complete, but {LATEST} beside it could not be moved to it: {error}.'


def _describe(state: State, contents: Contents, weights_only: bool) -> Manifest:
    algorithm = running_deepspeed(state, 'A sharded checkpoint')
    plan = algorithm.plan
    assert plan is not None
    time = state.timestamp
    return Manifest(
        run_name=state.run_name,
        time={unit: getattr(time, unit).value for unit in ('iteration', 'epoch', 'batch', 'sample', 'token')}
        | {'batch_in_epoch': time.batch_in_epoch.value},
        optimizer_steps=algorithm.optimizer_steps.state_dict(),
        world_size=dist.get_world_size(),
        zero_stage=plan.zero_stage,
        offload_optimizer=algorithm.settings.offload('offload_optimizer'),
        offload_param=algorithm.settings.offload('offload_param'),
        precision=plan.precision,
        versions={name: importlib.metadata.version(name) for name in ('composer-ds', 'mosaicml', 'deepspeed', 'torch')},
        weights_only=weights_only,
        optimizer=contents.optimizer,
        param_groups=contents.param_groups,
        tensors=contents.tensors,
        tied=contents.tied,
        files={},
    )


def _free(folder: Path) -> str:
    try:
        return f'; {shutil.disk_usage(folder).free:,} bytes are free there'
    except OSError:
        return ''
