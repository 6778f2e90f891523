"""The mT5 recipe with ``model.pretrained``: from a folder made on the spot, and without network."""

from __future__ import annotations

import string
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import BertConfig, MT5Config, MT5ForConditionalGeneration, T5Tokenizer

from composer_ds.errors import ConfigError
from recipes.cmudict_data import phonemes
from recipes.g2p_tokenizer import g2p_tokenizer
from recipes.mt5 import DataConfig, ModelConfig, build
from tests.recipes.tiny_mt5 import TINY, dataloader_of, model_of, trainer_of


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a download would have left: weights, configuration and tokenizer of another tiny mT5."""
    tokenizer = g2p_tokenizer(phonemes())
    torch.manual_seed(99)
    sizes: dict[str, Any] = {**TINY, 'd_model': 24, 'vocab_size': len(tokenizer) + 5}
    config = MT5Config(**sizes, dropout_rate=0.25)
    MT5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_weights_sizes_and_tokenizer(folder):
    data = DataConfig(max_words=32, eval_max_words=8, global_batch_size=16)
    task = build(ModelConfig(pretrained=str(folder)), data)
    saved = MT5ForConditionalGeneration.from_pretrained(folder).state_dict()
    assert model_of(task).config.d_model == 24 and model_of(task).config.dropout_rate == 0.25
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model_of(task).model.state_dict().items())
    trainer_of(task, max_duration='1ep').fit()
    assert not torch.equal(model_of(task).model.get_parameter('shared.weight'), saved['shared.weight'])


def test_the_texts_of_both_sides_suit_a_sentencepiece_tokenizer(tmp_path):
    # As in published mT5 models: a mark for the start of a word, and pieces of several letters or half a phoneme.
    pieces = ['<pad>', '</s>', '<unk>', '▁', *string.ascii_letters, "'", '-', '.', '▁c', '▁a', 'at', '▁AE', 'AH', 'TH']
    T5Tokenizer(vocab=[(piece, -float(rank)) for rank, piece in enumerate(pieces)], extra_ids=0).save_pretrained(
        tmp_path
    )
    MT5ForConditionalGeneration(MT5Config(**TINY, vocab_size=len(pieces))).save_pretrained(tmp_path)

    task = build(ModelConfig(pretrained=str(tmp_path)), DataConfig(max_words=32, global_batch_size=32))
    tokenizer = model_of(task).tokenizer
    assert isinstance(tokenizer, T5Tokenizer)
    dataloader = dataloader_of(task.train_dataloader)
    samples: list[Any] = [dataloader.dataset[index] for index in range(32)]
    batch: dict[str, Any] = dataloader.collate_fn(samples)
    targets = batch['labels'].masked_fill(batch['labels'] == -100, 0)
    for (spelling, pronunciation), source, target in zip(samples, batch['input_ids'], targets, strict=True):
        assert tokenizer.decode(source, skip_special_tokens=True) == ' '.join(spelling)
        assert tokenizer.decode(target, skip_special_tokens=True) == pronunciation
    # Room for the longest pronunciation: 28 phonemes, most of them a mark with a letter or two, and the end.
    assert 28 * 2 < model_of(task).max_new_tokens <= 28 * 3 + 1


def test_dropout_is_replaced_when_written_and_ignored_sizes_are_named(folder, caplog):
    task = build(
        ModelConfig(pretrained=str(folder), dropout_rate=0.5, d_model=64),
        DataConfig(max_words=16, global_batch_size=16),
    )
    assert model_of(task).config.dropout_rate == 0.5
    assert model_of(task).config.d_model == 24
    assert 'model.d_model not used' in caplog.text


def test_without_network_it_fails_fast_and_tells_what_to_do(monkeypatch):
    # No such host, whatever network the machine has: nothing listens on the discard port.
    monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT', 'http://127.0.0.1:9')
    start = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        build(ModelConfig(pretrained='no-such-owner/no-such-model'), DataConfig())
    assert time.monotonic() - start < 15  # transformers alone would retry for 23 s
    for part in ('no-such-owner/no-such-model', 'hf download', 'model.pretrained=FOLDER', 'random weights'):
        assert part in str(raised.value)


@pytest.mark.parametrize('content', ['nothing', 'another model'])
def test_a_folder_without_mt5_is_refused(tmp_path, content):
    if content == 'another model':
        BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match='a folder from which MT5ForConditionalGeneration and its tokenizer'):
        build(ModelConfig(pretrained=str(tmp_path)), DataConfig())
