"""Runs whose numbers can be worked out by hand, and what they tell. Run inside rank processes."""

from __future__ import annotations

import contextlib
import functools
import io
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from composer import Callback, ComposerModel, Trainer
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import ConsolidatedWeightsSaver, DeepSpeed, ShardedCheckpointSaver
from composer_ds.sharded import reading_bar, writing


class Halving(ComposerModel):
    """One weight, which begins at 2; the loss is its square, so that SGD with lr 0.25 halves it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))

    def forward(self, batch):
        return self.weight * batch[0]

    def loss(self, outputs, batch):
        return ((outputs - batch[1]) ** 2).mean()


class Rests(Callback):
    """Gives bars the time to be drawn: tqdm does so ten times a second."""

    def batch_start(self, state, logger):
        time.sleep(0.15)


def _trainer(**arguments: Any) -> Trainer:
    """Five batches of 2 samples per rank; the third is spoilt on all ranks."""
    world_size = dist.get_world_size()
    targets = torch.zeros(5 * 2 * world_size, 1)
    targets[2 * 2 * world_size : 3 * 2 * world_size] = float('nan')
    dataset = TensorDataset(torch.ones_like(targets), targets)
    model = Halving()
    optimizer = arguments.pop('optimizer', torch.optim.SGD)
    return Trainer(
        model=model,
        optimizers=optimizer(model.parameters(), lr=0.25),
        train_dataloader=DataLoader(dataset, 2, sampler=dist.get_sampler(dataset, shuffle=False)),
        device='cpu',
        **{'max_duration': '5ba', 'progress_bar': False, **arguments},
    )


def _deepspeed(zero_stage: int, batches: int = 2, **arguments: Any) -> DeepSpeed:
    return DeepSpeed(
        zero_stage=zero_stage,
        ds_config={'gradient_accumulation_steps': batches, 'zero_allow_untested_optimizer': True},
        **arguments,
    )


def _told(make: Callable[[], Trainer]) -> str:
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        trainer = make()
        trainer.fit()
        trainer.close()
    return stream.getvalue()


def lines_of_runs(folder: str) -> dict[str, str]:
    """Save in every way, and resume from each; return what was written to stderr."""
    told = {}
    told['saved'] = _told(
        lambda: _trainer(
            algorithms=[_deepspeed(2)],
            save_folder=f'{folder}/whole',
            save_interval='4ba',
            callbacks=[
                ConsolidatedWeightsSaver(f'{folder}/weights', interval='4ba', dtype='bf16'),
                ShardedCheckpointSaver(f'{folder}/sharded', interval='4ba'),
            ],
        )
    )
    whole, sharded = f'{folder}/whole/ep0-ba4-rank0.pt', f'{folder}/sharded/ep0-ba4'
    told['resumed'] = _told(lambda: _trainer(algorithms=[_deepspeed(3)], load_path=whole))
    told['resumed from shards'] = _told(lambda: _trainer(algorithms=[_deepspeed(3, load_sharded=sharded)]))
    told['weights'] = _told(
        lambda: _trainer(
            algorithms=[_deepspeed(2, batches=1)], load_path=whole, load_weights_only=True, max_duration='1ba'
        )
    )
    plain = _trainer(save_folder=f'{folder}/plain', max_duration='2ba')
    plain.fit()
    plain.close()
    plain_path = f'{folder}/plain/ep0-ba2-rank0.pt'
    told['plain'] = _told(
        lambda: _trainer(algorithms=[_deepspeed(2, batches=1)], load_path=plain_path, max_duration='3ba')
    )
    return told


def bytes_of_bars(folder: str) -> list[tuple[str, int | None, int]]:
    """Save shards under Adam and load them; return of each bar what it said, the total, and what it was told."""
    bars: list[tuple[str, int | None, int]] = []

    @contextlib.contextmanager
    def recorded(what: str) -> Iterator[Any]:
        totals: list[int | None] = []
        told: list[int] = []
        yield SimpleNamespace(begin=totals.append, advance=told.append)
        bars.append((what.replace(folder, 'F'), totals[0], sum(told)))

    adam = functools.partial(_trainer, optimizer=torch.optim.AdamW, max_duration='1ba')
    with mock.patch.object(writing, 'bar_if_long', recorded):
        _told(lambda: adam(algorithms=[_deepspeed(2, 1)], callbacks=[ShardedCheckpointSaver(f'{folder}/adam')]))
    with mock.patch.object(reading_bar, 'bar_if_long', recorded):
        _told(lambda: adam(algorithms=[_deepspeed(3, 1, load_sharded=f'{folder}/adam')], max_duration='2ba'))
    return bars
