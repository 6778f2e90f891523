"""Locks that a killed compile left behind are told before torch waits for them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from composer_ds import compiling
from composer_ds.deepspeed_output import quiet_output

WAITS_FOR_EVER = hasattr(cpp_extension, 'FileBaton')
"""Newer torch has locks of another kind, which end with their process."""
waits_for_ever = pytest.mark.skipif(not WAITS_FOR_EVER, reason='the locks of this torch end with their process')


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    return tmp_path


def _lock(folder: Path, age_sec: float) -> Path:
    folder.mkdir(parents=True)
    lock = folder / 'lock'
    assert FileBaton(str(lock)).try_acquire()  # as torch does; never released, as by a process that was killed
    then = time.time() - age_sec
    os.utime(lock, (then, then))
    return lock


@waits_for_ever
def test_an_old_lock_is_named_and_left_alone(extensions, capsys):
    old = _lock(extensions / 'cpu_adam', age_sec=20 * 60)
    fresh = _lock(extensions / 'deepspeed_shm_comm', age_sec=60)
    compiling.announce_old_locks()
    told = capsys.readouterr().err
    assert f'{old} is 20 min 0 s old' in told and 'remove the file when no compiler runs' in told
    assert str(fresh) not in told
    assert old.exists() and fresh.exists()


def test_nothing_is_said_without_locks(extensions, capsys):
    (extensions / 'cpu_adam').mkdir()
    compiling.announce_old_locks()
    assert capsys.readouterr().err == ''


def test_locks_that_end_with_their_process_are_not_told(extensions, capsys, monkeypatch):
    monkeypatch.delattr(cpp_extension, 'FileBaton', raising=False)
    _lock(extensions / 'cpu_adam', age_sec=20 * 60)
    compiling.announce_old_locks()
    assert capsys.readouterr().err == ''


@waits_for_ever
def test_it_is_told_before_anything_is_loaded(extensions, capsys):
    old = _lock(extensions / 'deepspeed_shm_comm', age_sec=20 * 60)
    with quiet_output():
        assert str(old) in capsys.readouterr().err


@waits_for_ever
@pytest.mark.parametrize('variable', [True, False])
def test_the_locks_of_torch_are_found(tmp_path, monkeypatch, capsys, variable: bool):
    """Where the lock is, says torch (2.7) itself; a lock of another Python is not waited for."""
    if variable:
        monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    else:
        monkeypatch.delenv('TORCH_EXTENSIONS_DIR', raising=False)
        monkeypatch.setattr(cpp_extension, 'get_default_build_root', lambda: str(tmp_path))
    asked_for: list[str] = []

    def baton(path: str):
        asked_for.append(path)
        raise InterruptedError

    monkeypatch.setattr(cpp_extension, 'FileBaton', baton)
    source = tmp_path / 'source.cpp'
    source.touch()
    with pytest.raises(InterruptedError):
        cpp_extension.load('an_extension', [str(source)])
    lock = Path(asked_for[0])
    lock.parent.rmdir()
    assert _lock(lock.parent, age_sec=20 * 60) == lock
    _lock(tmp_path / 'py27_cpu' / 'an_extension', age_sec=20 * 60)
    compiling.announce_old_locks()
    told = capsys.readouterr().err
    assert told.startswith(f'{lock} is 20 min') and told.count(' old: ') == 1


@pytest.mark.parametrize('in_a_folder_of_a_version', [False, True])
def test_compiled_extensions_are_found(extensions, in_a_folder_of_a_version: bool):
    assert not compiling.is_compiled('cpu_adam')
    folder = extensions / 'py311_cpu' / 'cpu_adam' if in_a_folder_of_a_version else extensions / 'cpu_adam'
    folder.mkdir(parents=True)
    (folder / 'cpu_adam.so').touch()
    assert compiling.is_compiled('cpu_adam')
