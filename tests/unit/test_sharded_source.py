"""Reading sharded checkpoints: against DCP's own reader, and against what was written."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from composer_ds.errors import CheckpointError
from composer_ds.sharded.manifest import LATEST, MANIFEST, state_key, weights_key
from composer_ds.sharded.source import ShardedSource
from tests.unit.checkpoint_files import small_model, write_sharded


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """A checkpoint of 3 ranks that nobody changes."""
    return write_sharded(tmp_path_factory.mktemp('sharded') / 'ba4', small_model())


@pytest.fixture
def copy(tmp_path) -> Path:
    """One to be damaged."""
    return write_sharded(tmp_path / 'run' / 'ba4', small_model())


def test_every_tensor_is_read_whole(written):
    model, source = small_model(), ShardedSource(written)
    assert list(source.tensors) == list(model.tensors) and source.tied == model.tied
    for name, tensor in model.tensors.items():
        stored = source.tensors[name]
        assert (stored.shape, stored.dtype, stored.kind) == (tensor.shape, tensor.dtype, model.kinds[name])
        assert torch.equal(source.read(name, 0, tensor.numel()).view(tensor.shape), tensor)
        for key, value in model.state.get(name, {}).items():
            assert stored.state[key] == torch.float32
            assert torch.equal(source.read(name, 0, value.numel(), key).view(value.shape), value)
    assert source.missing() == [] and source.damaged() == []


def test_every_run_of_a_tensor_is_read(written):
    source, whole = ShardedSource(written), small_model().tensors['layer.weight'].reshape(-1)
    runs = [(start, numel) for start in range(36) for numel in range(36 - start)]
    for start, numel in runs:
        assert torch.equal(source.read('layer.weight', start, numel), whole[start : start + numel])
    with pytest.raises(CheckpointError, match=r'elements 35 and up of weights/layer\.weight are not stored'):
        source.read('layer.weight', 30, 6)


def test_dcps_own_reader_agrees(written):
    model, source = small_model(), ShardedSource(written)
    keys = {weights_key(name): (name, None) for name in model.tensors if model.tensors[name].numel()}
    keys |= {state_key(name, key): (name, key) for name in model.state for key in model.state[name]}
    keys = {key: place for key, place in keys.items() if model.tensors[place[0]].numel()}
    expected = {}
    for key, (name, part) in keys.items():
        tensor = source.tensors[name]
        expected[key] = torch.zeros(tensor.shape.numel(), dtype=tensor.dtype if part is None else tensor.state[part])
    load(
        expected,
        storage_reader=FileSystemReader(written),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    for key, (name, part) in keys.items():
        assert torch.equal(source.read(name, 0, expected[key].numel(), part), expected[key]), key


def test_the_folder_around_it_leads_to_the_latest(copy):
    newer = write_sharded(copy.parent / 'ba8', small_model(), batch=8)
    assert ShardedSource(copy.parent).path == newer
    (copy.parent / LATEST).write_text('ba12\n')
    with pytest.raises(CheckpointError, match=r"latest names 'ba12', which is not there"):
        ShardedSource(copy.parent)


def test_facts(written):
    facts = ShardedSource(written).facts
    assert facts['run'] == 'a-run' and facts['batch'] == 4 and facts['ZeRO stage'] == 2 and facts['world size'] == 3
    assert facts['optimizer steps'] == {'applied': 3, 'skipped': 1} and facts['offload'] == {'optimizer': 'cpu'}


def test_what_is_missing_is_named(copy):
    shards = sorted(copy.glob('*.distcp'))
    shards[0].unlink()
    with open(shards[1], 'r+b') as file:
        file.truncate(100)
    source = ShardedSource(copy)
    missing, shorter = source.missing()
    assert missing.startswith(f'{shards[0].name} is missing') and re.match(
        rf'{shards[1].name} has 100 bytes instead of \d', shorter
    )
    (copy / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match='not a complete sharded checkpoint'):
        ShardedSource(copy)


def _shard_of(folder: Path, tensor: torch.Tensor) -> tuple[Path, int]:
    """Where the bytes of a tensor that one rank holds are: they occur once in all files."""
    data = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    places = [(path, path.read_bytes().find(data)) for path in folder.glob('*.distcp')]
    found = [(path, place) for path, place in places if place >= 0]
    assert len(found) == 1
    return found[0]


def test_a_flipped_bit_is_found_and_stops_a_reader(copy):
    model = small_model()
    first_run = model.tensors['layer.weight'].reshape(-1)[:8]
    path, place = _shard_of(copy, first_run)
    content = bytearray(path.read_bytes())
    content[place + 5] ^= 4
    path.write_bytes(content)
    source = ShardedSource(copy)
    assert source.missing() == [] and source.damaged() == [f'{path.name} does not match its checksum']
    with pytest.raises(CheckpointError, match=f'{path.name} is damaged: a tensor in it does not match its checksum'):
        source.read('layer.weight', 0, 35)
    # Also when it is read in runs, at the end of the record.
    source = ShardedSource(copy)
    with pytest.raises(CheckpointError, match='does not match its checksum'):
        [source.read('layer.weight', start, 1) for start in range(35)]
    assert torch.equal(source.read('embed.weight', 0, 33), model.tensors['embed.weight'].reshape(-1))


def test_damaged_metadata_is_refused(copy):
    content = bytearray((copy / '.metadata').read_bytes())
    content[len(content) // 2] ^= 1
    (copy / '.metadata').write_bytes(content)
    source = ShardedSource(copy)
    assert source.damaged() == ['.metadata does not match its checksum']
    with pytest.raises(CheckpointError, match=r'\.metadata does not match its checksum'):
        source.read('layer.weight', 0, 1)


def test_no_code_is_run_from_the_metadata(tmp_path):
    from composer_ds.sharded.dcp_metadata import read_metadata

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / 'was-here',))

    (tmp_path / '.metadata').write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match='which no such file does'):
        read_metadata(tmp_path)
    assert not (tmp_path / 'was-here').exists()
    pickle.loads((tmp_path / '.metadata').read_bytes())
    assert (tmp_path / 'was-here').exists()
