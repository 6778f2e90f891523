"""Saves that fail and files that are damaged. Runs inside rank processes."""

from __future__ import annotations

import os
import pathlib
import resource
import signal
import time
from concurrent.futures import Future
from typing import Any
from unittest import mock

import torch
from composer import Callback, Trainer
from composer.callbacks import CheckpointSaver, LoadCheckpoint
from composer.loggers import LoggerDestination
from composer.utils import RemoteFilesExistingCheckStatus, dist
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import CheckpointError, DeepSpeed
from composer_ds.checkpoint import save_checkpoint, verdict, verification
from tests.distributed.trainer_cases import Classifier


class Losses(Callback):
    """The loss of every batch, by its number."""

    def __init__(self):
        self.by_batch: dict[int, float] = {}

    def batch_end(self, state, logger):
        self.by_batch[int(state.timestamp.batch)] = float(state.total_loss_dict['loss/train/total'])


def trainer_of(folder: str | None, plain: bool = False, **arguments: Any) -> Trainer:
    """A Trainer with ZeRO 2, or plain Composer, that trains 6 batches of 2 epochs and saves each."""
    generator = torch.Generator().manual_seed(4)
    count = 12 * dist.get_world_size()
    dataset = TensorDataset(
        torch.randn(count, 5, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )
    torch.manual_seed(17)
    model = Classifier()
    arguments = {
        'max_duration': '2ep',
        'progress_bar': False,
        'save_interval': '1ba',
        'run_name': 'safety',
        'save_folder': folder,
        **arguments,
    }
    return Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False)),
        device='cpu',
        algorithms=[] if plain else [DeepSpeed(zero_stage=2)],
        seed=5,
        **arguments,
    )


def train(folder: str | None, **arguments: Any) -> dict[int, float]:
    """Train to the end; the loss of every batch."""
    losses = Losses()
    trainer = trainer_of(folder, callbacks=[losses, *arguments.pop('callbacks', [])], **arguments)
    trainer.fit()
    trainer.close()
    return losses.by_batch


def error_of(call, *args: Any, **kwargs: Any) -> tuple[str, str, float]:
    """The error that a call raises: its class, its message, after how many seconds."""
    started = time.monotonic()
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError('no error was raised')


class FullDisk(Callback):
    """From a batch on, rank 0 may write no file larger than so many bytes."""

    def __init__(self, batch: int, limit_bytes: int):
        self.batch, self.limit_bytes = batch, limit_bytes

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == self.batch and dist.get_global_rank() == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit_bytes, resource.RLIM_INFINITY))


def full_disk(folder: str, limit_bytes: int, **arguments: Any) -> tuple[str, str, float]:
    """Train until a save finds no room."""
    try:
        return error_of(train, folder, callbacks=[FullDisk(3, limit_bytes)], **arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def failing_ignore_keys(folder: str, ranks: list[int]) -> tuple[str, str, float]:
    """The user's function fails, on some ranks."""

    def ignore_keys(state_dict):
        if dist.get_global_rank() in ranks:
            raise ValueError('a mistake of the user')

    return error_of(train, folder, save_ignore_keys=ignore_keys)


def interrupted_latest(folder: str) -> dict[int, float]:
    """Resume after a kill between the renaming of the file and that of the symlink."""
    dist.barrier()
    if dist.get_global_rank() == 0:
        latest = pathlib.Path(folder, 'latest-rank0.pt')
        newest = os.readlink(latest)
        os.rename(latest, latest.with_name('.incomplete-latest-rank0.pt'))
        older = newest.replace('ba4', 'ba3')
        assert older != newest
        os.symlink(older, latest)
        pathlib.Path(folder, '.incomplete-ep0-ba1-rank0.pt').write_text('half')
    dist.barrier()
    return train(folder, autoresume=True)


def load(how: str, path: str, plain: bool = False) -> tuple[str, str, float]:
    """Load a damaged file, in each of the ways that Composer has."""
    verdict.ARRIVAL_LIMIT_SEC = 2.0
    if how == 'autoresume':
        return error_of(trainer_of, os.path.dirname(path), plain, autoresume=True)
    if how == 'LoadCheckpoint':
        return error_of(trainer_of, None, plain, callbacks=[LoadCheckpoint(path)])
    with mock.patch.dict(os.environ):
        if plain:  # a Trainer that failed to be made is not closed, and its check would look at the file, too
            os.environ.pop('CHECKPOINT_VALIDATION_FUNCTION', None)
        return error_of(trainer_of, None, plain, load_path=path)


CALLS: list[str] = []


def users_validation(path, specs) -> bool:
    """A function that a user names in CHECKPOINT_VALIDATION_FUNCTION; refuses on the last rank."""
    CALLS.append(str(path))
    return os.environ.get('REFUSES') is None or dist.get_global_rank() != dist.get_world_size() - 1


def users_function_is_kept(path: str) -> tuple[str, str, float]:
    """The user's own function is called, its refusal is heard on all ranks, and it stays named."""
    verification._open.clear()  # of Trainers that failed to be made
    os.environ.pop('CHECKPOINT_VALIDATION_FUNCTION', None)
    variable, ours = 'CHECKPOINT_VALIDATION_FUNCTION', f'{__name__}.users_validation'
    os.environ[variable] = ours
    CALLS.clear()
    try:
        first = trainer_of(None, load_path=path)
        assert len(CALLS) == 1 and os.environ[variable] != ours
        second = trainer_of(None, load_path=path)
        assert len(CALLS) == 2
        first.close()
        assert os.environ[variable] != ours
        # Somebody else's Trainer, in which it need not be every rank that loads.
        trainer_of(None, plain=True, load_path=path).close()
        assert len(CALLS) == 3
        second.close()
        assert os.environ[variable] == ours
        os.environ['REFUSES'] = '1'
        return error_of(trainer_of, None, load_path=path)
    finally:
        os.environ.pop('REFUSES', None)
        del os.environ[variable]


class Uploads(LoggerDestination):
    """Remembers what is uploaded, and what was in it."""

    def __init__(self):
        self.files: list[tuple[str, bool, int | str]] = []

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        is_symlink = remote_file_name.endswith('.symlink')
        content = pathlib.Path(file_path).read_text() if is_symlink else os.path.getsize(file_path) > 1000
        self.files.append((remote_file_name, overwrite, content))

    def can_upload_files(self) -> bool:
        return True


class Uploader:
    """In the place of Composer's RemoteUploader, which needs an object store."""

    def __init__(self):
        self.calls: list[Any] = []

    def upload_file_async(self, remote_file_name, file_path, overwrite):
        there = os.path.exists(file_path)
        self.calls.append(('upload', remote_file_name, os.path.basename(file_path), overwrite, there))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check_remote_files_exist_async(self, **arguments):
        self.calls.append(('check', arguments))
        found: Future[RemoteFilesExistingCheckStatus] = Future()
        found.set_result(RemoteFilesExistingCheckStatus.EXIST)
        return found

    def __getattr__(self, name):
        return lambda *args: None


class CountingSaver(CheckpointSaver):
    """A saver of the user's, which does more around Composer's save."""

    saves = 0

    def _save_checkpoint(self, state, logger):
        super()._save_checkpoint(state, logger)
        self.saves += 1
        assert not any('incomplete' in name for name in os.listdir(self.folder))


def listing(folder: str) -> dict[str, str]:
    """The files below a folder, and where symlinks point."""
    found = sorted(pathlib.Path(folder).rglob('*'))
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else ''
        for path in found
        if path.is_symlink() or path.is_file()
    }


def saved_files(folder: str, plain: bool, own_saver: dict[str, Any] | None, arguments: dict[str, Any]) -> list[Any]:
    """What stands in the folder after training, what the Trainer says of it, and what was uploaded."""
    uploads, uploader, savers = Uploads(), Uploader(), []
    if own_saver is not None:
        savers.append(CountingSaver(folder=folder, **own_saver))
        savers[0].remote_uploader = uploader  # pyright: ignore[reportAttributeAccessIssue]
        arguments = {**arguments, 'save_folder': None}
    trainer = trainer_of(arguments.pop('save_folder', folder), plain, callbacks=savers, loggers=[uploads], **arguments)
    saver = trainer._checkpoint_saver
    assert saver is not None and type(saver).__qualname__ == ('CountingSaver' if savers else 'CheckpointSaver')
    trainer.fit()
    trainer.save_checkpoint_to_save_folder()
    trainer.close()
    assert type(saver) is (CountingSaver if savers else CheckpointSaver)
    assert own_saver is None or savers[0].saves == 7
    names = [os.path.relpath(name, folder) for name in trainer.saved_checkpoints]
    known = {
        os.path.relpath(name, folder): int(t.batch) for name, t in saver.all_saved_checkpoints_to_timestamp.items()
    }
    counts = [saver.symlink_count, saver.rank_saves_symlinks, saver.last_checkpoint_batch]
    dist.barrier()
    contents = {}
    for name, target in listing(folder).items():
        if name.endswith('.pt') and not target:
            content = torch.load(os.path.join(folder, name), weights_only=False)
            contents[name] = [sorted(content), sorted(content['state'])]
    dist.barrier()
    return [listing(folder), names, known, counts, uploads.files, uploader.calls, contents]


def save_under_any_name(folder: str) -> tuple[str | None, tuple[str, str, float]]:
    """The public function, for a checkpoint apart from the folder of a CheckpointSaver."""
    trainer = trainer_of(None)
    saved = save_checkpoint(trainer.state, f'{folder}/mine-ba{{batch}}.pt', weights_only=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        failed = error_of(save_checkpoint, trainer.state, f'{folder}/mine-ba{{batch}}.pt')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    trainer.close()
    assert issubclass(CheckpointError, RuntimeError)
    return saved, failed
