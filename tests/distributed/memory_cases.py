"""What an engine really holds, found among Python's live objects. Runs inside rank processes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import deepspeed.comm
import torch
from composer import Callback, ComposerModel, Trainer
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from composer_ds.memory import rank_memory
from composer_ds.memory_plan import MemoryPlan
from composer_ds.model_sizes import sizes_of

MICROBATCHES = 2


class Network(ComposerModel):
    """Weights and biases, frozen ones, and a buffer; so wide that batches and outputs do not count."""

    def __init__(self, widths: tuple[int, ...]):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
        self.frozen = nn.Linear(widths[-1], widths[-2]).requires_grad_(False)
        self.register_buffer('table', torch.zeros(widths[-1], 7))

    def forward(self, batch):
        return self.frozen(self.layers(batch[0]))

    def loss(self, outputs, batch):
        return outputs.float().square().mean()


WIDTHS = {
    # Matrices above ZeRO 3's threshold, and biases below it.
    'large': (400, 400, 400, 300),
    # Everything below it, odd everywhere, so that padding and whole parameters in partitions show.
    'odd': (61, 89, 53, 97, 41),
}


class _Recorder(Callback):
    """Measures the process in the second optimizer step, wherever DeepSpeed has just allocated something."""

    def __init__(self):
        self.peak_bytes = 0
        self.microbatches = 0
        self.undo: list[Callable[[], None]] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        ds_engine: Any = next(one.ds_engine for one in state.algorithms if isinstance(one, DeepSpeed))
        zero_optimizer = ds_engine.optimizer
        for owner, name in (
            (deepspeed.comm, 'all_reduce'),
            (deepspeed.comm, 'reduce_scatter_fn'),
            (zero_optimizer, 'flatten'),
            (zero_optimizer, '_release_ipg_buffers'),
        ):
            if hasattr(owner, name):
                self._measure_around(owner, name)
        state.optimizers[0].register_step_post_hook(lambda *_: self.measure())

    def before_backward(self, state: State, logger: Logger) -> None:
        self.microbatches += 1
        if self.microbatches == 2 * MICROBATCHES:
            gc.collect()  # of the first optimizer step nothing is left

    def after_backward(self, state: State, logger: Logger) -> None:
        self.measure()

    def close(self, state: State, logger: Logger) -> None:
        while self.undo:
            self.undo.pop()()

    def _measure_around(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def around(*args: Any, **kwargs: Any) -> Any:
            self.measure()
            result = function(*args, **kwargs)
            self.measure()
            return result

        setattr(owner, name, around)
        self.undo.append(lambda: setattr(owner, name, function))

    def measure(self) -> None:
        if self.microbatches == 2 * MICROBATCHES and live_bytes() > self.peak_bytes:
            time.sleep(0.02)  # gloo's thread lets go of what the collective before has sent
            self.peak_bytes = max(self.peak_bytes, live_bytes())


def live_bytes() -> int:
    """Sum up the storages of all tensors made since ``gc.freeze()``, each once."""
    found = {}
    for one in gc.get_objects():
        if not issubclass(type(one), torch.Tensor):
            continue
        with contextlib.suppress(RuntimeError):  # autograd takes the tensor apart right now
            for tensor in (one, one.grad) if one.is_leaf and one.grad is not None else (one,):
                if tensor.device.type != 'meta' and tensor.untyped_storage().nbytes():
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def measured_and_predicted(name: str, optimizer: str, settings: dict[str, Any]) -> tuple[int, int]:
    """Train two optimizer steps; return this rank's largest total in bytes, and the prediction for the fullest rank."""
    inputs = torch.zeros(8 * dist.get_world_size(), WIDTHS[name][0])
    gc.collect()
    gc.freeze()  # what is alive now is hidden from gc.get_objects()
    model = Network(WIDTHS[name])
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1 and parameter.requires_grad]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1 and parameter.requires_grad]
    groups = [{'params': matrices}, {'params': others, 'weight_decay': 0.0}]
    client = {
        'adamw': lambda: torch.optim.AdamW(groups, lr=0.01),
        'momentum': lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        'sgd': lambda: torch.optim.SGD(groups, lr=0.01),
    }[optimizer]()
    sizes = sizes_of(model, client)
    data = TensorDataset(inputs)
    recorder, algorithm = _Recorder(), DeepSpeed(**settings)
    trainer = Trainer(
        model=model,
        optimizers=client,
        train_dataloader=DataLoader(data, batch_size=MICROBATCHES, sampler=dist.get_sampler(data)),
        max_duration='2ba',
        device='cpu',
        device_train_microbatch_size=1,
        algorithms=[algorithm],
        callbacks=[recorder],
        progress_bar=False,
    )
    assert algorithm.plan is not None
    plan = MemoryPlan.of_ds_config(
        algorithm.plan.ds_config,
        world_size=dist.get_world_size(),
        weights=algorithm.plan.weights,
        on_cpu=True,
    )
    trainer.fit()
    trainer.close()
    gc.unfreeze()
    return recorder.peak_bytes, rank_memory(sizes, plan).total_bytes
