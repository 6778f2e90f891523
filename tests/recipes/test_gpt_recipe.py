"""The language model recipe: packing mixes nothing, and ZeRO 3 trains as plain Composer does on one rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import ByT5Tokenizer

from composer_ds.check.run_file import check_run_file
from composer_ds.errors import ConfigError
from recipes.gpt import DataConfig, ModelConfig, build
from recipes.packed_text import IGNORED_LABEL, collate, count_tokens, pack, read_paragraphs, split_paragraphs
from tests.recipes.recipes_on_ranks import TINY_GPT, train_gpt

YAMLS = Path(__file__).parents[2] / 'yamls'


class TestPacking:
    def test_every_token_is_packed_once_and_little_is_left_free(self):
        paragraphs = [list(range(length)) for length in (7, 3, 25, 1, 9, 2, 10, 10, 4)]
        packed = pack(paragraphs, 10)
        assert all(0 < sum(map(len, sequence)) <= 10 for sequence in packed)
        # 25 is cut in 10, 10 and 5; the sum is 71, so that 8 sequences are the least there can be.
        expected = [*paragraphs[:2], *paragraphs[3:], list(range(10)), list(range(10, 20)), list(range(20, 25))]
        assert Counter(tuple(piece) for sequence in packed for piece in sequence) == Counter(map(tuple, expected))
        assert len(packed) == 8

    def test_a_batch_says_where_paragraphs_start_and_has_no_label_across_them(self):
        batch = collate([[[11, 12, 13], [21, 22]]], sequence_length=7, pad=0)
        assert batch['input_ids'].tolist() == [[11, 12, 13, 21, 22, 0, 0]]
        assert batch['position_ids'].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
        assert batch['labels'].tolist() == [[-100, 12, 13, -100, 22, -100, -100]]
        assert count_tokens(batch) == {'total': 7, 'loss_generating': 3}

    def test_the_loss_is_that_of_each_paragraph_alone(self):
        # What a paragraph says about the next one, or a wrong mask of transformers, would change it.
        model: Any = build(ModelConfig(**TINY_GPT), DataConfig(max_paragraphs=50)).model.eval()
        generator = torch.Generator().manual_seed(0)
        paragraphs = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in (9, 5, 14)]
        packed = model(collate([paragraphs], sequence_length=32, pad=0))['loss']
        losses = []
        for paragraph in paragraphs:
            tokens = torch.tensor([paragraph])
            losses.append(cross_entropy(model.model(tokens).logits[0, :-1], tokens[0, 1:], reduction='none'))
        torch.testing.assert_close(packed, torch.cat(losses).mean())

    def test_the_text_is_there_to_the_byte(self):
        task = build(ModelConfig(**TINY_GPT), DataConfig(max_paragraphs=40, sequence_length=4096))
        trained, _ = split_paragraphs(read_paragraphs(None)[:40], seed=17, validation_fraction=0.05)
        loader = task.train_dataloader.dataloader
        pieces = [piece for sequence in loader.dataset for piece in sequence]  # pyright: ignore
        tokenizer = ByT5Tokenizer(extra_ids=0)
        assert sorted(pieces) == sorted([tokenizer.eos_token_id, *tokenizer(text)['input_ids']] for text in trained)

    def test_splits_do_not_overlap(self):
        train, validation = split_paragraphs(['a', 'b', 'a', 'c', 'd'], seed=1, validation_fraction=0.25)
        assert sorted(train + validation) == ['a', 'b', 'c', 'd'] and len(validation) == 1


class TestText:
    def test_a_file_is_parted_at_blank_lines(self, tmp_path):
        path = tmp_path / 'text.txt'
        path.write_text('Grüße\nzwei\n\n\n\n  drei\n', encoding='utf-8')
        assert read_paragraphs(str(path)) == ['Grüße\nzwei', '  drei']

    def test_what_cannot_be_read_is_refused(self, tmp_path):
        (tmp_path / 'latin').write_bytes(b'\xe9')
        for name in ('latin', 'missing'):
            with pytest.raises(ConfigError, match=f'{name}.*no text file in UTF-8'):
                build(ModelConfig(), DataConfig(path=str(tmp_path / name)))

    def test_heads_of_an_odd_width_are_refused(self):
        with pytest.raises(ConfigError, match='divides by twice the number of heads'):
            build(ModelConfig(d_model=12, num_heads=4), DataConfig(max_paragraphs=50))


@pytest.fixture(scope='module')
def alone() -> dict:
    """Plain Composer in this process with whole batches, so that nothing has to be weighted: the oracle."""
    return train_gpt(None)


@pytest.mark.parametrize('partitioned_init', [False, True])
def test_two_ranks_with_microbatches_train_as_one_without(two_ranks, alone, partitioned_init):
    results = two_ranks.run(train_gpt, 3, partitioned_init=partitioned_init, device_train_microbatch_size=4)
    start = build(ModelConfig(**TINY_GPT), DataConfig(max_paragraphs=50)).model.state_dict()
    for result in results:
        inside, outside = result['elements inside, outside']
        assert (outside < inside / 10) == partitioned_init
        assert result['group sizes'] == alone['group sizes'] == [2 + 7 * 2, 5]  # the shapes were seen
        for name, tensor in alone['weights'].items():
            assert not torch.equal(result['weights'][name], start[name]), f'{name} did not move'
            torch.testing.assert_close(result['weights'][name], tensor, atol=1e-5, rtol=1e-4, msg=name)
        assert result['metrics'] == pytest.approx(alone['metrics'], rel=1e-4)


def test_perplexity_is_that_of_the_validation_text(alone):
    task = build(ModelConfig(**TINY_GPT), DataConfig(sequence_length=64, max_paragraphs=150))
    model: Any = task.model
    model.load_state_dict(alone['weights'])
    validation = list(task.eval_dataloader[0].dataloader.dataloader.dataset)  # pyright: ignore
    losses = []
    for sequence in validation:
        for paragraph in sequence:
            tokens = torch.tensor([paragraph])
            with torch.no_grad():
                losses.append(cross_entropy(model.model(tokens).logits[0, :-1], tokens[0, 1:], reduction='none'))
    assert alone['metrics']['LanguagePerplexity'] == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)


def test_the_large_model_is_checked_without_its_memory():
    findings = check_run_file(str(YAMLS / 'gpt_7b_zero3_offload.yaml'), [], 8, lambda text: None)
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    parameters = 2 * 32000 * 4096 + 32 * layer + 4096
    assert f'{parameters:,} trained parameters' in findings.model
    assert 'AdamW with 2 parameter groups' in findings.model
    assert findings.batch == 'microbatch 1 x accumulation 8 x world size 8 = global batch 64'


def test_labels_are_ignored_where_the_models_of_transformers_ignore_them():
    assert cross_entropy(torch.zeros(2, 3), torch.tensor([1, IGNORED_LABEL])) == pytest.approx(1.0986, abs=1e-4)
