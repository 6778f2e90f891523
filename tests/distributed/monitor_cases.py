"""Trainers with monitors, and the same numbers from plain Composer. Runs inside rank processes."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from composer import Callback, ComposerModel, DataSpec, Trainer
from composer.algorithms import GradientClipping
from composer.loggers import FileLogger, InMemoryLogger
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import ConfigError, DeepSpeed
from composer_ds.callbacks import CommunicationMonitor, DeepSpeedMonitor, ZeroMemoryMonitor
from composer_ds.plan_record import plan_record
from tests.distributed.clock_cases import Slope, slope_data
from tests.distributed.fp16_cases import fp16_on_this_cpu
from tests.distributed.parity_cases import CASES, OPTIMIZERS, STRATEGIES, FindUnusedParameters, Regression, _vectors

MONITORS = {'DeepSpeed': DeepSpeedMonitor, 'ZeroMemory': ZeroMemoryMonitor, 'Communication': CommunicationMonitor}


class Log(InMemoryLogger):
    """Keeps what is logged together, too."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        super().log_metrics(metrics, step)
        if 'optimizer_steps/applied' in metrics:
            self.calls.append((step or 0, dict(metrics)))


class NormsOfPlainTorch(Callback):
    """What the monitor must log, from whole gradients and weights."""

    def __init__(self):
        self.before: dict[str, torch.Tensor] = {}
        self.norms: list[dict[str, float]] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def _parameters(self, state) -> dict[str, torch.Tensor]:
        return {name.removeprefix('module.'): p for name, p in state.model.named_parameters() if p.requires_grad}

    def batch_start(self, state, logger):
        self.before = {name: p.detach().clone() for name, p in self._parameters(state).items()}

    def after_backward(self, state, logger):
        # After the last microbatch DistributedDataParallel has averaged them, and nobody has clipped them yet.
        self.gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self._parameters(state).items()
        }

    def batch_end(self, state, logger):
        found = {}
        for name, parameter in self._parameters(state).items():
            found[f'l2_norm/grad/{name}'] = float(self.gradients[name].double().norm())
            found[f'l2_norm/param/{name}'] = weight = float(parameter.detach().double().norm())
            found[f'l2_norm/update/{name}'] = update = float((parameter - self.before[name]).detach().double().norm())
            found[f'update_to_weight/{name}'] = update / weight
        found['l2_norm/grad/global'] = float(sum(g.double().square().sum() for g in self.gradients.values())) ** 0.5
        self.norms.append(found)


def per_layer(case_name: str, strategy: str | None, optimizer: str = 'sgd', clipping: float | None = None) -> list:
    """Train a case and return norms for each optimizer step, of the monitor or of plain Composer."""
    case = CASES[case_name]
    torch.manual_seed(17)
    model = case.model()
    oracle, log = NormsOfPlainTorch(), Log()
    algorithms: list[Any] = [FindUnusedParameters()] if case.unused_parameters and strategy is None else []
    if strategy is not None:
        algorithms.append(DeepSpeed(**STRATEGIES[strategy]))
    if clipping is not None:
        algorithms.append(GradientClipping('norm', clipping))
    trainer = Trainer(
        model=model,
        optimizers=OPTIMIZERS[optimizer](model.parameters()),
        train_dataloader=case.loader(case.dataset()),
        max_duration='5ba',
        device='cpu',
        device_train_microbatch_size=case.microbatch_size,
        algorithms=algorithms,
        callbacks=[oracle] if strategy is None else [DeepSpeedMonitor(per_layer=True)],
        loggers=log,
        seed=5,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    if strategy is None:
        return oracle.norms
    return [
        {key: value for key, value in metrics.items() if key.startswith(('l2_norm', 'update', 'gradient'))}
        for _, metrics in log.calls
    ]


class HalfRegression(Regression):
    """Its loss is computed in fp32, whatever its weights are."""

    def forward(self, batch):
        return super().forward(batch).float()


class Slow(ComposerModel):
    """Sleeps in each part of a batch, for times that are known."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.weight.register_hook(lambda gradient: time.sleep(0.02))

    def forward(self, batch):
        time.sleep(0.01)
        return batch[0] @ self.weight

    def loss(self, outputs, batch):
        time.sleep(0.005)
        return outputs.square().mean()

    def eval_forward(self, batch, outputs=None):
        time.sleep(0.05)
        return self(batch)

    def get_metrics(self, is_train):
        return {}


class SlowCheckpoints(Callback):
    """Takes its time at checkpoints."""

    def batch_checkpoint(self, state, logger):
        time.sleep(0.03)


def slow_batches():
    """Six batches of 4 samples, for which one waits."""
    for _ in range(6):
        time.sleep(0.04)
        yield [torch.ones(4, 4), torch.zeros(4)]


class SlowData:
    """Gives :func:`slow_batches` each epoch."""

    def __iter__(self):
        return slow_batches()

    def __len__(self):
        return 6


def times(interval: int, measure_reduction: bool | None, zero_stage: int = 2) -> list[tuple[int, dict[str, float]]]:
    """Train where each phase takes a known time: 2 microbatches in a batch."""
    log = Log()
    model = Slow()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
    sgd.register_step_pre_hook(lambda *_: time.sleep(0.025))
    evaluated = TensorDataset(torch.ones(8, 4), torch.zeros(8))
    trainer = Trainer(
        model=model,
        optimizers=sgd,
        train_dataloader=DataSpec(SlowData(), get_num_tokens_in_batch=lambda batch: 3 * len(batch[0])),
        eval_dataloader=DataLoader(evaluated, batch_size=4, sampler=dist.get_sampler(evaluated)),
        eval_interval='1ba',
        max_duration='1ep',
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=[DeepSpeed(zero_stage=zero_stage)],
        callbacks=[DeepSpeedMonitor(interval, measure_reduction=measure_reduction), SlowCheckpoints()],
        loggers=log,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    import deepspeed.comm

    assert not deepspeed.comm.comms_logger.enabled
    return log.calls


def keys(
    monitor: str,
    arguments: dict[str, Any],
    settings: dict[str, Any],
    clipping: float | None = None,
    dtype: str = 'fp32',
    tokens: bool = False,
) -> list[tuple[int, dict[str, float]]]:
    """Train with one monitor alone; return everything it logged."""
    if dtype != 'fp32':
        section = {'enabled': True} | ({'initial_scale_power': 5} if dtype == 'fp16' else {})
        settings = {**settings, 'ds_config': {**settings.get('ds_config', {}), dtype: section}}
    with fp16_on_this_cpu() if dtype == 'fp16' else contextlib.nullcontext():
        return _keys(monitor, arguments, settings, clipping, tokens)


def _keys(monitor, arguments, settings, clipping, tokens):
    torch.manual_seed(3)
    model, log, dataset = HalfRegression(), Log(), _vectors(count=16 * dist.get_world_size())
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        train_dataloader=DataSpec(
            DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False)),
            get_num_tokens_in_batch=(lambda batch: 5 * len(batch[0])) if tokens else None,
        ),
        max_duration='3ba',
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=[DeepSpeed(**settings), *([] if clipping is None else [GradientClipping('norm', clipping)])],
        callbacks=[MONITORS[monitor](**arguments)],
        loggers=log,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return log.calls


def skipped(settings: dict[str, Any], interval: int, infinite: tuple[int, ...]) -> list[tuple[int, dict[str, float]]]:
    """Train the slope, where some batches are infinite, with all monitors."""
    model, log = Slope(), Log()
    dataset = slope_data(12 * dist.get_world_size(), infinite)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        train_dataloader=DataLoader(dataset, batch_size=2, sampler=dist.get_sampler(dataset, shuffle=False)),
        max_duration='2ep',
        device='cpu',
        algorithms=[DeepSpeed(**settings)],
        callbacks=[DeepSpeedMonitor(interval, per_layer=True), CommunicationMonitor(1), ZeroMemoryMonitor(1)],
        loggers=log,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return log.calls


def uneven(strategy: str) -> list[tuple[int, dict[str, float]]]:
    """Train batches of different sizes on the ranks, with all monitors: nobody may wait for ever."""
    case = CASES['uneven']
    torch.manual_seed(17)
    model, log = case.model(), Log()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        train_dataloader=case.loader(case.dataset()),
        max_duration='1ep',
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=[DeepSpeed(**STRATEGIES[strategy])],
        callbacks=[DeepSpeedMonitor(per_layer=True), CommunicationMonitor(2), ZeroMemoryMonitor(2)],
        loggers=log,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return log.calls


def record(filename: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build a Trainer that logs to a file and to memory; return the plan, and what memory has of hyperparameters."""
    case = CASES['divides']
    memory, algorithm = InMemoryLogger(), DeepSpeed(zero_stage=2)
    model = case.model()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        train_dataloader=case.loader(case.dataset()),
        max_duration='1ba',
        device='cpu',
        algorithms=[algorithm],
        loggers=[memory, FileLogger(filename, capture_stdout=False, capture_stderr=False)],
    )
    trainer.fit()
    trainer.close()
    assert algorithm.plan is not None
    return plan_record(algorithm.plan), memory.hyperparameters


def refusal(monitor: str) -> str:
    """Build a Trainer of plain Composer with a monitor; return the error."""
    model = Regression()
    try:
        Trainer(model=model, max_duration='1ba', device='cpu', callbacks=[MONITORS[monitor]()])
    except ConfigError as error:
        return str(error)
    return ''


class Wide(ComposerModel):
    """Three matrices and a frozen one, of sizes that two ranks divide, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 96, bias=False), nn.Linear(96, 32, bias=False)
        self.frozen = nn.Linear(32, 16, bias=False).requires_grad_(False)
        self.register_buffer('table', torch.zeros(10))

    def forward(self, batch):
        return self.frozen(torch.tanh(self.second(torch.tanh(self.first(batch[0])))))

    def loss(self, outputs, batch):
        return outputs.square().mean()


def wide(monitor: str, settings: dict[str, Any], batches_per_step: int = 1) -> dict[str, float]:
    """Train :class:`Wide` with Adam, 3 microbatches in a batch; return what the monitor logged last."""
    torch.manual_seed(3)
    model, log = Wide(), Log()
    dataset = TensorDataset(torch.randn(36 * dist.get_world_size(), 64))
    ds_config = dict(settings.get('ds_config', {}))
    if batches_per_step > 1:
        ds_config['gradient_accumulation_steps'] = 3 * batches_per_step
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01),
        train_dataloader=DataLoader(dataset, batch_size=6, sampler=dist.get_sampler(dataset, shuffle=False)),
        max_duration='6ba',
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=[DeepSpeed(**{**settings, 'ds_config': ds_config})],
        callbacks=[MONITORS[monitor](interval=2)],
        loggers=log,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return log.calls[-1][1]
