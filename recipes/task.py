"""What a recipe hands to the Trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer.core import Algorithm, Callback, DataSpec, Evaluator
    from composer.models import ComposerModel

__all__ = ['Task']


@dataclass
class Task:
    """A model with the data to train and to judge it; ``build`` of a recipe returns one on every rank.

    Args:
        model (ComposerModel): The model, on the CPU, with the same weights on every rank.
        train_dataloader (DataSpec): Batches of this rank.
        eval_dataloader (list[Evaluator]): One evaluator for each held-out split. An evaluator without an
            ``eval_interval`` follows the Trainer's.
        callbacks (list[Callback]): What the recipe itself reports; the user's callbacks come on top.
        algorithms (list[Algorithm]): Composer's algorithms that belong to the recipe; the launcher adds ``DeepSpeed``.
    """

    model: ComposerModel
    train_dataloader: DataSpec
    eval_dataloader: list[Evaluator]
    callbacks: list[Callback] = field(default_factory=list)
    algorithms: list[Algorithm] = field(default_factory=list)
