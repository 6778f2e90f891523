"""A publication that is killed at each of its calls of the operating system, by ending the process there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from composer_ds.checkpoint import atomic

CALLS = ('fsync', 'makedirs', 'remove', 'symlink', 'replace')


def _killed_at(number: int, path: str, latest: str | None, after: bool) -> bool:
    """Publish in a child process that ends at its ``number``-th call; False when it came to its end before."""
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
    atomic.publish(path, latest)
    os._exit(0)


def _write(path: str, content: str) -> None:
    with open(path, 'w') as file:
        file.write(content)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _tidy_up(folder: str, filename: str) -> None:
    for latest in atomic.leftovers(folder, 'latest-rank{rank}.pt'):
        atomic.finish(latest)
    for path in atomic.leftovers(folder, filename):
        atomic.discard(path)


@pytest.fixture
def folders(tmp_path) -> Iterator[str]:
    """A fresh folder for each kill."""
    return (str(folder) for number in range(100) for folder in [tmp_path / str(number)] if not folder.mkdir())


@pytest.mark.parametrize('filename', ['ba{batch}.pt', 'fixed.pt'])
def test_killed_at_every_call(folders, filename: str):
    seen = set()
    for after in (False, True):
        for number in range(1, 100):
            folder = next(folders)
            old, new = (f'{folder}/{filename.format(batch=batch)}' for batch in (4, 5))
            latest = f'{folder}/latest-rank0.pt'
            for path, content in ((old, 'old'), (new, 'new')):
                _write(atomic.temporary_path(path), content)
                if content == 'old':
                    atomic.publish(path, latest)
            was_killed = _killed_at(number, new, latest, after)
            # Nobody who looks now sees a half of anything.
            before = _read(latest)
            assert before in ('old', 'new') and (was_killed or before == 'new')
            there = os.path.exists(new) and _read(new) == 'new'
            _tidy_up(folder, filename)
            # And after the start of the next process, `latest` is the newest there is.
            assert _read(latest) == ('new' if there else 'old'), (number, after)
            kept = {old, new} if there else {old}
            assert set(os.listdir(folder)) == {'latest-rank0.pt', *map(os.path.basename, kept)}
            seen.add((before, there))
            if not was_killed:
                break
        else:
            raise AssertionError('never came to its end')
        assert number > 4
    # Also the moment between the two renames was hit, for which the next start has to move the symlink.
    assert seen >= {('old', False), ('new', True)} and (filename == 'fixed.pt' or ('old', True) in seen)


def test_only_temporary_names_of_the_pattern_are_leftovers(tmp_path):
    folder = tmp_path / 'run[1]'
    (folder / 'ep1').mkdir(parents=True)
    for name in ('.incomplete-ba1.pt', 'ba2.pt', '.incomplete-other.pt', 'ep1/.incomplete-ba3.pt', '.ba4.pt'):
        _write(str(folder / name), '')
    assert atomic.leftovers(str(folder), 'ba{batch}.pt') == [str(folder / 'ba1.pt')]
    assert atomic.leftovers(str(folder), 'ep{epoch}/ba{batch}.pt') == [str(folder / 'ep1' / 'ba3.pt')]
    assert atomic.leftovers(str(folder / 'absent'), 'ba{batch}.pt') == []


def test_a_failing_publication_leaves_what_was(tmp_path):
    path, latest = str(tmp_path / 'ba2.pt'), str(tmp_path / 'latest.pt')
    _write(str(tmp_path / 'ba1.pt'), 'old')
    os.symlink('ba1.pt', latest)
    with pytest.raises(FileNotFoundError):
        atomic.publish(path, latest)
    _write(atomic.temporary_path(path), 'new')
    (tmp_path / 'ba2.pt').mkdir()
    with pytest.raises(IsADirectoryError):
        atomic.publish(path, latest)
    atomic.discard(path, latest)
    assert _read(latest) == 'old' and sorted(os.listdir(tmp_path)) == ['ba1.pt', 'ba2.pt', 'latest.pt']
