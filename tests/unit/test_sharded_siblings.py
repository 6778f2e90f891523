"""The folder of sharded checkpoints, with a save that is killed at each of its calls of the operating system."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from composer_ds.checkpoint.folder import begin_folder
from composer_ds.errors import CheckpointError
from composer_ds.sharded import remote, siblings
from composer_ds.sharded.files import file_entry, finish
from composer_ds.sharded.manifest import LATEST, MANIFEST, Manifest

CALLS = ('fsync', 'replace', 'unlink', 'rmdir', 'mkdir')
FILENAME = 'ba{batch}'


def _manifest(batch: int, run: str) -> Manifest:
    return Manifest(
        run_name=run,
        time={'batch': batch},
        optimizer_steps={},
        world_size=1,
        zero_stage=2,
        offload_optimizer='none',
        offload_param='none',
        precision='fp32',
        versions={'torch': '1'},
        weights_only=True,
        optimizer=None,
        param_groups=[],
        tensors={},
        tied={},
        files={},
    )


def _save(folder: Path, batch: int, run: str, name: str | None = None, keep: int = -1) -> None:
    """Save as the saver does, with a file for each rank."""
    path = folder / (name or f'ba{batch}')
    temporary = begin_folder(path)
    files = {}
    for rank in range(2):
        (temporary / f'__{rank}_0.distcp').write_text(run * 1000)
        files[f'__{rank}_0.distcp'] = file_entry(temporary / f'__{rank}_0.distcp')
    finish(path, _manifest(batch, run).model_copy(update={'files': files}))
    siblings.point_latest(path)
    if keep > 0:
        siblings.rotate(path, keep)


def _killed_at(number: int, after: bool, folder: Path, reported: Path, **save: Any) -> bool:
    """Save in a child process that ends at its ``number``-th call; False when it came to its end before."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    done = 0

    def dying(call):
        def instead(*args, **kwargs):
            nonlocal done
            done += 1
            if done == number and not after:
                os._exit(9)
            try:
                return call(*args, **kwargs)
            finally:
                if done == number:
                    os._exit(9)

        return instead

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    _save(folder, **save)
    reported.write_text('saved')
    os._exit(0)


def _complete(folder: Path) -> dict[str, str]:
    """The runs of all checkpoints, by name; each must be whole."""
    found = {}
    for path, manifest in siblings.complete_ones(folder):
        assert {name: file_entry(path / name) for name in manifest.files} == manifest.files and manifest.files
        assert all((path / name).read_text().startswith(manifest.run_name) for name in manifest.files)
        found[path.name] = manifest.run_name
    return found


@pytest.mark.parametrize('after', [False, True], ids=['before', 'after'])
@pytest.mark.parametrize('same_name', [False, True])
def test_killed_at_every_call(tmp_path, after: bool, same_name: bool):
    """One save of a new name, which rotates the oldest away, and one that replaces the only checkpoint."""
    start = tmp_path / 'start'
    if same_name:
        _save(start, 1, 'old', name='ep0')
        saving: dict[str, Any] = {'batch': 2, 'run': 'new', 'name': 'ep0', 'keep': 1}
        filename, before = 'ep{epoch}', 'ep0'
    else:
        _save(start, 1, 'oldest')
        _save(start, 2, 'old')
        saving = {'batch': 3, 'run': 'new', 'keep': 2}
        filename, before = FILENAME, 'ba2'
    outcomes = set()
    number = 1
    while True:
        folder = tmp_path / str(number)
        shutil.copytree(start, folder, copy_function=shutil.copy2)
        killed = _killed_at(number, after, folder, tmp_path / f'reported{number}', **saving)
        # Whoever looks before the next start finds whole checkpoints only.
        _complete(folder)
        siblings.recover(folder, filename)
        found = _complete(folder)
        assert not list(folder.glob('.*'))
        assert {path.name for path in folder.iterdir()} == {*found, LATEST}
        newest = siblings.newest_of(folder)
        assert newest is not None
        outcomes.add(found[newest.name])
        if found[newest.name] == 'old':
            assert newest.name == before and (folder / LATEST).read_text().strip() == before
        # The next save goes its way.
        siblings.recover(folder, filename)
        _save(folder, 4, 'next', name='ep1' if same_name else None, keep=1)
        assert set(_complete(folder).values()) == {'next'}
        if not killed:
            assert found[newest.name] == 'new' and len(found) == (1 if same_name else 2)
            break
        number += 1
    assert outcomes == {'old', 'new'} and number > 10


def test_the_newest_is_that_of_latest_or_one_saved_after_it(tmp_path):
    assert siblings.newest_of(tmp_path / 'absent') is None
    for batch in (1, 2, 3):
        _save(tmp_path, batch, 'first')
    assert siblings.newest_of(tmp_path) == tmp_path / 'ba3'
    # Killed between the renaming and latest.
    siblings.point_latest(tmp_path / 'ba2')
    os.utime(tmp_path / 'ba3' / MANIFEST)
    assert siblings.newest_of(tmp_path) == tmp_path / 'ba3'
    # Another run, with overwrite, that has not come so far.
    _save(tmp_path, 1, 'second')
    assert siblings.newest_of(tmp_path) == tmp_path / 'ba1'
    shutil.rmtree(tmp_path / 'ba1')
    assert siblings.newest_of(tmp_path) == tmp_path / 'ba3'
    (tmp_path / LATEST).unlink()
    assert siblings.newest_of(tmp_path) == tmp_path / 'ba3'


def test_rotation_begins_with_what_is_overwritten(tmp_path):
    for batch in (1, 2, 8, 9, 3):
        _save(tmp_path, batch, 'run')
    siblings.rotate(tmp_path / 'ba3', 4)
    assert set(_complete(tmp_path)) == {'ba1', 'ba2', 'ba3', 'ba9'}
    siblings.rotate(tmp_path / 'ba3', 2)
    assert set(_complete(tmp_path)) == {'ba2', 'ba3'}
    siblings.rotate(tmp_path / 'ba3', 1)
    siblings.rotate(tmp_path / 'ba3', 1)
    assert set(_complete(tmp_path)) == {'ba3'}


def test_what_cannot_be_removed_is_no_error(tmp_path, monkeypatch, caplog):
    for batch in (1, 2):
        _save(tmp_path, batch, 'run')

    def replace(source, target):
        raise PermissionError(13, 'Permission denied', str(source))

    monkeypatch.setattr(os, 'replace', replace)
    siblings.rotate(tmp_path / 'ba2', 1)
    assert 'ba1 cannot be removed' in caplog.text and set(_complete(tmp_path)) == {'ba1', 'ba2'}


def test_others_temporary_folders_are_left_alone(tmp_path):
    for name in ('.incomplete-ba7', '.incomplete-old-ba6', '.incomplete-weights7', '.hidden'):
        (tmp_path / name).mkdir()
    siblings.recover(tmp_path, FILENAME)
    assert {path.name for path in tmp_path.iterdir()} == {'.incomplete-weights7', '.hidden'}


def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path):
    _save(tmp_path, 1, 'run')
    (tmp_path / 'ba1' / MANIFEST).write_text(json.dumps({'format': 'of somebody else'}))
    with pytest.raises(CheckpointError, match=r'ba1/manifest\.json cannot be read'):
        siblings.newest_of(tmp_path)


class Forbidding:
    """An object store as Composer's for S3, which says "not found" where S3 says "forbidden"."""

    code = '403'

    def download_object(self, name, path, overwrite):
        answer = RuntimeError('An error occurred (403) when calling the HeadObject operation: Forbidden')
        answer.response = {'Error': {'Code': self.code}}  # pyright: ignore[reportAttributeAccessIssue]
        raise FileNotFoundError(f'Object {name} not found') from answer


def test_what_is_forbidden_is_not_taken_for_missing(monkeypatch):
    monkeypatch.setattr(remote, 'maybe_create_object_store_from_uri', lambda uri: Forbidding())
    folder = remote.RemoteFolder('s3://bucket/runs')
    with pytest.raises(CheckpointError, match=r's3://bucket/runs/latest: the object store forbids'):
        folder.latest()
    monkeypatch.setattr(Forbidding, 'code', '404')
    assert folder.latest() is None


def test_only_downloads_are_discarded(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, '_own_folder', lambda: tmp_path / 'own')
    monkeypatch.setattr(remote, 'maybe_create_object_store_from_uri', lambda uri: Forbidding())
    place = remote.RemoteFolder('s3://bucket/runs').place_of('ba3', 'token')
    for path in (place, tmp_path / 'mine' / 'ba3', tmp_path / 'own' / 'load-other' / 's3'):
        path.mkdir(parents=True)
    for path in (place, tmp_path / 'mine' / 'ba3'):
        remote.discard_download(str(path))
    assert sorted(os.listdir(tmp_path / 'own')) == ['load-other'] and (tmp_path / 'mine' / 'ba3').exists()
    assert str(place).endswith('s3/bucket/runs/ba3')
