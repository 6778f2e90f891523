"""Composer's options for checkpoints, each used under a strategy or under plain Composer. Runs in rank processes."""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from composer import Trainer
from composer.callbacks import LoadCheckpoint
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from tests.distributed.parity_cases import STRATEGIES, Tied


def trainer_of(strategy: str | None, seed: int = 7, **arguments: Any) -> Trainer:
    """Six batches of data, an epoch of three."""
    torch.manual_seed(seed)
    model = Tied()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 11, (12, 5), generator=generator), torch.randint(0, 11, (12, 5), generator=generator)
    dataset = TensorDataset(*tokens)
    arguments = {'max_duration': '6ba', 'callbacks': [], **arguments}
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        train_dataloader=DataLoader(
            dataset, batch_size=4 // dist.get_world_size(), sampler=dist.get_sampler(dataset, shuffle=True)
        ),
        device='cpu',
        algorithms=[] if strategy is None else [DeepSpeed(**copy.deepcopy(STRATEGIES[strategy]))],
        progress_bar=False,
        seed=5,
        run_name='run',
        **arguments,
    )
    if trainer._checkpoint_saver is not None:  # Composer looks every 30 s whether an upload has ended
        trainer._checkpoint_saver._symlink_upload_wait_before_next_try_in_seconds = 0.2
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole weights, without the prefix that DistributedDataParallel puts before the names."""
    return {name.removeprefix('module.'): value.clone() for name, value in trainer.state.model.state_dict().items()}


def _fit(trainer: Trainer, **arguments: Any) -> dict[str, torch.Tensor]:
    trainer.fit(**arguments)
    found = weights(trainer)
    trainer.close()
    return found


def _names(folder: str) -> list[str]:
    """The files below a folder; ``latest`` with what it points to."""
    return sorted(
        f'{path.relative_to(folder)}' + (f' -> {os.readlink(path)}' if path.is_symlink() else '')
        for path in pathlib.Path(folder).rglob('*')
        if not path.is_dir()
    )


def _keys(path: pathlib.Path) -> Any:
    """The structure of a file: keys, shapes and dtypes. What an algorithm adds of its own is left out."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of(one) for key, one in value.items()}
        return (tuple(value.shape), value.dtype) if torch.is_tensor(value) else type(value).__name__

    state = torch.load(path, weights_only=False)
    state['state'].pop('algorithms', None)
    state['state'].pop('callbacks', None)
    return of(state)


def drop_head(state_dict: dict[str, Any]) -> None:
    """An ``ignore_keys`` that is a function; it sees whole tensors on rank 0."""
    head = state_dict['state']['model'].pop('head.weight')
    assert dist.get_global_rank() != 0 or head.abs().sum() > 0


def saving(strategy: str | None, folder: str) -> dict[str, Any]:
    """Every option of saving, and what it leaves in the folder."""
    found: dict[str, Any] = {}

    def save(name: str, **options: Any) -> None:
        trainer = trainer_of(strategy, save_folder=f'{folder}/{name}', **options)
        found[f'{name} weights'] = _fit(trainer)
        dist.barrier()
        found[name] = _names(f'{folder}/{name}')

    save('interval', save_interval='2ba', save_num_checkpoints_to_keep=2)
    save('epochs', save_interval='1ep', save_filename='e{epoch}/all.pt', save_latest_filename='newest')
    save('weights', save_interval='3ba', save_weights_only=True)
    save('globs', save_interval='3ba', save_ignore_keys=['state/optimizers/*', 'state/model/head*'])
    save('function', save_interval='3ba', save_ignore_keys=drop_head, save_latest_filename=None)
    save('gz', save_interval='3ba', save_filename='ba{batch}.pt.gz')
    save('tar', save_interval='3ba', save_filename='ba{batch}.tar')
    trainer = trainer_of(strategy)
    trainer.fit(duration='3ba')
    found['by hand'] = trainer.save_checkpoint(f'{folder}/hand/ba{{batch}}.pt')
    found['by hand'] = _names(f'{folder}/hand')
    trainer.close()
    if dist.get_global_rank() == 0:
        for name in ('weights/ep0-ba3-rank0.pt', 'globs/ep0-ba3-rank0.pt', 'function/ep0-ba3-rank0.pt', 'hand/ba3.pt'):
            found[f'keys {name}'] = _keys(pathlib.Path(folder) / name)
    return found


def loading(strategy: str | None, folder: str) -> dict[str, Any]:
    """Every option of loading; the files are those of :func:`saving`, of any strategy."""
    found: dict[str, Any] = {}

    def load(name: str, path: str, **options: Any) -> None:
        trainer = trainer_of(strategy, seed=8, load_path=f'{folder}/{path}', **options)
        found[f'{name} loaded'] = weights(trainer)
        found[f'{name} batch'] = int(trainer.state.timestamp.batch)
        found[name] = _fit(trainer)

    load('all', 'hand/ba3.pt')
    load('weights of all', 'hand/ba3.pt', load_weights_only=True, load_strict_model_weights=True)
    load('weights', 'weights/ep0-ba3-rank0.pt', load_weights_only=True)
    load('ignored', 'hand/ba3.pt', load_ignore_keys=['state/model/middle*', 'state/timestamp*', 'state/optimizers/*'])
    load('not strict', 'globs/ep0-ba3-rank0.pt', load_strict_model_weights=False)
    load('gz', 'gz/ba3.pt.gz')
    load('tar', 'tar/ba3.tar')
    load('latest', 'interval/latest-rank0.pt', max_duration='7ba')
    for event in ('before_load', 'after_load'):
        callback = LoadCheckpoint(f'{folder}/hand/ba3.pt', load_weights_only=True, event=event)
        found[f'LoadCheckpoint {event}'] = _fit(trainer_of(strategy, seed=8, callbacks=[callback]))
    try:
        load('strict', 'globs/ep0-ba3-rank0.pt', load_weights_only=True, load_strict_model_weights=True)
    except RuntimeError as error:
        found['strict'] = 'Missing key(s)' in str(error) and 'head.weight' in str(error)
    for name in ('hand', 'hand/nothing.pt'):
        try:
            load('absent', name)
        except Exception as error:
            found[f'absent {name}'] = isinstance(error, OSError | RuntimeError)
    return found


def autoresume(strategy: str | None, folder: str, url: str | None = None) -> dict[str, torch.Tensor]:
    """Train three batches, close, and let the next Trainer go on by itself."""
    with _s3(url):
        options: dict[str, Any] = {'save_folder': folder, 'save_interval': '3ba', 'save_overwrite': True}
        _fit(trainer_of(strategy, max_duration='3ba', autoresume=True, **options))
        trainer = trainer_of(strategy, seed=8, autoresume=True, **options)
        assert trainer.state.timestamp.batch == 3
        return _fit(trainer)


def load_from(strategy: str | None, path: str, url: str) -> dict[str, torch.Tensor]:
    """Go on from a file in S3."""
    with _s3(url):
        return _fit(trainer_of(strategy, seed=8, load_path=path))


@contextlib.contextmanager
def _s3(url: str | None) -> Iterator[None]:
    """Let Composer find the server of S3; inside a folder of its own, where Composer puts what it downloads."""
    here = os.getcwd()
    variables = {'S3_ENDPOINT_URL': url, 'AWS_ACCESS_KEY_ID': 'a', 'AWS_SECRET_ACCESS_KEY': 'b'} if url else {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)
            for name in variables:
                del os.environ[name]
