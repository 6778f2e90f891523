"""A task that trains in a moment: linear regression on a few fixed samples, always in the same order."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from composer import Callback, ComposerModel, Logger, State
from composer.utils import dist
from pydantic import BaseModel
from torch.utils.data import DataLoader, TensorDataset

RANK_BATCH = 4


class InitConfig(BaseModel, extra='forbid'):
    """A nested section."""

    scale: float = 1.0


class ModelConfig(BaseModel, extra='forbid'):
    """What to train."""

    width: int = 3
    init: InitConfig = InitConfig()


class DataConfig(BaseModel, extra='forbid'):
    """What to train on."""

    samples: int = 24
    weights_file: str | None = None


class Regression(ComposerModel):
    """One linear layer with a norm, so that there are parameters of one and of two dimensions."""

    def __init__(self, width: int, scale: float):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, 1)
        with torch.no_grad():
            self.linear.weight.copy_(scale * torch.linspace(-1, 1, width).unsqueeze(0))
            self.linear.bias.zero_()

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.linear(self.norm(batch[0]))

    def loss(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1])


class WriteWeights(Callback):
    """Writes the weights after training, and how many threads computed them."""

    def __init__(self, path: str):
        self.path = Path(path)

    def fit_end(self, state: State, logger: Logger) -> None:
        weights = state.get_model_state_dict()  # without DDP's `module.`; every rank takes part
        if dist.get_global_rank() == 0:
            torch.save({'weights': weights, 'threads': torch.get_num_threads()}, self.path)


@dataclass
class TinyTask:
    """What `build` returns."""

    model: ComposerModel
    train_dataloader: DataLoader
    eval_dataloader: None = None
    callbacks: list[Callback] = field(default_factory=list)


def dataset(samples: int, width: int) -> TensorDataset:
    """Samples whose target is the sum of the inputs."""
    inputs = torch.randn(samples, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def build(model: ModelConfig, data: DataConfig) -> TinyTask:
    """Builds the task on this rank; samples 0, 2, 4, ... go to rank 0 of two."""
    if os.environ.get('TINY_RECIPE_BUG'):
        raise ZeroDivisionError('a bug of the recipe')
    samples = dataset(data.samples, model.width)
    sampler = dist.get_sampler(samples, shuffle=False)
    return TinyTask(
        Regression(model.width, model.init.scale),
        DataLoader(samples, batch_size=RANK_BATCH, sampler=sampler),
        callbacks=[WriteWeights(data.weights_file)] if data.weights_file else [],
    )
