"""What `composer-ds consolidate` writes is what was in the engine that saved, and what DeepSpeed's own tool reads."""

from __future__ import annotations

import pathlib

import pytest
import torch
from safetensors.torch import load_file

from composer_ds.checkpoint.sources import open_source
from composer_ds.consolidate import command
from composer_ds.consolidate.command import consolidate
from composer_ds.inspect.findings import list_folder, look
from tests.distributed import consolidate_cases, deepspeed_format_cases


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Tensors are read in several runs each."""
    monkeypatch.setattr(command, '_RUN_BYTES', 64)


def written(checkpoint: pathlib.Path, folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Consolidate to both kinds of files, which must agree; every name of a tied tensor."""
    weights = consolidate(checkpoint, folder / 'out').weights
    consolidate(checkpoint, folder / 'out.pt')
    found = torch.load(folder / 'out.pt')['state']['model']
    once = load_file(folder / 'out' / 'model.safetensors')
    assert set(once) == {weight.name for weight in weights.tensors}
    assert all(torch.equal(tensor, found[name]) for name, tensor in once.items())
    assert set(found) == {*once, *weights.tied}
    return found


@pytest.mark.parametrize('strategy', ['zero1', 'zero2-cpu', 'zero3-cut'])
def test_checkpoints_of_a_trainer(two_ranks, tmp_path, strategy):
    live = two_ranks.run(consolidate_cases.save, str(tmp_path), strategy)[0]
    assert not torch.equal(live['weights']['inner.weight'], live['before']['inner.weight'])
    assert not torch.equal(live['weights']['norm.running_mean'], live['before']['norm.running_mean'])
    sharded = tmp_path / 'sharded'
    for checkpoint, folder in ((sharded, tmp_path / 'a'), (tmp_path / 'composer.pt', tmp_path / 'b')):
        folder.mkdir()
        found = written(checkpoint, folder)
        assert set(found) == set(live['weights'])
        for name, tensor in live['weights'].items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        source = open_source(checkpoint)
        assert source.tied == {'head.weight': 'embedding.weight'}
        state = {name: stored.state for name, stored in source.tensors.items() if stored.state}
        assert {'inner.weight', 'norm.bias', 'embedding.weight'} <= set(state) and 'frozen.weight' not in state
        for name, keys in state.items():
            for key in keys:
                run = source.read(name, 0, source.tensors[name].shape.numel(), key)
                assert torch.equal(run, live['state'][name][key].reshape(-1)), (name, key)
    findings = look(sharded)
    assert findings.is_good and findings.source.damaged() == []
    facts = findings.source.facts
    assert facts['run'] == 'to-consolidate' and facts['batch'] == 2 and facts['world size'] == 2
    assert facts['ZeRO stage'] == int(strategy[4]) and facts['optimizer steps']['applied'] == 2
    kinds = {name: stored.kind for name, stored in findings.source.tensors.items()}
    assert kinds['frozen.bias'] == 'frozen' and kinds['count'] == 'buffer' and kinds['inner.bias'] == 'trained'
    assert [(one.is_latest, one.problem) for one in list_folder(sharded)] == [(True, '')]


@pytest.mark.parametrize('config', ['zero1', 'zero2', 'zero3-cut-bf16'])
def test_checkpoints_of_deepspeed(two_ranks, tmp_path, config):
    live = two_ranks.run(deepspeed_format_cases.save, str(tmp_path / 'run'), config, 'adamw')[0]
    found = written(tmp_path / 'run', tmp_path)
    for name, tensor in live['weights'].items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert set(found) == {*live['weights'], *live['tied']}
    assert len(live['zero_to_fp32']) > 5
    for name, tensor in live['zero_to_fp32'].items():
        assert torch.equal(found[name].float(), tensor.float()), name
    assert [(one.is_latest, one.problem) for one in list_folder(tmp_path / 'run')] == [(True, '')]
