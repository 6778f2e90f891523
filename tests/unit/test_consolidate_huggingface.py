"""What `composer-ds consolidate` writes is loaded by transformers, PEFT and Composer's Trainer."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from composer_ds.checkpoint.composer_file import ComposerFileSource
from composer_ds.consolidate.command import consolidate
from composer_ds.consolidate.huggingface import HuggingFaceFiles
from composer_ds.errors import CheckpointError
from tests.unit.checkpoint_files import Model, write_composer_file, write_sharded


def _language_model(seed: int) -> HuggingFaceModel:
    words = Tokenizer(models.WordLevel({'one': 0, 'two': 1, 'three': 2, '?': 3}, unk_token='?'))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token='?', pad_token='?')
    torch.manual_seed(seed)
    # As every model says that was once loaded with from_pretrained.
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=4, n_positions=6, dtype='float32')
    return HuggingFaceModel(GPT2LMHeadModel(config), tokenizer=tokenizer, use_logits=True)


def _contents(model: HuggingFaceModel) -> Model:
    """What a checkpoint of this model holds; its tied weights once."""
    tensors, tied, first = {}, {}, {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in first:
            tied[name] = first[tensor.data_ptr()]
        else:
            first[tensor.data_ptr()] = name
            tensors[name] = tensor.detach().clone()
    return Model(tensors, dict.fromkeys(tensors, 'trained'), {}, tied)


@pytest.mark.parametrize('form', ['sharded', 'composer'])
@pytest.mark.parametrize('dtype', [None, 'bf16'])
def test_from_pretrained(tmp_path, form, dtype):
    model = _language_model(seed=3)
    write = write_sharded if form == 'sharded' else write_composer_file
    path = write(tmp_path / 'run' / 'ba4.pt', _contents(model), integrations={'huggingface': model.get_metadata()})
    written = consolidate(path, tmp_path / 'out', dtype=dtype)
    assert written.weights.tied == {'lm_head.weight': 'transformer.wte.weight'} and written.remarks == []
    model_class: Any = AutoModelForCausalLM
    loaded, info = model_class.from_pretrained(tmp_path / 'out', output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    expected = model.model.state_dict()
    assert set(loaded.state_dict()) == set(expected) and len(expected) > 10
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == (torch.bfloat16 if dtype else torch.float32)
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / 'out')
    assert tokenizer('three one two')['input_ids'] == [2, 0, 1] and tokenizer.pad_token == '?'
    # As the tokenizer saves itself.
    assert model.tokenizer is not None
    model.tokenizer.save_pretrained(tmp_path / 'tokenizer')
    for name in os.listdir(tmp_path / 'tokenizer'):
        written_file, original = (tmp_path / folder / name for folder in ('out', 'tokenizer'))
        assert json.loads(written_file.read_text()) == json.loads(original.read_text())


@pytest.mark.parametrize('form', ['sharded', 'composer'])
def test_a_trainer_loads_the_pt_file(tmp_path, form):
    model = _language_model(seed=3)
    write = write_sharded if form == 'sharded' else write_composer_file
    path = write(tmp_path / 'run' / 'ba4.pt', _contents(model), integrations={'huggingface': model.get_metadata()})
    consolidate(path, tmp_path / 'out.pt')
    other = _language_model(seed=4)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    trainer = Trainer(model=other, load_path=str(tmp_path / 'out.pt'), load_weights_only=True, device='cpu')
    trainer.close()
    expected = model.state_dict()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert any(not torch.equal(before[name], expected[name]) for name in expected)
    # It is a checkpoint that can be consolidated again.
    assert ComposerFileSource(tmp_path / 'out.pt').integrations.keys() == {'huggingface'}
    consolidate(tmp_path / 'out.pt', tmp_path / 'out')
    assert sorted(load_file(tmp_path / 'out' / 'model.safetensors')) == sorted(
        name.removeprefix('model.') for name in _contents(model).tensors
    )


@pytest.mark.parametrize('saves_adapter_only', [True, False])
def test_an_adapter_in_pefts_own_layout(tmp_path, saves_adapter_only):
    peft = pytest.importorskip('peft')
    torch.manual_seed(3)
    base = _language_model(seed=3).model
    base.save_pretrained(tmp_path / 'base')
    adapted = peft.get_peft_model(
        GPT2LMHeadModel.from_pretrained(tmp_path / 'base'),
        peft.LoraConfig(r=2, target_modules=['c_attn'], task_type='CAUSAL_LM', fan_in_fan_out=True),
    )
    for name, parameter in adapted.named_parameters():
        if 'lora_' in name:
            torch.nn.init.normal_(parameter)
    tokenizer = _language_model(seed=3).tokenizer
    model = HuggingFaceModel(adapted, tokenizer=tokenizer, should_save_peft_only=saves_adapter_only)
    assert ('model.base_model.model.transformer.wte.weight' in model.state_dict()) != saves_adapter_only
    path = write_composer_file(
        tmp_path / 'ba4.pt', _contents(model), integrations={'huggingface': model.get_metadata()}
    )
    written = consolidate(path, tmp_path / 'out')
    assert 'adapter alone' in written.remarks[0]
    assert {'adapter_config.json', 'adapter_model.safetensors'} <= set(os.listdir(tmp_path / 'out'))
    assert 'config.json' not in os.listdir(tmp_path / 'out')
    # What PEFT itself writes.
    adapted.save_pretrained(tmp_path / 'peft')
    expected = load_file(tmp_path / 'peft' / 'adapter_model.safetensors')
    found = load_file(tmp_path / 'out' / 'adapter_model.safetensors')
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    loaded = peft.PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(tmp_path / 'base'), tmp_path / 'out')
    tokens = torch.tensor([[0, 1, 2]])
    assert torch.equal(loaded(tokens).logits, adapted.eval()(tokens).logits)


def test_files_of_a_tokenizer_stay_in_their_folder(tmp_path):
    content = {'tokenizer': {'../evil.json': {'file_extension': '.json', 'content': {}}}}
    with pytest.raises(CheckpointError, match=r"'\.\./evil\.json'; only a plain name is allowed"):
        HuggingFaceFiles(content).write(tmp_path, None)
