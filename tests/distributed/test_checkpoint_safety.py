"""Full disks, damaged files, and everything that a ``CheckpointSaver`` does besides. The oracle is plain Composer."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile

import pytest
import torch

from composer_ds.checkpoint.damage import damage
from tests.distributed import safety_cases


def _batch_of(path: pathlib.Path) -> int:
    assert damage(str(path)) is None
    return int(torch.load(path, weights_only=False)['state']['timestamp']['Timestamp']['batch'])


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_full_disk_is_an_error_on_every_rank(ranks, tmp_path, world_size: int):
    pool = ranks(world_size)
    expected = pool.run(safety_cases.train, None)
    folder = tmp_path / 'saved'
    for rank, (kind, message, after_sec) in enumerate(pool.run(safety_cases.full_disk, str(folder), 3000)):
        assert kind == 'CheckpointError' and after_sec < 30, (rank, message)
        for part in ('ep0-ba3-rank0.pt was not saved', 'EFBIG', 'bytes are free', 'ep0-ba2-rank0.pt, saved before'):
            assert part in message
    assert set(os.listdir(folder)) == {'ep0-ba1-rank0.pt', 'ep0-ba2-rank0.pt', 'latest-rank0.pt'}
    assert _batch_of(folder / 'latest-rank0.pt') == 2
    for ours, oracle in zip(pool.run(safety_cases.train, str(folder), autoresume=True), expected, strict=True):
        assert ours.keys() == {3, 4, 5, 6}
        assert ours == pytest.approx({batch: oracle[batch] for batch in ours}, abs=1e-6)


def test_a_full_disk_does_not_cost_the_only_checkpoint(two_ranks, tmp_path):
    arguments = {'save_filename': 'one-rank{rank}.pt', 'save_overwrite': True, 'save_num_checkpoints_to_keep': 1}
    for kind, message, _ in two_ranks.run(safety_cases.full_disk, str(tmp_path), 3000, **arguments):
        assert kind == 'CheckpointError' and 'is intact' in message
    assert set(os.listdir(tmp_path)) == {'one-rank0.pt', 'latest-rank0.pt'}
    assert _batch_of(tmp_path / 'one-rank0.pt') == 2


@pytest.mark.parametrize('ranks_that_fail', [[0, 1], [0], [1]])
def test_an_error_before_the_file_is_written_reaches_every_rank(two_ranks, tmp_path, ranks_that_fail: list[int]):
    for kind, message, after_sec in two_ranks.run(safety_cases.failing_ignore_keys, str(tmp_path), ranks_that_fail):
        assert kind == 'CheckpointError' and 'ValueError: a mistake of the user' in message and after_sec < 30
    assert os.listdir(tmp_path) == []


def test_a_save_under_any_name_is_complete_or_absent(two_ranks, tmp_path):
    results = two_ranks.run(safety_cases.save_under_any_name, str(tmp_path))
    assert [saved for saved, _ in results] == [str(tmp_path / 'mine-ba0.pt'), None]
    assert all(
        kind == 'CheckpointError' and 'mine-ba0.pt was not saved' in message for _, (kind, message, _) in results
    )
    assert os.listdir(tmp_path) == ['mine-ba0.pt']
    assert torch.load(tmp_path / 'mine-ba0.pt', weights_only=False).keys() == {'state'}


def test_a_save_killed_before_the_symlink_moved_is_ended_at_the_next_start(two_ranks, tmp_path):
    (expected, _) = two_ranks.run(safety_cases.train, str(tmp_path), max_duration='4ba')
    for losses in two_ranks.run(safety_cases.interrupted_latest, str(tmp_path)):
        assert losses.keys() == {5, 6} and len(expected) == 4
    assert not [name for name in os.listdir(tmp_path) if name.startswith('.')]


@pytest.fixture(scope='module')
def good(two_ranks, tmp_path_factory) -> pathlib.Path:
    """A folder with three checkpoints."""
    folder = tmp_path_factory.mktemp('good')
    two_ranks.run(safety_cases.train, str(folder), max_duration='3ba')
    return folder


def _flip(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path) as archive:
        tensors = [record for record in archive.infolist() if '/data/' in record.filename]
        largest = max(tensors, key=lambda record: record.file_size)
    content = bytearray(path.read_bytes())
    name_bytes, extra_bytes = struct.unpack_from('<HH', content, largest.header_offset + 26)
    # In a tensor: nothing but its checksum tells.
    content[largest.header_offset + 30 + name_bytes + extra_bytes + largest.file_size // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    'flipped bit': (_flip, 'does not match its checksum'),
    'truncated': (lambda path: path.write_bytes(path.read_bytes()[:-1500]), 'is truncated: it ends after'),
    'empty': (lambda path: path.write_bytes(b''), 'is empty (0 bytes)'),
}


@pytest.mark.parametrize('how', ['autoresume', 'load_path', 'LoadCheckpoint'])
@pytest.mark.parametrize('kind', DAMAGES)
def test_a_damaged_file_is_refused_by_name_on_every_rank(ranks, good, tmp_path, kind: str, how: str):
    folder = tmp_path / 'damaged'
    shutil.copytree(good, folder, symlinks=True)
    spoil, finding = DAMAGES[kind]
    path = (folder / 'latest-rank0.pt').resolve()
    spoil(path)
    for world_size in (1, 2) if how == 'load_path' else (2,):
        for error, message, after_sec in ranks(world_size).run(safety_cases.load, how, str(path)):
            assert error == 'CheckpointError', message
            assert str(path) in message and finding in message and after_sec < 30
            assert 'The newest complete one beside it is ep0-ba2-rank0.pt' in message


def test_torch_itself_does_not_see_a_flipped_bit(two_ranks, good, tmp_path):
    path = tmp_path / 'ep0-ba3-rank0.pt'
    shutil.copy((good / 'latest-rank0.pt').resolve(), path)
    _flip(path)
    # The reason for the check: when plain Composer refuses it, too, the check can go.
    with pytest.raises(Exception, match='no error was raised'):
        two_ranks.run(safety_cases.load, 'load_path', str(path), plain=True)


def test_a_missing_file_is_named_on_every_rank(two_ranks, tmp_path):
    for how in ('load_path', 'LoadCheckpoint'):
        for error, message, after_sec in two_ranks.run(safety_cases.load, how, str(tmp_path / 'absent.pt')):
            assert error == 'FileNotFoundError' and 'absent.pt' in message and after_sec < 10


def test_what_local_rank_zero_cannot_unpack_is_an_error_on_every_rank(two_ranks, good, tmp_path):
    with tarfile.open(tmp_path / 'all.tar', 'w') as archive:
        archive.add((good / 'latest-rank0.pt').resolve(), 'composer_states.pt')
    path = tmp_path / 'half.tar'
    path.write_bytes((tmp_path / 'all.tar').read_bytes()[:-14000])
    (first, second) = two_ranks.run(safety_cases.load, 'load_path', str(path))
    assert first[0] == 'ReadError' and second[0] == 'CheckpointError' and 'half.tar' in second[1]


def test_the_users_validation_function_is_called_too(two_ranks, good):
    path = str(good / 'ep0-ba2-rank0.pt')
    for error, message, _ in two_ranks.run(safety_cases.users_function_is_kept, path):
        assert error == 'CheckpointError' and path in message and 'was refused by' in message


SAVES = {
    'default': (None, {}),
    'nested': (None, {'save_filename': 'ep{epoch}/ba{batch}-rank{rank}.pt', 'save_latest_filename': 'now/latest.pt'}),
    'keeps one': (None, {'save_num_checkpoints_to_keep': 1, 'save_weights_only': True}),
    'keeps none': (None, {'save_num_checkpoints_to_keep': 0}),
    'no latest': (None, {'save_latest_filename': None, 'save_interval': '1ep', 'save_ignore_keys': ['state/opt*']}),
    'compressed': (None, {'save_filename': 'ba{batch}.pt.gz', 'save_latest_filename': 'latest.pt.gz'}),
    'tar': (None, {'save_filename': 'ba{batch}.tgz', 'save_interval': '1ep'}),
    'own saver': ({'save_interval': '1ba', 'num_checkpoints_to_keep': 2}, {}),
    'own saver, no remote name': ({'save_interval': '1ba', 'remote_file_name': None}, {}),
}


@pytest.mark.parametrize('name', SAVES)
def test_the_same_files_as_plain_composer(two_ranks, tmp_path, name: str):
    own_saver, arguments = SAVES[name]
    found = {}
    for plain in (True, False):
        # Of one name, which is part of the remote names.
        shutil.rmtree(tmp_path / 'saved', ignore_errors=True)
        (tmp_path / 'saved').mkdir()
        found[plain] = two_ranks.run(safety_cases.saved_files, str(tmp_path / 'saved'), plain, own_saver, arguments)
    assert found[False] == found[True]
    assert found[True][0][0] or name == 'keeps none'


def test_with_one_name_for_all_the_newest_is_not_rotated_away(two_ranks, tmp_path):
    arguments = {'save_filename': 'one.pt', 'save_overwrite': True, 'save_num_checkpoints_to_keep': 1}
    two_ranks.run(safety_cases.train, str(tmp_path), **arguments)
    assert _batch_of(tmp_path / 'latest-rank0.pt') == 6


@pytest.mark.long
def test_killed_at_random_moments(tmp_path):
    """`make kills` kills more often; what is checked after each kill stands in kill_lives.py."""
    kills = os.environ.get('COMPOSER_DS_KILLS', '6 2').split()
    arguments = [sys.executable, '-m', 'tests.distributed.kill_lives', str(tmp_path), '--kills', *kills]
    limit_sec = 60 + 15 * sum(map(int, kills))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=limit_sec, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    for count, found in zip(kills, report.values(), strict=True):
        assert found['kills'] == int(count) and found['saves'] > 0
        # The kills are of use only where they hit saves.
        assert found['within a save'] >= int(count) // 5
