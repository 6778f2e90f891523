"""Paragraphs of a text, packed into sequences of one length, so that little of a batch is padding.

A sequence holds several paragraphs, and the model must not see one from another: positions start again at 0 with each
of them, from which transformers (5 and newer) makes the attention mask, and the first token of a paragraph is no label.
So sequences differ in how many labels they have, and a microbatch has to be weighted by them
(``train.accumulate_train_batch_on_tokens``).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import ByT5Tokenizer

from composer_ds.errors import ConfigError

__all__ = ['IGNORED_LABEL', 'collate', 'count_tokens', 'encode', 'pack', 'read_paragraphs', 'split_paragraphs']

IGNORED_LABEL = -100  # the loss of Hugging Face models skips it


def read_paragraphs(path: str | None) -> list[str]:
    """Reads a text. No rank talks to another.

    Args:
        path (str | None): A text file in UTF-8; ``None`` takes what ``help()`` tells about Python itself, which comes
            with Python: 464,970 characters in version 3.11.

    Returns:
        list[str]: What blank lines part, in the order of the text.

    Raises:
        ConfigError: There is no such file, or it is no text.
    """
    if path is None:
        from pydoc_data.topics import topics

        text = '\n\n'.join(topics[name] for name in sorted(topics))
    else:
        try:
            text = Path(path).read_text(encoding='utf-8')
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f'data.path is {path!r}, which is no text file in UTF-8 ({error})') from error
    return [paragraph.strip('\n') for paragraph in text.split('\n\n') if paragraph.strip()]


def split_paragraphs(
    paragraphs: Sequence[str], *, seed: int, validation_fraction: float
) -> tuple[list[str], list[str]]:
    """Splits at random; a paragraph that occurs more than once stays in one part.

    Args:
        paragraphs (Sequence[str]): The text.
        seed (int): Another seed gives another split.
        validation_fraction (float): Share of the paragraphs in the validation split.

    Returns:
        tuple[list[str], list[str]]: Those to train on and those for validation.
    """
    shuffled = list(dict.fromkeys(paragraphs))
    random.Random(seed).shuffle(shuffled)
    held_out = round(validation_fraction * len(shuffled))
    return shuffled[held_out:], shuffled[:held_out]


def encode(text: str, tokenizer: ByT5Tokenizer) -> list[int]:
    """Does what the tokenizer does, a hundred times faster, with the end token at the start as well.

    Args:
        text (str): A paragraph.
        tokenizer (ByT5Tokenizer): Whose tokens are bytes.

    Returns:
        list[int]: From the first one, the end token, the first byte is predicted.
    """
    end: Any = tokenizer.eos_token_id
    return [end, *(byte + tokenizer.offset for byte in text.encode()), end]


def pack(paragraphs: Iterable[Sequence[int]], sequence_length: int) -> list[list[list[int]]]:
    """Packs token sequences, each into the first sequence with room for it, the longest ones first.

    Args:
        paragraphs (Iterable[Sequence[int]]): Tokens of each paragraph; what is longer than a sequence is cut.
        sequence_length (int): Tokens of a sequence.

    Returns:
        list[list[list[int]]]: Of each sequence its paragraphs, of ``sequence_length`` tokens at most altogether.
    """
    pieces = [
        list(tokens[start : start + sequence_length])
        for tokens in paragraphs
        for start in range(0, len(tokens), sequence_length)
    ]
    packed: list[list[list[int]]] = []
    # Sequences by the room that is left in them: looking through all of them for each piece would take minutes.
    with_room: dict[int, list[list[list[int]]]] = {}
    for piece in sorted(pieces, key=len, reverse=True):
        room = next((room for room in range(len(piece), sequence_length) if with_room.get(room)), None)
        if room is None:
            room, sequence = sequence_length, []
            packed.append(sequence)
        else:
            sequence = with_room[room].pop()
        sequence.append(piece)
        with_room.setdefault(room - len(piece), []).append(sequence)
    return packed


def collate(sequences: Sequence[Sequence[Sequence[int]]], *, sequence_length: int, pad: int) -> dict[str, torch.Tensor]:
    """Makes a batch of packed sequences.

    Args:
        sequences (Sequence[Sequence[Sequence[int]]]): From :func:`pack`.
        sequence_length (int): To which to pad on the right.
        pad (int): The token to pad with; paddings are a paragraph of their own, without labels.

    Returns:
        dict[str, torch.Tensor]: ``input_ids``, ``position_ids`` and ``labels`` of shape (sequences, length), int64. As
            everywhere in Hugging Face models the label of a token is the token itself, and the model shifts them.
    """
    rows: dict[str, list[list[int]]] = {'input_ids': [], 'position_ids': [], 'labels': []}
    for sequence in sequences:
        paddings = sequence_length - sum(map(len, sequence))
        parts = [*sequence, [pad] * paddings]
        rows['input_ids'].append([token for part in parts for token in part])
        rows['position_ids'].append([position for part in parts for position in range(len(part))])
        labels = [label for part in sequence for label in (IGNORED_LABEL, *part[1:])]
        rows['labels'].append(labels + [IGNORED_LABEL] * paddings)
    return {name: torch.tensor(values) for name, values in rows.items()}


def count_tokens(batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Counts what Composer's ``accumulate_train_batch_on_tokens`` weights microbatches by.

    Args:
        batch (dict[str, torch.Tensor]): A batch or microbatch.

    Returns:
        dict[str, int]: ``total``: tokens, padding included; ``loss_generating``: labels.
    """
    return {'total': batch['labels'].numel(), 'loss_generating': int((batch['labels'] != IGNORED_LABEL).sum())}
