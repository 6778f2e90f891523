"""An encoder-decoder of transformers as a Composer model that is judged by the pronunciations it generates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from composer.models import HuggingFaceModel
from composer.utils import dist
from torchmetrics import Metric
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipes.g2p_metrics import PhonemeErrorRate, WordErrorRate

__all__ = ['G2PModel']


class G2PModel(HuggingFaceModel):
    """Trains on the model's own cross entropy and evaluates by greedy generation.

    Args:
        network (PreTrainedModel): An encoder-decoder with a language modelling head.
        tokenizer (PreTrainedTokenizerBase): Saved into Composer's checkpoints beside the model's configuration.
        max_new_tokens (int): Where generation stops at the latest, in tokens of the tokenizer, the end token included.
    """

    def __init__(self, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int):
        super().__init__(
            network,
            tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]  (transformers 5 has one class less)
            eval_metrics=[PhonemeErrorRate(), WordErrorRate()],
        )
        self.max_new_tokens = max_new_tokens

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Takes the mean cross entropy over the tokens of the labels, which transformers has computed in the forward.

        Composer 0.32's own method asks the configuration for ``use_return_dict``, which transformers 5 deprecates.

        Args:
            outputs (Any): What the model returned.
            batch (Mapping[str, Any]): From :class:`recipes.g2p_batches.TrainCollator`.

        Returns:
            torch.Tensor: Scalar.
        """
        return outputs['loss']

    def eval_forward(self, batch: Mapping[str, Any], outputs: Any = None) -> list[str]:
        """Generates a pronunciation for each word of an evaluation batch; Composer calls it in every evaluation.

        Collective: under ZeRO stage 3 every forward gathers weights, so all ranks must make equally many. They do:
        Composer gives all ranks equally many batches, and ``synced_gpus`` lets a rank whose words are finished go on
        until those of all ranks are.

        Args:
            batch (Mapping[str, Any]): From :class:`recipes.g2p_batches.EvalCollator`.
            outputs (Any): Ignored; Composer's cached outputs of a training forward.

        Returns:
            list[str]: Phonemes of each word, separated by one space.
        """
        generated = self.generate(
            batch['input_ids'],
            attention_mask=batch['attention_mask'],
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            synced_gpus=dist.get_world_size() > 1,
        )
        assert self.tokenizer is not None  # Invariant: the constructor demands one.
        texts = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
        return [' '.join(text.split()) for text in texts]

    def update_metric(self, batch: Mapping[str, Any], outputs: list[str], metric: Metric) -> dict[str, Any]:
        """Counts one evaluation batch of this rank.

        Args:
            batch (Mapping[str, Any]): From :class:`recipes.g2p_batches.EvalCollator`.
            outputs (list[str]): From :meth:`eval_forward`.
            metric (Metric): One of the metrics of :mod:`recipes.g2p_metrics`.

        Returns:
            dict[str, Any]: Nothing to report for single words.
        """
        metric.update(outputs, batch['references'])
        return {}
