"""What ConsolidatedWeightsSaver exports is read by those for whom it is: safetensors, transformers and peft."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model

from composer_ds.callbacks import ConsolidatedWeightsSaver
from composer_ds.errors import ConfigError
from tests.distributed import consolidated_weights_cases as cases
from tests.distributed import contents_cases
from tests.distributed.parity_cases import Tied

STRATEGIES = ['zero1-cpu', 'zero2', 'zero3-cut', 'zero3-cut-cpu-params']


def _slow(*values: Any) -> list[Any]:
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


def _read(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / 'model.safetensors').exists():
        return load_file(folder / 'model.safetensors')
    index = json.loads((folder / 'model.safetensors.index.json').read_text())
    return {name: load_file(folder / file)[name] for name, file in index['weight_map'].items()}


@pytest.mark.parametrize('strategy', [None, *STRATEGIES])
def test_every_tensor(two_ranks, tmp_path, strategy: str | None):
    two_ranks.run(cases.export_numbers, strategy, str(tmp_path))
    model = contents_cases.bare_model('everything')
    numbers = contents_cases.weights_to_write(model)
    buffers = dict(model.named_buffers())
    tied = numbers.pop('head.weight')
    for name, dtype in (('fp32', torch.float32), ('several', torch.float32), ('bf16', torch.bfloat16),
                        ('fp16', torch.float16)):  # fmt: skip
        found = _read(tmp_path / name)
        assert found.keys() == numbers.keys() and 'not_kept' not in found
        for key, value in numbers.items():
            expected = value if key in buffers else value.to(dtype)
            assert found[key].dtype == expected.dtype and torch.equal(found[key], expected), (name, key)
    assert sorted(os.listdir(tmp_path)) == ['bf16', 'fp16', 'fp32', 'several']
    assert os.listdir(tmp_path / 'fp32') == ['model.safetensors'] and len(os.listdir(tmp_path / 'several')) > 3
    # And into a model: tied again, with the buffers, all names accounted for.
    load_model(model, tmp_path / 'fp32' / 'model.safetensors')
    assert torch.equal(model.state_dict()['head.weight'], tied)
    assert all(torch.equal(value, {**numbers, 'head.weight': tied}[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize('strategy', ['zero1', 'zero2-cpu', 'zero3-cut'])
def test_master_weights_of_bf16_training(two_ranks, tmp_path, strategy: str):
    expected = two_ranks.run(cases.masters, strategy, str(tmp_path))[0]
    found = _read(tmp_path / 'newest')
    assert found.keys() == expected.keys() and len(found) == 8
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert not torch.equal(value, value.bfloat16().float()), 'working weights would do as well'


def test_against_plain_composer(ranks, tmp_path):
    for world_size, strategies in ((1, [None, 'zero3-cut']), (2, [None, 'zero2', 'zero3-cut'])):
        exports = []
        for strategy in strategies:
            folder = tmp_path / f'{world_size}-{strategy}'
            found = ranks(world_size).run(cases.trained, strategy, f'{folder}/{{run_name}}', interval='4ba')
            assert sorted(os.listdir(folder / 'run')) == ['ep1-ba4', 'ep1-ba6']
            for rank in found:
                assert rank['saved'] == [f'{folder}/run/{name}' for name in ('ep1-ba4', 'ep1-ba6')]
            assert [len(rank['lines']) for rank in found] == [2, 0][:world_size]
            assert f'in fp32, {folder}/run/ep1-ba6 (batch 6): {4 * (88 + 64 + 8)} bytes in ' in found[0]['lines'][1]
            exports.append(_read(folder / 'run' / 'ep1-ba6'))
            for name, value in exports[-1].items():
                assert torch.equal(value, found[0]['weights'][name])
                assert (value - found[0]['before'][name]).abs().max() > 0.01, 'not trained'
                torch.testing.assert_close(value, exports[0][name], rtol=0, atol=1e-6)
            assert exports[-1].keys() == {'embedding.weight', 'middle.weight', 'middle.bias'}


@pytest.mark.parametrize('strategy', [*_slow(None, 'zero2'), 'zero3-cut'])
def test_a_hugging_face_model(two_ranks, tmp_path, strategy: str | None):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    live = two_ranks.run(cases.huggingface, 'gpt2', strategy, str(tmp_path))[0]
    assert len(list((tmp_path / 'bf16').glob('*.safetensors'))) > 2
    auto: Any = AutoModelForCausalLM
    model, info = auto.from_pretrained(tmp_path / 'fp32', output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32 and model.lm_head.weight is model.transformer.wte.weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, live[name]), name
    torch.testing.assert_close(model.eval()(input_ids=cases.TOKENS).logits, live['logits'], rtol=0, atol=1e-5)
    half, info = auto.from_pretrained(tmp_path / 'bf16', output_loading_info=True)
    assert not any(info.values()), info
    assert half.dtype == torch.bfloat16
    for name, value in half.state_dict().items():
        assert torch.equal(value, live[name].bfloat16()), name
    for folder, dtype in (('fp32', 'float32'), ('bf16', 'bfloat16')):
        config = json.loads((tmp_path / folder / 'config.json').read_text())
        assert config['dtype'] == dtype and config['architectures'] == ['GPT2LMHeadModel']
        assert AutoTokenizer.from_pretrained(tmp_path / folder)('w5 w9')['input_ids'] == [5, 9]
        assert GenerationConfig.from_pretrained(tmp_path / folder).max_new_tokens == 3
    assert 'lm_head.weight' not in load_file(tmp_path / 'fp32' / 'model.safetensors')


@pytest.mark.parametrize(('kind', 'strategy'), [*_slow(('lora', None), ('lora', 'zero2')), ('lora only', 'zero3-cut')])
def test_an_adapter(two_ranks, tmp_path, kind: str, strategy: str | None):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    live = two_ranks.run(cases.huggingface, kind, strategy, str(tmp_path))[0]
    assert set(os.listdir(tmp_path / 'fp32')) >= {'adapter_model.safetensors', 'adapter_config.json', 'tokenizer.json'}
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / 'base'), tmp_path / 'fp32')
    torch.testing.assert_close(model.eval()(input_ids=cases.TOKENS).logits, live['logits'], rtol=0, atol=1e-5)
    assert (model.get_base_model()(input_ids=cases.TOKENS).logits - live['logits']).abs().max() < 1e-5
    with model.disable_adapter():
        assert (model(input_ids=cases.TOKENS).logits - live['logits']).abs().max() > 0.1
    # peft's own export of the same adapter has the same files and names.
    model.save_pretrained(tmp_path / 'theirs')
    ours, theirs = (load_file(tmp_path / one / 'adapter_model.safetensors') for one in ('fp32', 'theirs'))
    assert ours.keys() == theirs.keys() and len(ours) == 6
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    configs = [json.loads((tmp_path / one / 'adapter_config.json').read_text()) for one in ('fp32', 'theirs')]
    different = {name for name, value in configs[1].items() if value != configs[0].get(name)}
    assert (
        different <= {'base_model_name_or_path', 'target_modules', 'init_lora_weights'} and configs[0]['auto_mapping']
    )


@pytest.mark.parametrize('strategy', [None, 'zero3-cut'])
def test_a_full_disk(two_ranks, tmp_path, strategy: str | None):
    messages = two_ranks.run(cases.full_disk, strategy, str(tmp_path / 'weights'))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f'The weights {tmp_path}/weights/ba2 were not saved: File too large (EFBIG)')
    assert 'Older exports are intact.' in messages[0]
    first, second = (_read(tmp_path / 'weights' / name) for name in ('ba1', 'ba2'))
    assert first.keys() == second.keys() and not torch.equal(first['middle.weight'], second['middle.weight'])


def test_errors_on_every_rank(two_ranks, tmp_path):
    first, second = two_ranks.run(cases.errors, 'zero3-cut', str(tmp_path))
    assert first == second
    below_file, is_file, too_large, twice = first
    assert 'Not a directory (ENOTDIR)' in below_file
    assert 'something of this name' in is_file
    assert 'embedding.weight has elements that fp16 cannot hold' in too_large and "dtype='bf16'" in too_large
    assert 'overwrite=False (EEXIST)' in twice
    assert sorted(os.listdir(tmp_path)) == ['file', 'once']


def test_what_remains(two_ranks, tmp_path):
    first, second = two_ranks.run(cases.resumed, 'zero2', str(tmp_path))[0]
    assert first == ['ep0-ba2', 'ep0-ba3'] and second == ['ep1-ba5', 'ep1-ba6']
    fixed = tmp_path / 'fixed'
    (fixed / '.incomplete-newest').mkdir(parents=True)
    (fixed / 'of another').mkdir()
    found = two_ranks.run(cases.trained, 'zero3-cut', str(fixed), interval='1ba', filename='newest', num_to_keep=1)[0]
    assert sorted(os.listdir(fixed)) == ['newest', 'of another'] and found['saved'] == [str(fixed / 'newest')]
    assert torch.equal(_read(fixed / 'newest')['middle.bias'], found['weights']['middle.bias'])


def test_what_is_no_tensor_is_left_out(two_ranks, tmp_path):
    two_ranks.run(cases.extra_state, 'zero3-cut', str(tmp_path))
    load_model(Tied(), tmp_path / 'all' / 'model.safetensors')


def test_arguments():
    with pytest.raises(ConfigError) as raised:
        ConsolidatedWeightsSaver(
            's3://b/c', '1x', dtype='int8', max_shard_size='5 apples', filename='a/{rank}', num_to_keep=0
        )
    assert len(raised.value.problems) == 5
    for name, problem in zip(
        ('dtype', 'max_shard_size', 'filename', 'num_to_keep', 'interval'), raised.value.problems, strict=True
    ):
        assert problem.startswith(f'ConsolidatedWeightsSaver({name}=')
    with pytest.raises(ConfigError, match='nothing is removed from'):
        ConsolidatedWeightsSaver('s3://b/c', num_to_keep=3)
    state: Any = SimpleNamespace(fsdp_enabled=True)
    logger: Any = None
    with pytest.raises(ConfigError, match='FSDP'):
        ConsolidatedWeightsSaver().fit_start(state, logger)


@pytest.mark.slow
def test_object_stores(two_ranks, tmp_path, s3: str, s3_client):
    errors = two_ranks.run(cases.to_object_store, 'zero3-cut', 's3://bucket/weights', s3)
    assert errors[0] == errors[1]
    assert 'of another export' in errors[0][0] and 'and overwrite=False' in errors[0][1]
    names = {one['Key'] for one in s3_client.list_objects_v2(Bucket='bucket')['Contents']}
    assert len(names) == 3 and all(name.startswith('weights/ba1/model') for name in names)
    for name in names:
        s3_client.download_file('bucket', name, str(tmp_path / Path(name).name))
    assert _read(tmp_path).keys() == {'embedding.weight', 'middle.weight', 'middle.bias'}
