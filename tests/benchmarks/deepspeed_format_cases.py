"""Saving with a raw DeepSpeed engine, and ways to read it. Runs inside rank processes."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from composer.utils import dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from composer_ds.deepspeed_format import DeepSpeedSource
from tests.benchmarks.saving_cases import Peak

READERS = ['tensor by tensor', 'all at once', 'zero_to_fp32, lazy', 'zero_to_fp32']


def save(folder: str, zero_stage: int, layers: int, width: int) -> None:
    """Train a batch and save."""
    dist.initialize_dist('cpu')
    deepspeed.init_distributed('gloo')
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            'train_micro_batch_size_per_gpu': 1,
            'zero_optimization': {'stage': zero_stage, 'reduce_bucket_size': 2 * width**2},
        },
        dist_init_required=False,
    )[0]
    engine.backward(engine(torch.randn(1, width)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)


def _tensors(folder: str, reader: str) -> Iterator[torch.Tensor]:
    if reader.startswith('zero_to_fp32'):
        lazy = reader.endswith('lazy')
        found: Any = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=lazy)
        for value in found.values():
            yield value.contiguous() if lazy else value
    else:
        source = DeepSpeedSource(folder)
        for name, stored in source.tensors.items():
            yield source.read(name, 0, stored.shape.numel())


def read(folder: str, reader: str) -> dict[str, float]:
    """Read all weights, keeping one tensor at a time; ``'all at once'`` and ``'zero_to_fp32'`` keep all.

    Returns:
        dict[str, float]: ``time_sec``, ``peak_bytes``, of it ``anonymous_bytes`` (without the pages of mapped files,
            which the system takes back when it needs them), and the ``elements`` that were read.
    """
    _warm_up()
    watch = _AnonymousPeak()
    start, elements, kept = time.perf_counter(), 0, []
    with Peak() as peak, watch:
        for tensor in _tensors(folder, reader):
            elements += int(torch.isfinite(tensor).sum())
            if reader == 'all at once':
                kept.append(tensor)
            del tensor
        time_sec = time.perf_counter() - start
    return {
        'time_sec': time_sec,
        'peak_bytes': peak.bytes,
        'anonymous_bytes': watch.bytes,
        'elements': elements,
    }


def _warm_up() -> None:
    """What torch and numpy keep once they have been used is not counted."""
    torch.isfinite(torch.randn(2**20)).sum()


class _AnonymousPeak:
    """The highest anonymous memory inside, in bytes beyond the start, asked for every 2 ms."""

    bytes = 0

    def __enter__(self):
        self._before, self._end = _anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.bytes = max(self.bytes, _anonymous_bytes() - self._before)

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


def _anonymous_bytes() -> int:
    for line in pathlib.Path('/proc/self/status').read_text().splitlines():
        if line.startswith('RssAnon'):
            return int(line.split()[1]) * 1024
    raise AssertionError('RssAnon')
