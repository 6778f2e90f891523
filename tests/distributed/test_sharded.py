"""Sharded checkpoints: every tensor, every option, every refusal. The resumes are in ``test_matrix``."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from tests.distributed import ema_cases, sharded_cases
from tests.distributed.parity_cases import SOME_STRATEGIES


@pytest.mark.parametrize('kind', ['everything', pytest.param('lora', marks=pytest.mark.slow)])
def test_every_tensor_comes_back_under_any_strategy(ranks, tmp_path, kind: str):
    places = [(2, 'zero1-cpu'), (2, 'zero3-cut'), (1, 'zero2')]
    paths = [ranks(size).run(sharded_cases.write_numbers, kind, one, str(tmp_path))[0] for size, one in places]
    for path in paths:
        sharded_cases.read_offline(kind, path)
    for (size, strategy), path in zip([(2, 'zero3-cut-cpu-params'), (1, 'zero3'), (2, 'zero2')], paths, strict=True):
        (compared, *_) = ranks(size).run(sharded_cases.read_numbers, kind, strategy, path)
        assert compared > 20


def test_a_model_that_is_built_partitioned_loads_one(two_ranks, tmp_path):
    (path, *_) = two_ranks.run(sharded_cases.write_numbers, 'everything', 'zero2', str(tmp_path))
    two_ranks.run(sharded_cases.read_numbers, 'everything', 'zero3-cut', path, partitioned=True)


def _same(found: dict, expected: dict, names: list[str]) -> bool:
    return all(torch.equal(found['weights'][name], expected['weights'][name]) for name in names)


def test_options_of_loading(two_ranks, tmp_path):
    saved = two_ranks.run(sharded_cases.save_small, 'zero2', str(tmp_path))[0]
    path, names = str(tmp_path / 'ba2'), list(saved['weights'])
    assert saved['count'] == 7 and saved['batch'] == saved['schedule'] == 2

    def load(**options) -> dict:
        return two_ranks.run(sharded_cases.load_small, 'zero3-cut', {'path': path, **options})[0]

    whole = load()
    assert _same(whole, saved, names) and whole['count'] == 7 and whole['batch'] == whole['schedule'] == 2
    for found, expected in zip(whole['optimizer']['param_groups'], saved['optimizer']['param_groups'], strict=True):
        assert found == expected
    without = load(schedulers=False)
    assert _same(without, saved, names) and without['batch'] == 2 and without['schedule'] == 0
    weights = load(weights_only=True)
    assert _same(weights, saved, names) and weights['batch'] == 0 and not any(weights['optimizer']['state'].values())
    (around, *_) = two_ranks.run(sharded_cases.load_small, 'zero1', str(tmp_path))
    assert _same(around, saved, names) and around['batch'] == 2
    loose = {'path': path, 'weights_only': True, 'strict': False}
    (larger, *_) = two_ranks.run(sharded_cases.load_with_extra, 'zero3-cut', loose)
    assert _same(larger, saved, names) and 'extra.weight' in larger['weights']


def test_weights_alone_are_saved_and_loaded(two_ranks, tmp_path):
    folder = str(tmp_path / 'weights')
    saved = two_ranks.run(sharded_cases.save_small, 'zero3-cut', folder, weights_only=True)[0]
    files = {one.name for one in (tmp_path / 'weights' / 'ba2').iterdir()}
    assert files == {'manifest.json', '.metadata', 'state.pt', '__0_0.distcp', '__1_0.distcp'}
    wanted = {'path': folder, 'weights_only': True}
    (found, *_) = two_ranks.run(sharded_cases.load_small, 'zero2', wanted)
    assert _same(found, saved, list(saved['weights'])) and found['batch'] == 0 and found['count'] == 7


def test_what_must_not_be_loaded_is_refused_by_name(two_ranks, tmp_path):
    two_ranks.run(sharded_cases.save_small, 'zero2', str(tmp_path))
    (found, _) = two_ranks.run(sharded_cases.refusals, 'zero3-cut', str(tmp_path / 'ba2'))
    expected = {
        'wrong path': 'nowhere does not exist',
        'wrong model': 'first.weight has the shape (6, 4) in the checkpoint, and (7, 4) in the model',
        'other names': 'lacks extra.bias, extra.weight',
        'other groups': 'parameter groups',
        'other optimizer': 'of the optimizer AdamW, this is SGD',
        'two checkpoints': 'load_path',
        'missing shard': '__0_0.distcp is missing',
        'flipped bit': '__0_0.distcp does not match its checksum',
        'truncated': '__0_0.distcp has',
        'no manifest': 'manifest.json',
        'bad manifest': 'manifest.json cannot be read',
        'latest names nothing': "names 'ba99', which is not there",
        'no latest': 'no file latest',
    }
    for what, words in expected.items():
        assert words in found[what], (what, found[what])


@pytest.mark.parametrize('strategy', SOME_STRATEGIES[1:4:2])
def test_a_checkpoint_of_deepspeed_itself_goes_on_with_composer(two_ranks, tmp_path, strategy: str):
    for number, config in enumerate(('zero2', 'zero3-cut')):
        folder = str(tmp_path / str(number))
        (compared, *_) = two_ranks.run(sharded_cases.from_deepspeed, config, strategy, folder, number == 1)
        assert compared > 5


def test_averages_of_weights_are_resumed(two_ranks, tmp_path):
    saved = two_ranks.run(ema_cases.save, 'zero2-cpu', str(tmp_path))[0]
    path = str(tmp_path / 'sharded' / f'ba{ema_cases.SAVED_AT}')
    (found, *_) = two_ranks.run(ema_cases.resume, 'zero3-cut', str(tmp_path), path)
    for part in ('weights', 'average'):
        for name, value in saved[part].items():
            torch.testing.assert_close(found[part][name], value, rtol=0, atol=1e-6, msg=f'{part} {name}')


def test_the_manifest_says_what_it_is(two_ranks, tmp_path):
    two_ranks.run(sharded_cases.save_small, 'zero1-cpu', str(tmp_path))
    manifest = json.loads((tmp_path / 'ba2' / 'manifest.json').read_text())
    assert (manifest['zero_stage'], manifest['offload_optimizer'], manifest['world_size']) == (1, 'cpu', 2)
    assert manifest['time']['batch'] == manifest['optimizer_steps']['applied'] == 2
    assert pathlib.Path(tmp_path / 'latest').read_text() == 'ba2\n'
    sizes = {one.name: one.stat().st_size for one in (tmp_path / 'ba2').iterdir() if one.name != 'manifest.json'}
    assert {name: entry['size_bytes'] for name, entry in manifest['files'].items()} == sizes
