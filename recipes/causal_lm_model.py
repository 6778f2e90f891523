"""A decoder-only language model of transformers as a Composer model, judged by its perplexity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from composer.metrics import LanguagePerplexity
from composer.models import HuggingFaceModel
from torchmetrics import Metric

__all__ = ['LanguageModel']


class LanguageModel(HuggingFaceModel):
    """Trains on the model's own cross entropy, and evaluates the perplexity of each label.

    Args:
        network (Any): A causal language model, or one of PEFT around it.
        tokenizer (Any): Saved into Composer's checkpoints beside the model's configuration.
        eval_metrics (list[Metric] | None): ``None`` takes ``LanguagePerplexity``: per token, over all tokens.
        **arguments (Any): As for ``HuggingFaceModel``.
    """

    def __init__(self, network: Any, tokenizer: Any, eval_metrics: list[Metric] | None = None, **arguments: Any):
        super().__init__(
            network,
            tokenizer=tokenizer,
            eval_metrics=[LanguagePerplexity()] if eval_metrics is None else eval_metrics,
            shift_labels=True,
            **arguments,
        )

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Takes the mean cross entropy over the labels, which transformers has computed in the forward.

        Composer 0.32's own method asks the configuration for ``use_return_dict``, which transformers 5 deprecates.

        Args:
            outputs (Any): What the model returned.
            batch (Mapping[str, Any]): A training batch.

        Returns:
            torch.Tensor: Scalar.
        """
        return outputs['loss']

    def eval_forward(self, batch: Mapping[str, Any], outputs: Any = None) -> Any:
        """Runs the model on an evaluation batch, and shifts the labels as the model does for its loss.

        Args:
            batch (Mapping[str, Any]): As in training.
            outputs (Any): Composer's cached outputs of a training forward, if there are any.

        Returns:
            Any: Logits of shape (sequences, length, vocabulary).
        """
        labels = batch['labels']
        self.labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
        return (outputs or self({name: values for name, values in batch.items() if name != 'labels'}))['logits']
