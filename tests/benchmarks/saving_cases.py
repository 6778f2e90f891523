"""Time and memory of a save and a load of a model of some size. Runs inside rank processes."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from composer import ComposerModel, Trainer
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed, ShardedCheckpointSaver
from composer_ds.checkpoint.writing import save_checkpoint


class Wide(ComposerModel):
    """Square layers without biases; ``width`` squared elements each."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


class Peak:
    """How much the memory of this process rises inside, at its highest, in bytes: Linux's high-water mark."""

    def __enter__(self):
        gc.collect()
        pathlib.Path('/proc/self/clear_refs').write_text('5')
        self._before = _memory_bytes('VmRSS')
        return self

    def __exit__(self, *_):
        self.bytes = _memory_bytes('VmHWM') - self._before


def _memory_bytes(field: str) -> int:
    for line in pathlib.Path('/proc/self/status').read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def _trainer(
    strategy: dict[str, Any] | None, layers: int, width: int, load_sharded: str | None = None, **arguments: Any
) -> Trainer:
    torch.manual_seed(1)
    model = Wide(layers, width)
    generator = torch.Generator().manual_seed(2)
    dataset = TensorDataset(torch.randn(8, width, generator=generator), torch.randn(8, width, generator=generator))
    return Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters()),
        train_dataloader=DataLoader(dataset, batch_size=2, sampler=dist.get_sampler(dataset, shuffle=False)),
        max_duration='4ba',
        device='cpu',
        algorithms=[] if strategy is None else [DeepSpeed(**copy.deepcopy(strategy), load_sharded=load_sharded)],
        progress_bar=False,
        **arguments,
    )


def save(
    strategy: dict[str, Any] | None, path: str, layers: int, width: int, times: int = 1, by_composer: bool = False
) -> dict[str, float]:
    """Train a batch and save it a few times, as a ``CheckpointSaver`` does or as ``trainer.save_checkpoint``.

    Returns:
        dict[str, float]: ``peak_bytes`` on this rank in the first save, ``file_bytes``, and the medians ``time_sec``
            and, when there are several, ``unflushed_sec`` without the flush to the disk and ``torch_sec`` of
            ``torch.save`` with the same state, which does not flush either.
    """
    trainer = _trainer(strategy, layers, width)
    trainer.fit(duration='1ba')
    time_sec = []
    write = trainer.save_checkpoint if by_composer else functools.partial(save_checkpoint, trainer.state)
    with Peak() as peak:
        time_sec.append(_timed(write, path))
    file_bytes = os.path.getsize(path)
    torch_sec, unflushed_sec = [], []
    if times > 1:
        # torch.save of the same state, in turn with ours, because a disk is now fast and now slow.
        state = torch.load(path, weights_only=False) if dist.get_global_rank() == 0 else None
        for _ in range(times - 1):
            torch_sec.append(
                _timed(functools.partial(torch.save, state) if state else os.path.basename, path + '.torch')
            )
            time_sec.append(_timed(write, path))
            with mock.patch('os.fsync'):
                unflushed_sec.append(_timed(write, path))
    trainer.close()
    return {
        'peak_bytes': peak.bytes,
        'file_bytes': file_bytes,
        'time_sec': statistics.median(time_sec),
        'unflushed_sec': statistics.median(unflushed_sec or [0.0]),
        'torch_sec': statistics.median(torch_sec or [0.0]),
    }


def _timed(write: Callable[[str], Any], path: str) -> float:
    if dist.get_global_rank() == 0:
        os.sync()  # what an earlier save has left to write
    dist.barrier()
    start = time.perf_counter()
    write(path)
    dist.barrier()
    return time.perf_counter() - start


def load(strategy: dict[str, Any] | None, path: str, layers: int, width: int) -> dict[str, float]:
    """Build a Trainer that loads a file.

    Returns:
        dict[str, float]: ``peak_bytes`` of building and loading, ``built_bytes`` of building alone, on this rank.
    """
    with Peak() as built:
        trainer = _trainer(strategy, layers, width)
    trainer.close()
    del trainer
    with Peak() as loaded:
        trainer = _trainer(strategy, layers, width, load_path=path)
    assert trainer.state.timestamp.batch == 1
    trainer.close()
    return {'peak_bytes': loaded.bytes, 'built_bytes': built.bytes}


def save_sharded(strategy: dict[str, Any], folder: str, layers: int, width: int) -> dict[str, float]:
    """Train a batch and save it in shards.

    Returns:
        dict[str, float]: ``peak_bytes`` on this rank, and ``file_bytes`` of all shards.
    """
    trainer = _trainer(strategy, layers, width)
    trainer.fit(duration='1ba')
    saver = ShardedCheckpointSaver(folder, filename='ba{batch}')
    with Peak() as peak:
        path = saver.save(trainer.state)
    trainer.close()
    return {'peak_bytes': peak.bytes, 'file_bytes': sum(one.stat().st_size for one in path.glob('*.distcp'))}


def load_sharded(strategy: dict[str, Any], folder: str, layers: int, width: int) -> dict[str, float]:
    """Build a Trainer that loads a sharded checkpoint; the values are those of :func:`load`."""
    with Peak() as built:
        trainer = _trainer(strategy, layers, width)
    trainer.close()
    del trainer
    with Peak() as loaded:
        trainer = _trainer(strategy, layers, width, load_sharded=f'{folder}/ba1')
    assert trainer.state.timestamp.batch == 1
    trainer.close()
    return {'peak_bytes': loaded.bytes, 'built_bytes': built.bytes}
