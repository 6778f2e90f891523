"""`composer-ds inspect` and the command line of `consolidate`: what is shown, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from composer_ds.checkpoint.sources import open_source
from composer_ds.cli import app
from composer_ds.errors import CheckpointError
from tests.unit.checkpoint_files import small_model, write_composer_file, write_sharded


@pytest.fixture
def call(monkeypatch):
    """Runs the command."""
    monkeypatch.setenv('COLUMNS', '120')
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two sharded checkpoints, of batches 4 and 8."""
    write_sharded(tmp_path / 'run' / 'ba4', small_model())
    write_sharded(tmp_path / 'run' / 'ba8', small_model(), batch=8)
    return tmp_path / 'run'


def _value(output: str, name: str) -> str:
    """What stands behind a name, on its own line."""
    lines = [line.strip() for line in output.splitlines() if line.strip().startswith(name + '  ')]
    assert len(lines) == 1, output
    return lines[0].removeprefix(name).strip()


def test_a_sharded_checkpoint(call, folder):
    result = call('inspect', folder / 'ba4')
    assert result.exit_code == 0, result.output
    assert _value(result.output, 'format') == 'sharded checkpoint' and _value(result.output, 'run') == 'a-run'
    assert _value(result.output, 'batch') == '4' and _value(result.output, 'ZeRO stage') == '2'
    assert _value(result.output, 'optimizer steps') == 'applied 3, skipped 1'
    assert _value(result.output, 'offload') == 'optimizer cpu'
    assert _value(result.output, 'layer.weight').split('  ')[0] == '5 x 7'
    assert '= head.weight' in result.output
    # 33 + 35 + 1 trained elements, twice in the optimizer; 16 frozen ones of 2 bytes; buffers: 6 and 1 of 8, 3 of 1.
    assert _value(result.output, 'trained').startswith('276 bytes in 4 tensors, 69 elements')
    assert _value(result.output, 'frozen').startswith('32 bytes in 1 tensor, 16 elements')
    assert _value(result.output, 'buffer').startswith('59 bytes in 3 tensors, 10 elements')
    assert _value(result.output, 'weights').startswith('367 bytes in 8 tensors, 95 elements')
    assert _value(result.output, 'optimizer state').startswith('552 bytes in 8 tensors, 138 elements (exp_avg, exp')
    assert 'Complete.' in result.output and 'No damage' in result.output


def test_a_file_of_composer(call, tmp_path):
    path = write_composer_file(tmp_path / 'ba4.pt', small_model())
    result = call('inspect', path, '--no-verify')
    assert result.exit_code == 0 and _value(result.output, 'format') == 'Composer checkpoint'
    assert _value(result.output, 'world size') == '2' and 'checksums were not looked at' in result.output


def test_json(call, folder):
    result = call('inspect', folder / 'ba4', '--json')
    found = json.loads(result.stdout)
    assert found['complete'] and found['verified'] and found['damaged'] == [] and found['facts']['batch'] == 4
    assert found['totals']['optimizer state'] == {'tensors': 8, 'elements': 138, 'size_bytes': 552}
    layer = next(tensor for tensor in found['tensors'] if tensor['name'] == 'layer.weight')
    assert layer == {
        'name': 'layer.weight', 'shape': [5, 7], 'dtype': 'float32', 'kind': 'trained', 'size_bytes': 140,
        'optimizer_state': {'exp_avg': 'float32', 'exp_avg_sq': 'float32'},
    }  # fmt: skip
    assert found['tied'] == {'head.weight': 'embed.weight'}


def test_a_missing_and_a_damaged_shard(call, folder):
    one, other = sorted((folder / 'ba4').glob('*.distcp'))[:2]
    content = bytearray(other.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    result = call('inspect', folder / 'ba4')
    assert result.exit_code == 1 and f'- {other.name} does not match its checksum' in result.output
    assert call('inspect', folder / 'ba4', '--no-verify').exit_code == 0
    one.unlink()
    result = call('inspect', folder / 'ba4')
    assert result.exit_code == 1 and 'Not complete:' in result.output and f'- {one.name} is missing' in result.output
    found = json.loads(call('inspect', folder / 'ba4', '--json').stdout)
    assert not found['complete'] and len(found['missing']) == len(found['damaged']) == 1


def test_a_long_list_is_shortened(call, tmp_path):
    torch.save({f'layer{number}': torch.ones(number) for number in range(40)}, tmp_path / 'many.pt')
    shortened, full = (call('inspect', tmp_path / 'many.pt', *options).output for options in ([], ['--all']))
    assert '25 more tensors are shown with --all' in shortened and 'layer20 ' not in shortened
    assert all(f'layer{number} ' in full for number in range(40))


def test_a_folder_of_several(call, folder, tmp_path):
    result = call('inspect', folder)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if ' sharded ' in line]
    assert [row[:-4] for row in rows] == [['ba4', '1', '4', 'sharded'], ['>', 'ba8', '1', '8', 'sharded']]
    assert [row[-1] for row in rows] == ['yes', 'yes']
    shutil.copytree(folder / 'ba4', folder / '.incomplete-ba12')
    assert call('inspect', folder).exit_code == 0 and 'being written' in call('inspect', folder).output
    sorted((folder / 'ba4').glob('*.distcp'))[0].unlink()
    os.remove(folder / 'ba8' / 'manifest.json')
    result = call('inspect', folder)
    assert result.exit_code == 1 and 'ba4: __0_0.distcp is missing' in result.output
    assert 'ba8: has files of torch.distributed.checkpoint, but no manifest.json' in result.output
    found = json.loads(call('inspect', folder, '--json').stdout)['checkpoints']
    assert [(Path(one['path']).name, one['latest'], one['complete'], one['being_written']) for one in found] == [
        ('ba4', False, False, False), ('ba8', True, False, False), ('.incomplete-ba12', False, False, True),
    ]  # fmt: skip


def test_a_folder_of_composers_files(call, tmp_path):
    for batch in (1, 2):
        write_composer_file(tmp_path / f'ep0-ba{batch}-rank0.pt', small_model())
    (tmp_path / 'latest-rank0.pt').symlink_to('ep0-ba2-rank0.pt')
    result = call('inspect', tmp_path)
    assert result.exit_code == 0 and '2 checkpoints in' in result.output
    marked = [line.split()[1] for line in result.output.splitlines() if line.strip().startswith('>') and '-ba' in line]
    assert marked == ['ep0-ba2-rank0.pt']
    assert call('inspect', tmp_path / 'latest-rank0.pt').exit_code == 0


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda path: None, r'nothing does not exist\. \(The working directory is '),
        (lambda path: path.mkdir(), r'nothing is empty; looked for a sharded checkpoint \(manifest\.json\), '),
        (lambda path: path.symlink_to('gone.pt'), r'It is a symlink to gone\.pt, which is not there'),
        (lambda path: path.write_bytes(b'some text'), 'does not begin as a checkpoint of torch does'),
    ],
)
def test_what_is_no_checkpoint(call, tmp_path, make, message):
    make(tmp_path / 'nothing')
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path / 'nothing')
    for command in (['inspect', tmp_path / 'nothing'], ['consolidate', tmp_path / 'nothing', tmp_path / 'out']):
        result = call(*command)
        assert result.exit_code == 1 and result.stderr.startswith('composer-ds: error: '), result.output
        assert 'Traceback' not in result.output
    assert not (tmp_path / 'out').exists()


def test_where_to_look_instead(tmp_path, folder):
    with pytest.raises(CheckpointError, match=r's3://bucket/ba4 is in an object store.*composer\.utils\.get_file'):
        open_source('s3://bucket/ba4')
    (folder / 'latest').unlink()
    with pytest.raises(CheckpointError, match=r'no file latest that names the newest: give one of them, such as .*ba8'):
        open_source(folder)
    for name in ('ep0-ba1.pt', 'ep0-ba2.pt'):
        write_composer_file(tmp_path / 'files' / name, small_model())
    with pytest.raises(CheckpointError, match=r'give one of ep0-ba1\.pt, ep0-ba2\.pt'):
        open_source(tmp_path / 'files')
    (tmp_path / 'ba1.pt.zst').write_bytes(b'1')
    with pytest.raises(CheckpointError, match='unpack it first'):
        open_source(tmp_path / 'ba1.pt.zst')


def test_consolidate_on_the_command_line(call, folder, tmp_path):
    result = call('consolidate', folder, tmp_path / 'out', '--dtype', 'bf16', '--max-shard-size', '1KB')
    assert result.exit_code == 0, result.output
    assert 'Wrote 8 tensors and 1 further name of them' in result.output and str(folder / 'ba8') in result.output
    weights = load_file(tmp_path / 'out' / 'model.safetensors')
    assert torch.equal(weights['layer.weight'], small_model().tensors['layer.weight'].bfloat16())
    again = call('consolidate', folder, tmp_path / 'out')
    assert again.exit_code == 2 and '--overwrite' in again.stderr
    assert call('consolidate', folder, tmp_path / 'out', '--overwrite').exit_code == 0
    assert call('consolidate', folder, tmp_path / 'other', '--dtype', 'fp8').exit_code == 2
    assert call('consolidate', folder, tmp_path / 'other', '--max-shard-size', 'large').exit_code == 2


def test_help_needs_nothing_heavy():
    code = (
        'import atexit, sys\n'
        "atexit.register(lambda: print('heavy:', {'torch', 'composer', 'deepspeed'} & set(sys.modules)))\n"
        'from composer_ds.cli import main\nmain()'
    )
    for command, expected in (('consolidate', '--max-shard-size'), ('inspect', '--no-verify')):
        arguments = [command, '--help']
        done = subprocess.run(
            [sys.executable, '-c', code, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 and expected in done.stdout
        assert done.stdout.endswith('heavy: set()\n'), done.stdout
