"""What a grapheme-to-phoneme model ought to predict and how wrong it is, by the shortest code that can be right."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from recipes.g2p_model import G2PModel


@cache
def edit_distance(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """The definition: the cheapest of deleting, inserting and substituting the first symbol."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        edit_distance(a[1:], b) + 1,
        edit_distance(a, b[1:]) + 1,
        edit_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )


def expected_rates(predictions: list[str], references: list[list[str]]) -> tuple[float, float]:
    """PER and WER, straight from their definitions."""
    distances = phonemes = wrong = 0
    for prediction, listed in zip(predictions, references, strict=True):
        options = [(edit_distance(tuple(prediction.split()), tuple(text.split())), text) for text in listed]
        smallest = min(distance for distance, _ in options)
        closest = next(text for distance, text in options if distance == smallest)
        distances += smallest
        phonemes += len(closest.split())
        wrong += prediction not in listed
    return distances / phonemes, wrong / len(predictions)


@torch.no_grad()
def greedy_prediction(model: G2PModel, spelling: str) -> str:
    """Predicts one word alone: no padding, no cache, the whole prefix anew for each phoneme."""
    tokenizer, network = model.tokenizer, model.model
    assert tokenizer is not None
    source = torch.tensor([tokenizer(' '.join(spelling))['input_ids']])
    prefix = [0]  # T5's decoder starts with the padding token
    was_training = network.training
    network.eval()
    while len(prefix) <= model.max_new_tokens:
        logits = network(input_ids=source, decoder_input_ids=torch.tensor([prefix])).logits
        prefix.append(int(logits[0, -1].argmax()))
        if prefix[-1] == 1:  # the end token
            break
    network.train(was_training)
    names = {identifier: token for token, identifier in tokenizer.get_vocab().items()}
    return ' '.join(names[identifier] for identifier in prefix if identifier > 2)
