"""The mT5 recipe at a size that trains in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, DataSpec, Evaluator, State
from composer.loggers import Logger
from torch.utils.data import DataLoader

import recipes.mt5
from recipes.cmudict_data import Word
from recipes.g2p_model import G2PModel
from recipes.mt5 import DataConfig, ModelConfig, build
from recipes.task import Task

# All builds of a process share one reading of the dictionary, which takes a second.
recipes.mt5.read_words = cache(recipes.mt5.read_words)

TINY: dict[str, Any] = {'d_model': 16, 'd_kv': 8, 'd_ff': 32, 'num_layers': 1, 'num_decoder_layers': 1, 'num_heads': 2}


class Watch(Callback):
    """Keeps the loss of each batch, and the label and the predictions of each evaluation."""

    def __init__(self):
        self.losses: list[float] = []
        self.evaluations: list[str] = []
        self.predictions: list[str] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        assert isinstance(state.loss, torch.Tensor)
        self.losses.append(state.loss.item())

    def eval_start(self, state: State, logger: Logger) -> None:
        self.evaluations.append(state.dataloader_label or '')

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        self.predictions += state.outputs  # pyright: ignore[reportOperatorIssue]  (a list of strings in this model)


def build_tiny(**data: Any) -> Task:
    settings: dict[str, Any] = {'global_batch_size': 16, 'eval_batch_size': 16, 'max_words': 200, 'eval_max_words': 41}
    return build(ModelConfig(**TINY), DataConfig(**settings | data))


def trainer_of(task: Task, watch: Watch | None = None, **arguments: Any) -> Trainer:
    return Trainer(
        model=task.model,
        optimizers=torch.optim.AdamW(task.model.parameters(), lr=1e-2),
        train_dataloader=task.train_dataloader,
        eval_dataloader=task.eval_dataloader,
        callbacks=[*task.callbacks, watch or Watch()],
        device='cpu',
        progress_bar=False,
        **arguments,
    )


def model_of(task: Task) -> G2PModel:
    assert isinstance(task.model, G2PModel)
    return task.model


def dataloader_of(spec: DataSpec) -> DataLoader[Any]:
    assert isinstance(spec.dataloader, DataLoader)
    return spec.dataloader


def held_out(evaluators: Sequence[Evaluator], split: int) -> list[Word]:
    """The words of the validation split (0) or of the test split (1)."""
    return list(dataloader_of(evaluators[split].dataloader).dataset)  # pyright: ignore[reportArgumentType]
