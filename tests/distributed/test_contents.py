"""What is in a consolidated checkpoint, read by a process that can import neither deepspeed nor composer_ds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed import contents_cases
from tests.distributed.parity_cases import SOME_STRATEGIES, STRATEGIES

READER = """
import pathlib, sys

sys.modules['deepspeed'] = sys.modules['composer_ds'] = None
import torch
from composer import Trainer

from tests.distributed.contents_cases import _loader, bare_model, numbers, optimizer_of, weights_to_write


def equal(name, found, expected):
    assert found.shape == expected.shape and found.dtype == expected.dtype, (name, found, expected)
    assert torch.equal(found, expected), (name, found, expected)


def check(path):
    kind = path.stem.split('@')[0]
    state = torch.load(path, weights_only=False)['state']
    model = bare_model(kind)
    expected = weights_to_write(model)
    model.load_state_dict(state['model'], strict=True)
    assert state['model'].keys() == expected.keys()
    for name, value in model.state_dict().items():
        equal(name, value, expected[name])
    moments = state['optimizers']['AdamW']['state']
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert moments.keys() == trained, moments.keys() ^ trained
    for name, parameter in model.named_parameters():
        if name in trained and name != 'late' and parameter.numel():
            for key in ('exp_avg', 'exp_avg_sq'):
                equal(name, moments[name][key], numbers(name, key, parameter))
    groups = [[names for names in group['params']] for group in state['optimizers']['AdamW']['param_groups']]
    of = {parameter: name for name, parameter in model.named_parameters()}
    assert groups == [[of[p] for p in group['params']] for group in optimizer_of(model).param_groups]
    # Frozen once training had begun: it was not trained, and has no moments but zeros or none at all.
    assert all(not value.any() for key, value in moments.get('late', {}).items())
    return kind, model


for path in sorted(pathlib.Path(sys.argv[1]).glob('*.pt')):
    if path.stem.endswith('-adapters'):
        state = torch.load(path, weights_only=False)['state']
        model = bare_model('lora')
        expected = weights_to_write(model)
        missing, unexpected = model.load_state_dict(state['model'], strict=False)
        adapters = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert not unexpected and state['model'].keys() == adapters and 'optimizers' not in state
        for name in adapters:
            equal(name, model.state_dict()[name], expected[name])
    else:
        kind, _ = check(path)
        model = bare_model(kind)
        trainer = Trainer(
            model=model, optimizers=optimizer_of(model), train_dataloader=_loader(kind), max_duration='2ba',
            load_path=str(path), load_strict_model_weights=True, device='cpu', progress_bar=False,
        )
        trainer.fit()
        trainer.close()
    print('read', path.name)
"""


@pytest.mark.slow
def test_every_tensor_is_read_by_a_process_without_deepspeed(two_ranks, tmp_path):
    for strategy in SOME_STRATEGIES:
        for kind in ('everything', 'lora'):
            two_ranks.run(contents_cases.train_and_write, kind, STRATEGIES[strategy], f'{tmp_path}/{kind}@{strategy}')
    done = subprocess.run(
        [sys.executable, '-c', READER, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('read') == 5 * len(SOME_STRATEGIES)


def test_a_stream_is_what_torch_saves(two_ranks, tmp_path):
    two_ranks.run(contents_cases.streamed_as_torch_saves, str(tmp_path / 'streamed.pt'))


@pytest.mark.parametrize('strategy', ['zero2', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params'])
def test_rank_zero_alone_gathers_what_it_writes(two_ranks, tmp_path, strategy: str):
    first, second = two_ranks.run(contents_cases.what_each_rank_holds, STRATEGIES[strategy], str(tmp_path))
    (saved, asked), (saved_elsewhere, asked_elsewhere) = first, second
    assert saved.keys() == saved_elsewhere.keys() == asked.keys() and len(saved) > 20
    for name, (device, numel, size_bytes) in saved.items():
        assert device == 'cpu' and size_bytes == 4 * numel
        assert saved_elsewhere[name][1:] == (numel, 4), 'the shape, and one element'
        # Whoever asks for the state beside a save gets it everywhere.
        assert asked[name][1:] == asked_elsewhere[name][1:] == (numel, 4 * numel)
