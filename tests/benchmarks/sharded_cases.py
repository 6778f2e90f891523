"""Time of sharded saves and loads. Runs inside rank processes."""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import time
from typing import Any

import torch
from composer.utils import dist

from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver
from composer_ds.sharded.preemption import Preemption
from tests.benchmarks.saving_cases import Peak, _timed, _trainer


def save(strategy: dict[str, Any], folder: str, layers: int, width: int, times: int) -> dict[str, float]:
    """Train a batch, then save it blocking, in the background and with ``torch.save``, in turn.

    Returns:
        dict[str, float]: Medians: ``blocking_sec``; ``stalled_sec``, after which training could go on, and
            ``background_sec`` until the checkpoint is complete; ``torch_sec`` of ``torch.save`` of the same bytes, by
            each rank its own, flushed to the disk. ``file_bytes`` are those of all ranks.
    """
    trainer = _trainer(strategy, layers, width)
    trainer.fit(duration='1ba')
    savers = {kind: ShardedCheckpointSaver(f'{folder}/{kind}', asynchronous=kind == 'background') for kind in KINDS}
    seconds: dict[str, list[float]] = {'blocking': [], 'stalled': [], 'background': [], 'torch': []}
    for _ in range(times):
        seconds['blocking'].append(_timed(lambda _: savers['blocking'].save(trainer.state), ''))
        dist.barrier()
        started = time.perf_counter()
        path = savers['background'].save(trainer.state)
        seconds['stalled'].append(time.perf_counter() - started)
        savers['background'].wait()
        seconds['background'].append(time.perf_counter() - started)
        own = path / f'__{dist.get_global_rank()}_0.distcp'
        state = torch.empty(own.stat().st_size // 4)
        seconds['torch'].append(_timed(lambda name, state=state: _write(state, name), f'{own}.torch'))
        file_bytes = sum(one.stat().st_size for one in path.iterdir() if not one.name.endswith('.torch'))
        dist.barrier()
        if dist.get_global_rank() == 0:
            shutil.rmtree(savers['background'].local_folder(trainer.state))
        dist.barrier()
    trainer.close()
    medians = {f'{kind}_sec': statistics.median(found) for kind, found in seconds.items()}
    return {**medians, 'file_bytes': file_bytes}


KINDS = ('blocking', 'background')


def _write(state: torch.Tensor, name: str) -> None:
    with open(name, 'wb') as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load(strategy: dict[str, Any], folder: str, layers: int, width: int) -> dict[str, float]:
    """Build a Trainer that loads the checkpoint.

    Returns:
        dict[str, float]: ``load_sec``, which a Trainer that loads takes longer, and its ``peak_bytes`` on this rank.
    """
    started = time.perf_counter()
    _trainer(strategy, layers, width).close()
    built_sec = time.perf_counter() - started
    (path,) = pathlib.Path(folder, 'blocking').glob('ep*')
    started = time.perf_counter()
    with Peak() as peak:
        trainer = _trainer(strategy, layers, width, load_sharded=str(path))
    assert trainer.state.timestamp.batch == 1
    trainer.close()
    return {'load_sec': time.perf_counter() - started - built_sec, 'peak_bytes': peak.bytes}


def listen(times: int) -> float:
    """The seconds that a batch takes longer because of ``save_on_sigterm``: one exchange on the CPU."""
    preemption = Preemption()
    preemption.is_asked_for()  # makes the group
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        preemption.is_asked_for()
    return (time.perf_counter() - started) / times
