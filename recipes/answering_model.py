"""A causal language model that is judged by the responses it generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from composer.utils import dist
from torchmetrics import MeanMetric, Metric
from torchmetrics.text import CharErrorRate

from recipes.causal_lm_model import LanguageModel

__all__ = ['AnsweringModel', 'ExactMatch']

# The metric sees generated and wanted responses, as ``AnsweringModel.update_metric`` hands them over.
# pyright: reportIncompatibleMethodOverride=false


class ExactMatch(MeanMetric):
    """Share of the responses that are right to the letter.

    Logged as ``metrics/{split}/ExactMatch``, in [0, 1]; 1 is best.
    """

    def update(self, generated: Sequence[str], wanted: Sequence[str]) -> None:
        """Counts the responses of one batch on this rank.

        Args:
            generated (Sequence[str]): The model's.
            wanted (Sequence[str]): Those of the data.
        """
        right = [one == other for one, other in zip(generated, wanted, strict=True)]
        super().update(torch.tensor(right, dtype=torch.float))


class AnsweringModel(LanguageModel):
    """Trains on responses after their prompts and evaluates by greedy generation.

    Its metrics are :class:`ExactMatch` and torchmetrics' ``CharErrorRate``: edit distance in characters, summed,
    divided by the characters of the wanted responses.

    Args:
        network (Any): A causal language model.
        tokenizer (Any): Its tokenizer.
        max_new_tokens (int): Where generation stops at the latest, in tokens, the end token included.
        **arguments (Any): As for ``HuggingFaceModel``.
    """

    def __init__(self, network: Any, tokenizer: Any, max_new_tokens: int, **arguments: Any):
        super().__init__(network, tokenizer, eval_metrics=[ExactMatch(), CharErrorRate()], **arguments)
        self.max_new_tokens = max_new_tokens

    def eval_forward(self, batch: Mapping[str, Any], outputs: Any = None) -> list[str]:
        """Generates a response to each prompt of an evaluation batch; Composer calls it in every evaluation.

        Collective: under ZeRO stage 3 every forward gathers weights, so all ranks must make equally many.
        ``synced_gpus`` lets a rank whose responses are finished go on until those of all ranks are.

        Args:
            batch (Mapping[str, Any]): From :class:`recipes.prompts.PromptCollator`.
            outputs (Any): Ignored; Composer's cached outputs of a training forward.

        Returns:
            list[str]: The responses.
        """
        assert self.tokenizer is not None  # Invariant: the constructor demands one.
        generated = self.generate(
            batch['input_ids'],
            attention_mask=batch['attention_mask'],
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,  # models that were trained without say otherwise in their configuration
            synced_gpus=dist.get_world_size() > 1,
        )
        responses: list[str] = self.tokenizer.batch_decode(
            generated[:, batch['input_ids'].shape[1] :], skip_special_tokens=True
        )
        return responses

    def update_metric(self, batch: Mapping[str, Any], outputs: list[str], metric: Metric) -> dict[str, Any]:
        """Counts one evaluation batch of this rank.

        Args:
            batch (Mapping[str, Any]): From :class:`recipes.prompts.PromptCollator`.
            outputs (list[str]): From :meth:`eval_forward`.
            metric (Metric): One of this model's metrics.

        Returns:
            dict[str, Any]: Nothing to report for single prompts.
        """
        metric.update(outputs, batch['responses'])
        return {}
