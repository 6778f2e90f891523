"""Files that are written run by run are those that safetensors, huggingface_hub and transformers would write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import load_state_dict_from_file, save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from composer_ds.checkpoint.folder import begin_folder, publish_folder, tidy_up_folders
from composer_ds.checkpoint.safetensors_stream import SafetensorsStream

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64)


def _tensors() -> dict[str, torch.Tensor]:
    """Of all kinds and sizes; the odd ones in between would leave what follows them unaligned."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(3,), (), (0, 4), (5, 7), (1,), (11, 3), (2, 2, 2), (300,), (9, 9)]
    return {
        f'{number}.{str(dtype)[6:]}': (100 * torch.randn(shape, generator=generator)).to(dtype)
        for number, (shape, dtype) in enumerate((shape, dtype) for dtype in DTYPES[::-1] for shape in shapes)
    }


def _write(folder: Path, tensors: dict[str, torch.Tensor], run_numel: int = 10**9, **options) -> SafetensorsStream:
    declared = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    with SafetensorsStream(folder, declared, **options) as stream:
        for tensor in tensors.values():
            for run in tensor.reshape(-1).split(run_numel):
                stream.write(run)
    return stream


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """As transformers does: one file where there is one, and what the index names otherwise."""
    if (folder / 'model.safetensors').exists():
        return load_file(folder / 'model.safetensors')
    index = json.loads((folder / 'model.safetensors.index.json').read_text())
    return {name: load_file(folder / file)[name] for name, file in index['weight_map'].items()}


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize('run_numel', [10**9, 4])
def test_one_file(tmp_path, run_numel: int):
    tensors = _tensors()
    stream = _write(tmp_path, tensors, run_numel)
    assert os.listdir(tmp_path) == stream.file_names == ['model.safetensors']
    _assert_equal(load_file(tmp_path / 'model.safetensors'), tensors)
    with safe_open(tmp_path / 'model.safetensors', 'pt') as file:
        assert file.metadata() == {'format': 'pt'}
    # Every tensor begins at a multiple of its element's size, in the file and so in a mapped one.
    data = (tmp_path / 'model.safetensors').read_bytes()
    length = int.from_bytes(data[:8], 'little')
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != '__metadata__':
            assert (8 + length + entry['data_offsets'][0]) % tensors[name].element_size() == 0


def test_several_files_as_huggingface_hub_makes_them(tmp_path):
    # huggingface_hub takes tensors without elements for tied ones.
    tensors = {name: tensor for name, tensor in _tensors().items() if tensor.numel()}
    for one in ('ours', 'theirs'):
        (tmp_path / one).mkdir()
    stream = _write(tmp_path / 'ours', tensors, 7, max_shard_size='1KB')
    save_torch_state_dict(tensors, tmp_path / 'theirs', max_shard_size='1KB')
    assert len(stream.file_names) > 5 and stream.file_names[-1] == 'model.safetensors.index.json'
    assert sorted(stream.file_names) == sorted(os.listdir(tmp_path / 'ours')) == sorted(os.listdir(tmp_path / 'theirs'))
    ours, theirs = (
        json.loads((tmp_path / one / 'model.safetensors.index.json').read_text()) for one in ('ours', 'theirs')
    )
    assert ours['weight_map'] == theirs['weight_map']
    assert ours['metadata']['total_size'] == theirs['metadata']['total_size'] == stream.size_bytes
    for file in stream.file_names[:-1]:
        _assert_equal(
            dict(load_state_dict_from_file(tmp_path / 'ours' / file)),
            dict(load_state_dict_from_file(tmp_path / 'theirs' / file)),
        )


def test_runs_are_cast_and_may_be_anything(tmp_path):
    whole = torch.randn(6, 5)
    with SafetensorsStream(
        tmp_path,
        [('a', (6, 5), torch.bfloat16), ('b', (5, 6), torch.float16)],
        metadata={'c': 'a'},
        base_name='adapter',
    ) as stream:
        stream.write(whole[:2])
        stream.write(torch.empty(0))
        stream.write(torch.nn.Parameter(whole[2:]))
        stream.write(whole.t())
    found = load_file(tmp_path / 'adapter.safetensors')
    _assert_equal(found, {'a': whole.bfloat16(), 'b': whole.t().contiguous().half()})
    with safe_open(tmp_path / 'adapter.safetensors', 'pt') as file:
        assert file.metadata() == {'c': 'a'}


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ([4], '0 of 4 elements were given'),
        ([4, 2], 'b: 2 of 4 elements were given, and nothing of the 2 tensors after it'),
        ([5], 'a: 5 elements were given, and 4 of 4 are missing'),
        ([3, 2], 'a: 2 elements were given, and 1 of 4 are missing'),
        ([4, 4, 4, 1], '1 elements too many: all 4 tensors are complete'),
    ],
)
def test_another_count_than_declared(tmp_path, sizes: list[int], message: str):
    old = {'old': torch.ones(3)}
    _write(tmp_path, old)
    declared = [(name, shape, torch.float32) for name, shape in (('a', (4,)), ('b', (2, 2)), ('e', (0,)), ('c', (4,)))]

    def write():
        with SafetensorsStream(tmp_path, declared, max_shard_size='0.02KB') as stream:
            for size in sizes:
                stream.write(torch.ones(size))

    with pytest.raises(ValueError, match=message):
        write()
    assert os.listdir(tmp_path) == ['model.safetensors']
    _assert_equal(_read(tmp_path), old)


@pytest.mark.parametrize('tensors', [[], [('a', (1,), torch.float32)] * 2])
def test_no_tensors_or_one_twice(tmp_path, tensors: list):
    with pytest.raises(ValueError, match='no name twice'):
        SafetensorsStream(tmp_path, tensors)


@pytest.mark.parametrize('failing', ['open', 'pwrite', 'fsync', 'replace'])
def test_an_error_of_the_disk_leaves_the_old_export(tmp_path, monkeypatch, failing: str):
    old = {'old': torch.ones(3)}
    _write(tmp_path, old)
    call, calls = getattr(os, failing), 0

    def fail(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(28, 'No space left on device')
        return call(*args, **kwargs)

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match='No space left'):
        _write(tmp_path, _tensors(), max_shard_size='1KB')
    monkeypatch.undo()
    assert not [name for name in os.listdir(tmp_path) if name.startswith('.')]
    _assert_equal(_read(tmp_path), old)


def _killed_at(number: int, publish) -> bool:
    """Call in a process of its own that dies before the n-th change of names; whether it died."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    done = 0

    def dying(call):
        def instead(*args, **kwargs):
            nonlocal done
            done += 1
            if done == number:
                os._exit(9)
            return call(*args, **kwargs)

        return instead

    for name in ('replace', 'rename', 'unlink', 'remove', 'rmdir'):
        setattr(os, name, dying(getattr(os, name)))
    publish()
    os._exit(0)


# One file, two (of the second number with the same names), or four.
@pytest.mark.parametrize('before', ['1KB', '0.4KB', '0.1KB'])
@pytest.mark.parametrize('after', ['1KB', '0.41KB'])
def test_killed_while_an_export_is_replaced(tmp_path, before: str, after: str):
    old = {name: torch.arange(50.0) + number for number, name in enumerate('abcd')}
    new = {name: -tensor for name, tensor in old.items()}
    seen = set()
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        _write(folder, old, max_shard_size=before)
        (folder / 'config.json').write_text('{}')
        was_killed = _killed_at(number, lambda folder=folder: _write(folder, new, max_shard_size=after))
        try:
            found = _read(folder)
        except FileNotFoundError:
            seen.add('none')
        else:
            kind = 'new' if found['a'][1] < 0 else 'old'
            _assert_equal(found, new if kind == 'new' else old)
            seen.add(kind)
        if not was_killed:
            break
    assert not was_killed and kind == 'new' and number > 1
    # Only files of the same names cannot be replaced without a moment in which there is nothing.
    assert seen - {'new'} == ({'old', 'none'} if {before, after} == {'0.4KB', '0.41KB'} else {'old'})
    # Nothing of the old one is left, and a leftover is not in the way of the next.
    (tmp_path / 'fresh').mkdir()
    _write(tmp_path / 'fresh', new, max_shard_size=after)
    assert sorted(os.listdir(folder)) == sorted([*os.listdir(tmp_path / 'fresh'), 'config.json'])
    _write(tmp_path / '1', old, max_shard_size='0.1KB')
    _assert_equal(_read(tmp_path / '1'), old)
    assert len(os.listdir(tmp_path / '1')) == 6


def test_killed_while_a_folder_is_replaced(tmp_path):
    seen = set()
    for number in range(1, 100):
        path = tmp_path / str(number) / 'ep1-ba5'
        for content in ('old', 'new'):
            temporary = begin_folder(path)
            (temporary / 'inner').mkdir()
            for name in ('a', 'b', 'inner/c'):
                (temporary / name).write_text(content)
            if content == 'old':
                publish_folder(path)
        was_killed = _killed_at(number, lambda path=path: publish_folder(path))
        there = path.exists()
        tidy_up_folders(str(path.parent), 'ep{epoch}-ba{batch}')
        assert os.listdir(path.parent) == ['ep1-ba5']
        (content,) = {(path / name).read_text() for name in ('a', 'b', 'inner/c')}
        seen.add((there, content))
        if not was_killed:
            break
    assert not was_killed and seen == {(True, 'old'), (False, 'old'), (True, 'new')}
