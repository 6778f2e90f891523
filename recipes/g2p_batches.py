"""Batches of words: padded letters as the input, padded phonemes as the labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from recipes.cmudict_data import Word
from recipes.g2p_tokenizer import spell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ['IGNORED_LABEL', 'EvalCollator', 'TrainCollator', 'count_tokens', 'training_samples']

IGNORED_LABEL = -100  # the loss of Hugging Face models skips it


def training_samples(words: Sequence[Word]) -> list[tuple[str, str]]:
    """Makes one sample of each listed pronunciation, so that a word with two is seen twice an epoch.

    Args:
        words (Sequence[Word]): Words of the training split.

    Returns:
        list[tuple[str, str]]: Pairs of a spelling and one pronunciation.
    """
    return [(word.spelling, pronunciation) for word in words for pronunciation in word.pronunciations]


class TrainCollator:
    """Makes a training batch, padded on the right to the longest of its samples.

    Args:
        tokenizer (PreTrainedTokenizerBase): Encodes both sides.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def __call__(self, samples: Sequence[tuple[str, str]]) -> dict[str, torch.Tensor]:
        """Encodes samples.

        Args:
            samples (Sequence[tuple[str, str]]): Pairs of a spelling and one pronunciation.

        Returns:
            dict[str, torch.Tensor]: ``input_ids`` and ``attention_mask`` of shape (samples, letters), ``labels`` of
                shape (samples, phonemes) with :data:`IGNORED_LABEL` as padding; all int64.
        """
        sources = self.tokenizer([spell(spelling) for spelling, _ in samples], padding=True, return_tensors='pt')
        targets = self.tokenizer([phonemes for _, phonemes in samples], padding=True, return_tensors='pt')
        labels = targets['input_ids'].masked_fill(targets['attention_mask'] == 0, IGNORED_LABEL)
        return {'input_ids': sources['input_ids'], 'attention_mask': sources['attention_mask'], 'labels': labels}


class EvalCollator:
    """Makes a batch of whole words, to generate from and to compare with all their pronunciations.

    Args:
        tokenizer (PreTrainedTokenizerBase): Encodes the spelling.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def __call__(self, words: Sequence[Word]) -> dict[str, Any]:
        """Encodes words.

        Args:
            words (Sequence[Word]): Held-out words.

        Returns:
            dict[str, Any]: ``input_ids`` and ``attention_mask`` of shape (words, letters), int64; ``spellings`` (list
                of str) and ``references`` (list of the words' pronunciations).
        """
        sources = self.tokenizer([spell(word.spelling) for word in words], padding=True, return_tensors='pt')
        return {
            'input_ids': sources['input_ids'],
            'attention_mask': sources['attention_mask'],
            'spellings': [word.spelling for word in words],
            'references': [list(word.pronunciations) for word in words],
        }


def count_tokens(batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Counts what Composer's ``accumulate_train_batch_on_tokens`` weights microbatches by, padding left out.

    Args:
        batch (dict[str, torch.Tensor]): A training batch or microbatch.

    Returns:
        dict[str, int]: ``total``: tokens of both sides; ``loss_generating``: tokens of the labels.
    """
    labels = int((batch['labels'] != IGNORED_LABEL).sum())
    return {'total': int(batch['attention_mask'].sum()) + labels, 'loss_generating': labels}
