"""`composer-ds consolidate`: what is written is what the checkpoint holds, or nothing is."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from composer_ds.checkpoint.damage import damage
from composer_ds.consolidate import command
from composer_ds.consolidate.command import consolidate
from composer_ds.errors import CheckpointError, ConfigError
from tests.unit.checkpoint_files import Model, small_model, write_composer_file, write_sharded

ROOT = Path(__file__).parents[2]
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


@pytest.fixture(params=['sharded', 'composer'])
def checkpoint(request, tmp_path) -> Path:
    """A checkpoint of each format."""
    if request.param == 'sharded':
        return write_sharded(tmp_path / 'run' / 'ba4', small_model())
    return write_composer_file(tmp_path / 'run' / 'ba4.pt', small_model())


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Tensors are read in several runs each."""
    monkeypatch.setattr(command, '_RUN_BYTES', 32)


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob('*.safetensors') for name, value in load_file(path).items()}


def _expected(model: Model, dtype: torch.dtype | None, keeps_buffers: bool) -> dict[str, torch.Tensor]:
    expected = {}
    for name, tensor in model.tensors.items():
        kept = not tensor.is_floating_point() or (keeps_buffers and model.kinds[name] == 'buffer')
        expected[name] = tensor if dtype is None or kept else tensor.to(dtype)
    return expected


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize('dtype', [None, 'fp32', 'bf16', 'fp16'])
def test_safetensors_hold_what_the_checkpoint_holds(checkpoint, tmp_path, dtype):
    written = consolidate(checkpoint, tmp_path / 'out', dtype=dtype)
    # A file of Composer does not tell its buffers from frozen parameters.
    expected = _expected(small_model(), dtype and DTYPES[dtype], keeps_buffers=checkpoint.is_dir())
    _assert_same(_read(tmp_path / 'out'), expected)
    assert sorted(os.listdir(tmp_path / 'out')) == ['model.safetensors'] == [path.name for path in written.files]
    assert 'no config.json' in written.remarks[0]


def test_several_shards(checkpoint, tmp_path):
    consolidate(checkpoint, tmp_path / 'out', max_shard_size=200)
    _assert_same(_read(tmp_path / 'out'), small_model().tensors)
    index = json.loads((tmp_path / 'out' / 'model.safetensors.index.json').read_text())
    for name, file in index['weight_map'].items():
        assert name in load_file(tmp_path / 'out' / file)
    assert set(small_model().tensors) <= set(index['weight_map']) and len(set(index['weight_map'].values())) > 1


def test_tied_tensors_are_tied_again(checkpoint, tmp_path):
    consolidate(checkpoint, tmp_path / 'out')

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(11, 3), torch.nn.Linear(3, 11, bias=False)
            self.head.weight = self.embed.weight

    from safetensors.torch import load_model

    model = Tied()
    load_model(model, tmp_path / 'out' / 'model.safetensors', strict=False)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, small_model().tensors['embed.weight'])


@pytest.mark.parametrize('dtype', [None, 'bf16'])
def test_a_pt_file_is_what_torch_would_save(checkpoint, tmp_path, dtype):
    out = tmp_path / 'out.pt'
    consolidate(checkpoint, out, dtype=dtype)
    model = torch.load(out)['state']['model']
    expected = _expected(small_model(), dtype and DTYPES[dtype], keeps_buffers=checkpoint.is_dir())
    _assert_same(model, expected | {'head.weight': expected['embed.weight']})
    assert model['head.weight'].data_ptr() == model['embed.weight'].data_ptr()
    assert damage(str(out)) is None
    content = bytearray(out.read_bytes())
    content[content.find(model['layer.weight'].view(torch.uint8).numpy().tobytes()) + 1] ^= 1
    out.write_bytes(content)
    assert 'does not match its checksum' in str(damage(str(out)))


def test_fp16_does_not_overflow_in_silence(tmp_path):
    model = small_model()
    model.tensors['layer.weight'][4, 6] = 1e5
    with pytest.raises(CheckpointError, match=r'layer\.weight has elements up to 1e\+05.*--dtype bf16'):
        consolidate(write_sharded(tmp_path / 'ba4', model), tmp_path / 'out', dtype='fp16')
    model.tensors['layer.weight'][4, 6] = float('inf')
    consolidate(write_sharded(tmp_path / 'ba5', model), tmp_path / 'out', dtype='fp16')
    assert torch.isinf(_read(tmp_path / 'out')['layer.weight']).sum() == 1


def _flip_a_bit(checkpoint: Path) -> None:
    data = small_model().tensors['layer.weight'].reshape(-1)[:8].numpy().tobytes()
    for path in checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]:
        content = bytearray(path.read_bytes())
        place = content.find(data)
        if place >= 0:
            content[place + 2] ^= 16
            path.write_bytes(content)
            return
    raise AssertionError('not found')


@pytest.mark.parametrize('out', ['out', 'out.pt'])
def test_damage_leaves_nothing(checkpoint, tmp_path, out):
    _flip_a_bit(checkpoint)
    with pytest.raises(CheckpointError, match='does not match its checksum'):
        consolidate(checkpoint, tmp_path / out)
    assert os.listdir(tmp_path) == ['run']


def test_a_missing_shard_is_named_before_anything_is_written(tmp_path):
    folder = write_sharded(tmp_path / 'run' / 'ba4', small_model())
    shard = sorted(folder.glob('*.distcp'))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f'ba4 is not complete: {shard.name} is missing'):
        consolidate(folder, tmp_path / 'out')
    assert os.listdir(tmp_path) == ['run']


@pytest.fixture
def small_disk():
    """No file may become larger than a million bytes."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1][1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
    signal.signal(signal.SIGXFSZ, before[0])


@pytest.mark.parametrize('out', ['out', 'out.pt'])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, small_disk, out):
    monkeypatch.setattr(command, '_RUN_BYTES', 2**16)
    model = small_model()
    model.tensors['layer.weight'] = torch.arange(500_000.0)
    checkpoint = write_composer_file(tmp_path / 'run' / 'ba4.pt', model)
    small_disk()
    with pytest.raises(CheckpointError, match=r'was not written: File too large\. Nothing was left there'):
        consolidate(checkpoint, tmp_path / out)
    assert os.listdir(tmp_path) == ['run']


def test_too_little_room_is_said_at_once(tmp_path, monkeypatch):
    checkpoint = write_composer_file(tmp_path / 'run' / 'ba4.pt', small_model())
    monkeypatch.setattr('shutil.disk_usage', lambda _: type('Usage', (), {'free': 100}))
    with pytest.raises(CheckpointError, match='it needs 400 bytes, and 100 are free there'.replace('400', r'\d+')):
        consolidate(checkpoint, tmp_path / 'out')
    assert os.listdir(tmp_path) == ['run']


@pytest.mark.parametrize('out', ['out', 'out.pt'])
def test_an_interrupt_leaves_nothing_and_the_old_weights(tmp_path, out):
    checkpoint = write_sharded(tmp_path / 'run' / 'ba4', small_model())
    consolidate(checkpoint, tmp_path / out)

    class Interrupt:
        written = 0

        def begin(self, total_bytes):
            pass

        def advance(self, size_bytes):
            self.written += size_bytes
            if self.written > 150:
                signal.raise_signal(signal.SIGINT)

    # Composer, where it was imported before, makes Ctrl-C a SystemExit.
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        consolidate(checkpoint, tmp_path / out, dtype='fp16', overwrite=True, progress=Interrupt())
    assert sorted(os.listdir(tmp_path)) == sorted(['run', out])
    if out == 'out':
        _assert_same(_read(tmp_path / out), small_model().tensors)
    else:
        assert torch.load(tmp_path / out)['state']['model']['layer.weight'].dtype == torch.float32


def test_what_is_there_is_replaced_only_when_asked(tmp_path):
    checkpoint = write_sharded(tmp_path / 'run' / 'ba4', small_model())
    out = tmp_path / 'out'
    consolidate(checkpoint, out, max_shard_size=200)
    (out / 'README.md').write_text('mine')
    with pytest.raises(ConfigError, match='exists; give another name, or --overwrite'):
        consolidate(checkpoint, out)
    consolidate(checkpoint, out, dtype='bf16', overwrite=True)
    assert sorted(os.listdir(out)) == ['README.md', 'model.safetensors']
    assert sorted(os.listdir(tmp_path)) == ['out', 'run']
    assert load_file(out / 'model.safetensors')['layer.weight'].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match='latest is a file; give another name'):
        consolidate(checkpoint, checkpoint.parent / 'latest', overwrite=True)


def test_the_checkpoint_itself_is_never_replaced(checkpoint, tmp_path):
    for out in (checkpoint, checkpoint.parent, checkpoint / 'weights', tmp_path):
        if out == checkpoint / 'weights' and not checkpoint.is_dir():
            continue
        with pytest.raises(ConfigError, match=r'written into the checkpoint'):
            consolidate(checkpoint, out, overwrite=True)
    assert checkpoint.exists()


def test_a_size_that_cannot_be_read(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match='max_shard_size=large: write a size such as 5GB'):
        consolidate(checkpoint, tmp_path / 'out', max_shard_size='large')
    assert os.listdir(tmp_path) == ['run']


@pytest.mark.parametrize('name', ['out.safetensors', 'out.bin'])
def test_other_ends_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r'give a folder'):
        consolidate(tmp_path, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize(('form', 'out'), [('sharded', 'out'), ('sharded', 'out.pt'), ('composer', 'out')])
def test_memory_is_bounded(tmp_path, form, out):
    model = Model(
        {'big': torch.arange(40_000_000.0), 'small': torch.ones(10_000_000)}, {'big': 'trained', 'small': 'trained'}, {}
    )
    write = write_sharded if form == 'sharded' else write_composer_file
    checkpoint = write(tmp_path / 'run' / 'ba4.pt', model)
    code = f"""
        import resource
        from composer_ds.consolidate.command import consolidate
        import torch.distributed.checkpoint
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        consolidate({str(checkpoint)!r}, {str(tmp_path / out)!r})
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    written = tmp_path / out if out == 'out.pt' else tmp_path / out / 'model.safetensors'
    assert written.stat().st_size > 200e6
    assert float(done.stdout.split()[-1]) < 150
