"""Reading files of Composer and of torch: against ``torch.load``, and against what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from composer_ds.checkpoint.composer_file import ComposerFileSource
from composer_ds.errors import CheckpointError
from tests.unit.checkpoint_files import small_model, write_composer_file


@pytest.fixture
def path(tmp_path) -> Path:
    """A file like Composer's."""
    return write_composer_file(tmp_path / 'ba4.pt', small_model())


def test_every_tensor_is_read(path):
    model, source = small_model(), ComposerFileSource(path)
    assert list(source.tensors) == list(model.tensors) and source.tied == model.tied
    for name, tensor in model.tensors.items():
        stored = source.tensors[name]
        assert (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype)
        assert stored.kind == ('trained' if model.kinds[name] == 'trained' else 'unknown')
        assert torch.equal(source.read(name, 0, tensor.numel()).view(tensor.shape), tensor)
        assert set(stored.state) == set(model.state.get(name, {}))
        for key, value in model.state.get(name, {}).items():
            assert torch.equal(source.read(name, 0, value.numel(), key).view(value.shape), value)
    assert torch.equal(source.read('layer.weight', 9, 11), model.tensors['layer.weight'].reshape(-1)[9:20])
    assert source.missing() == [] and source.damaged() == []
    assert source.facts['run'] == 'a-run' and source.facts['batch'] == 4 and source.facts['world size'] == 2


def test_elements_in_another_order_and_shared_storages(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    images = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = {'base': base, 'rows': base[1:3], 'turned': base.t(), 'images': images}
    torch.save(tensors, tmp_path / 'plain.pt')
    source = ComposerFileSource(tmp_path / 'plain.pt')
    assert list(source.tensors) == list(tensors) and source.tied == {}
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name, 0, tensor.numel()), tensor.reshape(-1)), name
        assert torch.equal(source.read(name, 5, 3), tensor.reshape(-1)[5:8]), name


def test_state_dicts_of_others(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    for content in ({'module.w': weight}, {'state_dict': {'w': weight}, 'epoch': 3}, {'w': weight, 'extra': {'a': 1}}):
        torch.save(content, tmp_path / 'other.pt')
        source = ComposerFileSource(tmp_path / 'other.pt')
        assert list(source.tensors) == ['w'] and torch.equal(source.read('w', 0, 6), weight.reshape(-1))
        assert source.format == 'state dict of torch'
    torch.save([1, 2], tmp_path / 'other.pt')
    with pytest.raises(CheckpointError, match='neither a checkpoint of Composer'):
        ComposerFileSource(tmp_path / 'other.pt')


class Unknown:
    """What a user's callback might leave in a checkpoint."""

    def __init__(self):
        self.number = 7


def test_unknown_classes_need_trust(tmp_path):
    weight = torch.arange(3.0)
    torch.save({'state': {'model': {'w': weight}, 'callbacks': {'Mine': Unknown()}}}, tmp_path / 'mine.pt')
    with pytest.raises(CheckpointError, match=r'mine.pt holds .*test_composer_file\.Unknown\..*--trusted'):
        ComposerFileSource(tmp_path / 'mine.pt')
    assert torch.equal(ComposerFileSource(tmp_path / 'mine.pt', trusted=True).read('w', 0, 3), weight)


def test_damage(path):
    weight = small_model().tensors['layer.weight']
    content = bytearray(path.read_bytes())
    place = content.find(weight.numpy().tobytes())
    content[place + 3] ^= 1
    path.write_bytes(content)
    source = ComposerFileSource(path)
    assert len(source.damaged()) == 1 and 'does not match its checksum' in source.damaged()[0]
    with pytest.raises(CheckpointError, match='does not match its checksum'):
        source.read('layer.weight', 0, weight.numel())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match='truncated'):
        ComposerFileSource(path)
    path.write_bytes(b'')
    with pytest.raises(CheckpointError, match='is empty'):
        ComposerFileSource(path)
