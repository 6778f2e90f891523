"""What monitors cost, in one run that switches them on and off. Runs inside rank processes."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from composer import Callback, ComposerModel, Trainer
from composer.core import Event, State
from composer.loggers import InMemoryLogger, Logger
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from composer_ds.callbacks import CommunicationMonitor, DeepSpeedMonitor, ZeroMemoryMonitor

WARM_UP = 6

KINDS: dict[str, Any] = {
    'DeepSpeedMonitor()': DeepSpeedMonitor,
    'without reduction': lambda: DeepSpeedMonitor(measure_reduction=False),
    'per_layer=True': lambda: DeepSpeedMonitor(per_layer=True),
    'CommunicationMonitor(1)': lambda: CommunicationMonitor(interval=1),
    'ZeroMemoryMonitor(1)': lambda: ZeroMemoryMonitor(interval=1),
}


class Layers(ComposerModel):
    """Square layers, wide enough that an optimizer step takes long."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return outputs.square().mean()


class Alternately(Callback):
    """Hands events over to a monitor in every second batch only, and times the batches and the monitor itself."""

    def __init__(self, monitor: Any):
        self.monitor = monitor
        self.is_on = False
        self.begun = self.begun_cpu = self.own_sec = 0.0
        self.batches: list[tuple[bool, float, float, float]] = []

    def _call(self, function: Any, *arguments: Any) -> None:
        start = time.perf_counter()
        function(*arguments)
        self.own_sec += time.perf_counter() - start

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            self.monitor.run_event(event, state, logger)
            return
        if event == Event.BATCH_START:
            if self.is_on:  # as at the start of a fit, which is not measured
                self.monitor.fit_start(state, logger)
            self.begun, self.begun_cpu, self.own_sec = time.perf_counter(), time.process_time(), 0.0
        if self.is_on:
            self._call(self.monitor.run_event, event, state, logger)
        if event == Event.BATCH_END:
            wall, cpu = time.perf_counter() - self.begun, time.process_time() - self.begun_cpu
            self.batches.append((self.is_on, wall, cpu, self.own_sec))
            if self.is_on:
                self.monitor.fit_end(state, logger)
            self.is_on = not self.is_on

    def optimizer_step(self, state: State, logger: Logger) -> None:
        if self.is_on:
            self._call(self.monitor.optimizer_step, state, logger)


def cost(kind: str, zero_stage: int, layers: int, width: int, samples: int, batches: int) -> dict[str, float]:
    """Train with a monitor on in every second batch.

    Returns:
        dict[str, float]: ``off_sec`` and ``on_sec``, a batch without and with the monitor; ``off_cpu_sec`` and
            ``on_cpu_sec``, the processor's time in them; ``own_sec``, the time in the monitor itself, without what it
            makes others do; ``spread`` of the batches without. Of each the first decile, which other processes on the
            machine disturb least.
    """
    alternately, log = Alternately(KINDS[kind]()), InMemoryLogger()
    dataset = TensorDataset(torch.randn(samples * dist.get_world_size() * batches, width))
    model = Layers(layers, width)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        train_dataloader=DataLoader(dataset, batch_size=samples, sampler=dist.get_sampler(dataset)),
        max_duration=f'{batches}ba',
        device='cpu',
        device_train_microbatch_size=samples // 2,
        algorithms=[DeepSpeed(zero_stage=zero_stage)],
        callbacks=[alternately],
        loggers=log,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    measured = alternately.batches[WARM_UP:]
    off = [(wall, cpu) for is_on, wall, cpu, _ in measured if not is_on]
    on = [(wall, cpu) for is_on, wall, cpu, _ in measured if is_on]
    own = [own for is_on, _, _, own in measured if is_on]
    return {
        'off_sec': _first_decile([wall for wall, _ in off]),
        'on_sec': _first_decile([wall for wall, _ in on]),
        'off_cpu_sec': _first_decile([cpu for _, cpu in off]),
        'on_cpu_sec': _first_decile([cpu for _, cpu in on]),
        'own_sec': _first_decile(own),
        'spread': statistics.median(wall for wall, _ in off) / _first_decile([wall for wall, _ in off]) - 1,
    }


def _first_decile(times: list[float]) -> float:
    return statistics.quantiles(times, n=10)[0]
