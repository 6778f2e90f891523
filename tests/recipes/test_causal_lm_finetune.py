"""Fine-tuning from a folder, all weights and LoRA: ZeRO 3 as plain Composer; what is exported answers as trained."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from composer_ds.errors import ConfigError
from recipes.causal_lm_finetune import DataConfig, ModelConfig, build
from recipes.prompts import Prompt, PromptCollator, count_tokens, read_prompts
from tests.recipes.recipes_on_ranks import finetune, problems_of_finetune


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
    """What yamls/gpt.yaml would have exported: a causal model with the tokenizer of bytes."""
    path = tmp_path_factory.mktemp('model')
    tokenizer = ByT5Tokenizer(extra_ids=0)
    torch.manual_seed(99)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=1, eos_token_id=1, pad_token_id=0, use_cache=False, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


class TestData:
    def test_only_the_response_and_its_end_are_labels(self):
        tokenizer = ByT5Tokenizer(extra_ids=0)
        prompts = [Prompt('ab', 'xyz'), Prompt('c', '')]
        a, b, c, x, y, z = (ord(letter) + 3 for letter in 'abcxyz')
        batch = PromptCollator(tokenizer, with_responses=True)(prompts)
        assert batch['input_ids'].tolist() == [[a, b, x, y, z, 1], [0, 0, 0, 0, c, 1]]
        assert batch['attention_mask'].tolist() == [[1] * 6, [0, 0, 0, 0, 1, 1]]
        assert batch['labels'].tolist() == [[-100, -100, x, y, z, 1], [-100] * 5 + [1]]
        assert count_tokens(batch) == {'total': 8, 'loss_generating': 5}
        batch = PromptCollator(tokenizer, with_responses=False)(prompts)
        assert batch['input_ids'].tolist() == [[a, b], [0, c]] and batch['responses'] == ['xyz', '']

    def test_json_lines_are_read_and_wrong_ones_are_named(self, tmp_path):
        path = tmp_path / 'data.jsonl'
        path.write_text(json.dumps({'prompt': '2 + 2 = ', 'response': '4'}) + '\n{"prompt": "?"}\n')
        with pytest.raises(ConfigError, match='line 2 is not a JSON object'):
            read_prompts(str(path))
        path.write_text(path.read_text().splitlines()[0])
        assert read_prompts(str(path)) == [('2 + 2 = ', '4')]

    def test_a_folder_without_a_model_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match='a folder from which AutoModelForCausalLM and its tokenizer do not load'):
            build(ModelConfig(pretrained=str(tmp_path)), DataConfig(max_samples=200))


@pytest.mark.parametrize('lora', [pytest.param(False, marks=pytest.mark.slow), True], ids=['all weights', 'LoRA'])
def test_zero_3_trains_answers_and_exports_as_plain_composer(two_ranks, folder, tmp_path, lora):
    if lora:
        pytest.importorskip('peft')
    plain, _ = two_ranks.run(finetune, folder, str(tmp_path / 'plain'), None, lora=lora)
    results = two_ranks.run(finetune, folder, str(tmp_path / 'export'), 3, lora=lora)
    before = LlamaForCausalLM.from_pretrained(folder).state_dict()
    # Under DeepSpeed the state dict of a LoRA model holds the adapter alone, as should_save_peft_only asks.
    trained = {name: tensor for name, tensor in plain['weights'].items() if not lora or 'lora_' in name}
    assert lora <= (trained.keys() == results[0]['weights'].keys())
    for name, tensor in trained.items():
        if not lora:
            assert not torch.equal(tensor, before[name.removeprefix('model.')]), f'{name} did not move'
        torch.testing.assert_close(
            results[0]['weights'][name], tensor, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f'{name}: {text}'
        )
    if lora:
        assert all(tensor.any() for tensor in trained.values())  # the second matrices start from zero
    assert results[0]['metrics'] == results[1]['metrics'] == pytest.approx(plain['metrics'])

    # The answers of both ranks are those of the exported model, which generates them one by one.
    samples = DataConfig(max_samples=220, global_batch_size=8, eval_batch_size=4)
    task = build(ModelConfig(pretrained=folder, max_new_tokens=12), samples)
    validation = list(task.eval_dataloader[0].dataloader.dataloader.dataset)  # pyright: ignore
    assert len(validation) == 11
    expected = answers(tmp_path / 'export', folder, [prompt for prompt, _ in validation], lora)
    assert len(set(expected)) > 2  # there is something to compare
    first, second = (result['predictions'] for result in results)
    interleaved = [answer for pair in zip_longest(first, second) for answer in pair]  # Composer drops the padding
    assert interleaved[:11] == expected


def answers(export: Path, folder: str, prompts: list[str], lora: bool) -> list[str]:
    """What transformers and peft read from the export says, greedily, without padding."""
    network: Any = AutoModelForCausalLM.from_pretrained(folder if lora else export, dtype='float32')
    if lora:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, str(export))
    tokenizer = AutoTokenizer.from_pretrained(export)
    texts = []
    for prompt in prompts:
        tokens = torch.tensor([tokenizer(prompt, add_special_tokens=False)['input_ids']])
        generated = network.eval().generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False
        )
        texts.append(tokenizer.decode(generated[0, tokens.shape[1] :], skip_special_tokens=True))
    return texts


def test_problems_are_the_same_on_every_rank(two_ranks, folder, tmp_path):
    (tmp_path / 'data.jsonl').write_text('nothing\n')
    for pretrained, path in ((str(tmp_path), None), (folder, str(tmp_path / 'data.jsonl'))):
        first, second = two_ranks.run(problems_of_finetune, pretrained, path)
        assert first == second and len(first) == 1
