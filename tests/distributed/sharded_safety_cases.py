"""Saves of sharded checkpoints that fail, wait, overlap or are told to hurry. Runs inside rank processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import signal
import threading
import time
import warnings
from typing import Any
from unittest import mock

import torch
from composer import Callback, Trainer
from composer.core import Event
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver
from composer_ds.sharded.source import ShardedSource
from tests.distributed.safety_cases import Losses, error_of
from tests.distributed.trainer_cases import Classifier

LAST = 6
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class At(Callback):
    """Does something at an event of a batch; to be placed before the saver."""

    def __init__(self, event: str, batch: int, do: Any):
        self.event, self.batch, self.do = Event(event), batch, do

    def run_event(self, event, state, logger):
        if event == self.event and state.timestamp.batch == self.batch:
            self.do()


def trainer_of(
    callbacks: list[Any] | None = None,
    zero_stage: int = 2,
    batches_per_optimizer_step: int = 1,
    load_sharded: Any = None,
    **arguments: Any,
) -> Trainer:
    """A Trainer that trains 6 batches of 2 epochs."""
    generator = torch.Generator().manual_seed(4)
    count = 12 * dist.get_world_size()
    dataset = TensorDataset(
        torch.randn(count, 5, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )
    torch.manual_seed(17)
    model = Classifier()
    size = {'train_batch_size': 4 * batches_per_optimizer_step * dist.get_world_size()}
    arguments = {'max_duration': '2ep', 'run_name': 'sharded', **arguments}
    return Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False)),
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=[DeepSpeed(zero_stage, ds_config=size, load_sharded=load_sharded)],
        callbacks=callbacks or [],
        progress_bar=False,
        seed=5,
        **arguments,
    )


def saver_of(folder: str, interval: Any = '1ba', **arguments: Any) -> ShardedCheckpointSaver:
    """A saver of every batch."""
    return ShardedCheckpointSaver(folder, interval, **arguments)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole weights. Collective."""
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def train(
    folder: str | None = None, callbacks: tuple[Any, ...] = (), interval: Any = '1ba', **arguments: Any
) -> dict[str, Any]:
    """Train to the end, and say what was seen. What is no argument of the Trainer's is one of the saver."""
    keys = ('asynchronous', 'autoresume', 'overwrite', 'num_checkpoints_to_keep', 'filename', 'weights_only')
    options = {key: arguments.pop(key) for key in keys if key in arguments}
    savers = [] if folder is None else [saver_of(folder, interval, **options)]
    losses = Losses()
    trainer = trainer_of([*callbacks, *savers, losses], **arguments)
    start = weights(trainer)
    trainer.fit()
    found = {
        'losses': losses.by_batch,
        'start': start,
        'weights': weights(trainer),
        'batch': trainer.state.timestamp.batch.value,
    }
    trainer.close()
    return found


def stored(path: pathlib.Path | str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, which must be complete and undamaged."""
    source = ShardedSource(path)
    assert not source.missing() and not source.damaged()
    found = {name: source.read(name, 0, one.shape.numel()) for name, one in source.tensors.items()}
    for name, one in source.tensors.items():
        for key in one.state:
            found[f'{key} of {name}'] = source.read(name, 0, one.shape.numel(), key)
    return found


def listing(folder: str) -> list[str]:
    """The names in a folder, alike on all ranks, when all have come here."""
    dist.barrier()
    found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    dist.barrier()
    return found


class NoRoom:
    """Lets one function of the writer find no room on these ranks, as the operating system says it."""

    def __init__(self, folder: str, batch: int, phase: str, ranks: list[int], limit_bytes: int):
        self.latest, self.before = pathlib.Path(folder, 'latest'), f'-ba{batch - 1}'
        self.limit = (limit_bytes, resource.RLIM_INFINITY)
        self.ranks = ranks
        module, _, self.name = phase.rpartition('.')
        self.place = f'composer_ds.sharded.{module}.{self.name}'
        self.patch: Any = None

    def __call__(self) -> None:
        # The save of the batch before may still be under way in the background.
        while not self.latest.read_text().strip().endswith(self.before):
            time.sleep(0.01)
        self.patch = mock.patch(self.place)
        original = self.patch.get_original()[0]
        self.patch.start().side_effect = lambda *args, **kwargs: self._limited(original, *args, **kwargs)

    def _limited(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_global_rank() not in self.ranks:
            return original(*args, **kwargs)
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limit)
        try:
            return original(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)


def no_room(folder: str, phase: str, ranks: list[int], limit_bytes: int, asynchronous: bool = False) -> dict[str, Any]:
    """A save at batch 3 that finds no room; the same Trainer goes on, and so does another one that resumes."""
    limit = NoRoom(folder, 3, phase, ranks, limit_bytes)
    losses = Losses()
    trainer = trainer_of([At('batch_checkpoint', 3, limit), saver_of(folder, asynchronous=asynchronous), losses])
    error = error_of(trainer.fit)
    limit.patch.stop()
    found: dict[str, Any] = {'error': error, 'batch': trainer.state.timestamp.batch.value, 'names': listing(folder)}
    complete = [name for name in found['names'] if name.startswith('ep')]
    found['stored'] = {name: stored(f'{folder}/{name}') for name in complete}
    trainer.fit()
    found['weights'], found['losses'] = weights(trainer), losses.by_batch
    trainer.close()
    return found


def fails_last(folder: str) -> tuple[str, str, float]:
    """The last save fails in the background: there is no next one that could say so."""
    limit = NoRoom(folder, LAST, 'writing.save', [1], 100)
    trainer = trainer_of([At('batch_checkpoint', LAST, limit), saver_of(folder, asynchronous=True)])
    try:
        return error_of(trainer.fit)
    finally:
        limit.patch.stop()
        trainer.close()


class FailsToSave(Callback):
    """Its state cannot be collected, on some ranks."""

    def __init__(self, ranks: list[int]):
        self.ranks = ranks

    def state_dict(self):
        if dist.get_global_rank() in self.ranks:
            raise ValueError('a mistake of the user')
        return {}


def failing_state(folder: str, ranks: list[int]) -> tuple[tuple[str, str, float], list[str]]:
    """A callback of the user's fails in its ``state_dict``."""
    trainer = trainer_of([saver_of(folder), FailsToSave(ranks)])
    found = error_of(trainer.fit)
    trainer.close()
    return found, listing(folder)


class Slow:
    """Lets DCP's part of a save wait, and notes when saves begin and end."""

    def __init__(self):
        self.go = threading.Event()
        self.times: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def patched(self):
        from composer_ds.sharded import writing

        original = writing.save

        def save(*args, **kwargs):
            began = time.monotonic()
            assert self.go.wait(30)
            found = original(*args, **kwargs)
            self.times.append((began, time.monotonic()))
            return found

        with mock.patch.object(writing, 'save', save):
            yield


def slow_and_fast(folder: str, zero_stage: int) -> dict[str, Any]:
    """Save batches 2 and 4 in the background, the first not before batch 4 has been trained; and without background."""
    slow = Slow()
    waited: list[float] = []

    def let_it_go() -> None:
        waited.append(time.monotonic())
        threading.Timer(0.3, slow.go.set).start()

    with slow.patched():
        found = train(
            f'{folder}/asynchronous',
            (At('batch_checkpoint', 4, let_it_go), At('batch_start', 4, lambda: waited.append(time.monotonic()))),
            '2ba',
            zero_stage=zero_stage,
            asynchronous=True,
        )
    blocking = train(f'{folder}/blocking', (), '2ba', zero_stage=zero_stage)
    dist.barrier()
    assert len(waited) == 2 and len(slow.times) == 3
    found['waited for the first'] = waited[0] - waited[1]
    found['overlaps'] = any(next_[0] < one[1] for one, next_ in zip(slow.times, slow.times[1:], strict=False))
    found['first ended after'] = slow.times[0][1] - waited[0]
    found['blocking'] = blocking['weights']
    return found


def fails_while_saving(folder: str) -> tuple[tuple[str, str, float], float, list[str]]:
    """Training fails on all ranks while a save is in the background; closing the Trainer waits for it."""
    slow = Slow()

    def fail() -> None:
        threading.Timer(0.3, slow.go.set).start()
        raise ValueError('a mistake of the user')

    with slow.patched():
        trainer = trainer_of([saver_of(folder, '2ba', asynchronous=True), At('batch_start', 3, fail)])
        found = error_of(trainer.fit)
        started = time.monotonic()
        trainer.close()
        closed_sec = time.monotonic() - started
    return found, closed_sec, listing(folder)


def warnings_of_saves(folder: str) -> list[str]:
    """What Python warns of in a save."""
    import torch.storage

    torch.storage._reset_warn_typed_storage_removal()
    with warnings.catch_warnings(record=True) as caught:
        # Without resetting the filters: that is what is tested.
        train(folder, (), '6ba')
    return [str(one.message) for one in caught if 'checkpoint' in one.filename]


def told_to_end(
    folder: str, ranks: list[int], batch: int = 2, times: int = 1, **arguments: Any
) -> tuple[dict[str, Any], list[str]]:
    """SIGTERM in the middle of a batch, on some ranks."""
    before = signal.getsignal(signal.SIGTERM)

    def tell() -> None:
        if dist.get_global_rank() in ranks:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGTERM)

    found = train(folder, (At('after_dataloader', batch, tell),), '1dur', **arguments)
    assert signal.getsignal(signal.SIGTERM) is before
    return found, listing(folder)


def one_after_the_other(folder: str, steps: list[dict[str, Any]]) -> list[tuple[Any, list[str]]]:
    """Several runs with one folder; of each the losses or the error, and what stands in the folder."""
    found: list[tuple[Any, list[str]]] = []
    for step in steps:
        try:
            result: Any = train(folder, **step)['losses']
        except Exception as error:
            result = (type(error).__name__, str(error))
        found.append((result, [*listing(folder), _latest(folder)]))
        dist.barrier()
    return found


def _latest(folder: str) -> str:
    path = pathlib.Path(folder, 'latest')
    return f'-> {path.read_text().strip()}' if path.exists() else 'no latest'


@contextlib.contextmanager
def s3(url: str):
    """Let Composer find a server of S3."""
    variables = {'S3_ENDPOINT_URL': url, 'AWS_ACCESS_KEY_ID': 'a', 'AWS_SECRET_ACCESS_KEY': 'b'}
    with mock.patch.dict(os.environ, variables):
        yield


def in_object_store(url: str, uri: str, folder: str, asynchronous: bool) -> dict[str, Any]:
    """Save into an object store, resume from there in every way, and look at what is left on this machine."""
    from composer_ds.sharded import remote

    # Not where another process may be at work.
    with s3(url), mock.patch.object(remote, '_own_folder', return_value=pathlib.Path(folder)):
        found: dict[str, Any] = {'first': train(uri, max_duration='4ba', asynchronous=asynchronous, autoresume=True)}
        found['autoresume'] = train(uri, autoresume=True, asynchronous=asynchronous)
        found['by latest'] = train(load_sharded=uri, max_duration='7ba')
        found['by name'] = train(load_sharded=f'{uri}/ep0-ba2')
        dist.barrier()
        found['left after saves'] = os.listdir(folder)
        found['refused'] = error_of(train, uri)
        for name in ('s3://bucket/nothing', 's3://bucket', f'{uri}/ep9-ba9', 's3://absent/nothing'):
            found[name] = error_of(trainer_of, load_sharded=name)
    dist.barrier()
    found['left'] = os.listdir(folder)
    return found


def train_in_object_store(url: str, uri: str) -> None:
    """Save into an object store."""
    with s3(url):
        train(uri, interval='3ba')


def load_from_object_store(url: str, uri: str) -> tuple[str, str, float]:
    """Load what cannot be loaded."""
    with s3(url):
        return error_of(trainer_of, load_sharded=uri)


def failing_upload(url: str, uri: str, rank: int, asynchronous: bool) -> tuple[tuple[str, str, float], list[str], Any]:
    """The object store fails at batch 3, on one rank; then a run that resumes."""
    from composer_ds.sharded import remote

    original = remote.RemoteFolder._upload

    def fails(self: Any, path: Any, name: str) -> None:
        if 'ba3' in name and dist.get_global_rank() == rank:
            raise ConnectionError('the network is gone')
        original(self, path, name)

    with s3(url):
        with mock.patch.object(remote.RemoteFolder, '_upload', fails):
            trainer = trainer_of([saver_of(uri, asynchronous=asynchronous)])
            found = error_of(trainer.fit)
            trainer.close()
        left = [str(path) for path in remote._own_folder().rglob('*') if 'ba3' in str(path)]
        return found, left, train(uri, autoresume=True)
