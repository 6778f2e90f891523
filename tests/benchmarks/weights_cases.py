"""Time and memory of several ways to write a model's whole weights under ZeRO 3. Runs inside rank processes."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from composer.utils import dist

from composer_ds import DeepSpeed
from composer_ds.callbacks import ConsolidatedWeightsSaver
from tests.benchmarks.saving_cases import Peak, _timed, _trainer

ZERO_3: dict[str, Any] = {
    'zero_stage': 3,
    # save_16bit_model refuses without it.
    'ds_config': {'zero_optimization': {'stage3_gather_16bit_weights_on_model_save': True}},
}


def measure(folder: str, layers: int, width: int, times: int, only: list[str] | None = None) -> dict[str, Any]:
    """Train a batch, and write the weights in every way, in turn, because a disk is now fast and now slow.

    Returns:
        dict[str, Any]: For each way its median ``time_sec``, and ``peak_bytes`` of this rank the first time.
    """
    trainer = _trainer(ZERO_3, layers, width)
    trainer.fit(duration='1ba')
    state = trainer.state
    ds_engine: Any = next(one.ds_engine for one in state.algorithms if isinstance(one, DeepSpeed))
    first = dist.get_global_rank() == 0

    def same_bytes(path: str) -> None:
        if first:
            torch.save(same, path)

    def flushed(path: str) -> None:
        same_bytes(path)
        if first:
            with open(path, 'rb+') as file:
                os.fsync(file.fileno())

    def gathered(path: str) -> None:
        weights = state.model.state_dict()
        if first:
            torch.save(weights, path)

    def ours(dtype: str) -> Callable[[str], Any]:
        return lambda path: ConsolidatedWeightsSaver(folder, dtype=dtype, filename=os.path.basename(path)).save(state)

    ways: dict[str, Callable[[str], Any]] = {
        'ConsolidatedWeightsSaver': ours('fp32'),
        'ConsolidatedWeightsSaver, bf16': ours('bf16'),
        'DeepSpeed save_16bit_model (fp32 here)': lambda path: ds_engine.save_16bit_model(folder, f'{path}.bin'),
        'gather everything, torch.save': gathered,
        'torch.save of the same bytes, flushed': flushed,
        'torch.save of the same bytes': same_bytes,
    }
    same: dict[str, torch.Tensor] = {}
    times_sec: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, int] = {}
    for turn in range(times + 1):
        for number, (name, write) in enumerate(ways.items()):
            if only is not None and name not in only:
                continue
            if write in (same_bytes, flushed):
                same = same or {name: value.clone() for name, value in state.model.state_dict().items()}
            path = f'{folder}/{number}-{turn}'
            # What was freed before would be taken again, and would hide what is needed.
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            with Peak() as peak:
                time_sec = _timed(write, path)
            if turn == 0:
                peaks[name] = peak.bytes  # and the time is that of new memory
            if turn > 0 or times == 0:
                times_sec[name].append(time_sec)
            dist.barrier()
            if first:
                _remove(path)
                _remove(f'{path}.bin')
    trainer.close()
    return {
        name: {'time_sec': statistics.median(times_sec[name]), 'peak_bytes': peaks[name], 'calls': len(times_sec[name])}
        for name in peaks
    }


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)
