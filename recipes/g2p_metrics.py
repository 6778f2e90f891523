"""How wrong predicted pronunciations are, where any listed pronunciation counts as right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchmetrics import MeanMetric, text
from torchmetrics.functional.text import word_error_rate

__all__ = ['PhonemeErrorRate', 'WordErrorRate', 'closest_pronunciation']


# Both metrics see predictions and references, as ``G2PModel.update_metric`` hands them over, not what their bases take.
# pyright: reportIncompatibleMethodOverride=false


class PhonemeErrorRate(text.WordErrorRate):
    """Edit distance in phonemes, summed over words, divided by the number of phonemes of the references, summed.

    The reference of a word is its listed pronunciation with the smallest edit distance to the prediction, the first
    such one in the order of the dictionary. Insertions, deletions and substitutions cost 1 each. torchmetrics'
    ``WordErrorRate`` does the counting: what it calls a word is a phoneme here. Its states are sums, so ranks with
    different numbers of words are weighted rightly.

    Logged as ``metrics/{split}/PhonemeErrorRate``. 0 is best; above 1 is possible.
    """

    def update(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        """Counts the words of one batch on this rank.

        Args:
            predictions (Sequence[str]): Predicted phonemes of each word, separated by spaces.
            references (Sequence[Sequence[str]]): All listed pronunciations of each word, at least one.
        """
        closest = [closest_pronunciation(*pair) for pair in zip(predictions, references, strict=True)]
        super().update(list(predictions), closest)


class WordErrorRate(MeanMetric):
    """Share of words whose prediction equals none of their listed pronunciations, phoneme by phoneme.

    This is what the literature on grapheme-to-phoneme conversion calls WER; torchmetrics' metric of the same name is
    an edit distance. Logged as ``metrics/{split}/WordErrorRate``, in [0, 1]; 0 is best.
    """

    def update(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        """Counts the words of one batch on this rank.

        Args:
            predictions (Sequence[str]): Predicted phonemes of each word, separated by spaces.
            references (Sequence[Sequence[str]]): All listed pronunciations of each word, at least one.
        """
        wrong = [prediction not in listed for prediction, listed in zip(predictions, references, strict=True)]
        super().update(torch.tensor(wrong, dtype=torch.float))


def closest_pronunciation(prediction: str, listed: Sequence[str]) -> str:
    """Finds the listed pronunciation with the smallest edit distance to a prediction; the first one among equals.

    Args:
        prediction (str): Phonemes separated by spaces.
        listed (Sequence[str]): Pronunciations, at least one, none empty.

    Returns:
        str: One of ``listed``.
    """
    if len(listed) == 1:
        return listed[0]
    return min(listed, key=lambda reference: _edit_distance(prediction, reference))


def _edit_distance(prediction: str, reference: str) -> int:
    # torchmetrics' own edit_distance works on characters and cuts corners (beam of 25), so undo the rate's division.
    return round(float(word_error_rate(prediction, reference)) * len(reference.split()))
