"""Composer's ``EMA`` over partitions; the oracle is plain Composer, or the average worked out beside the training."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.distributed import ema_cases

STRATEGIES = ['zero1', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params']


@pytest.mark.parametrize('settings', ema_cases.SETTINGS)
@pytest.mark.parametrize('world_size', [1, 2])
def test_equals_plain_composer(ranks, world_size: int, settings: str):
    oracle = ranks(world_size).run(ema_cases.train, None, settings)
    for strategy in STRATEGIES:
        for expected, found in zip(oracle, ranks(world_size).run(ema_cases.train, strategy, settings), strict=True):
            for key in ('weights', 'average', 'evaluated'):
                torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-6, msg=f'{strategy}: {key}')
            assert found['metrics'] == pytest.approx(expected['metrics'], rel=1e-6), strategy
            assert found['restored'] == [True] * 4, f'{strategy}: an evaluation has changed the weights'
    trained = [name for name in expected['weights'] if name.startswith(('first', 'mean', 'middle', 'head'))]
    assert len(trained) == 7
    for name in trained:
        assert (expected['weights'][name] - expected['before'][name]).abs().max() > 1e-3, f'{name} was not trained'
        assert (expected['average'][name] - expected['weights'][name]).abs().max() > 1e-4, f'{name}: no average'
        assert (expected['evaluated'][-1][name] - expected['weights'][name]).abs().max() > 1e-4, f'{name}: no swap'


@pytest.mark.parametrize('world_size', [1, 2])
def test_bf16_averages_the_master_weights(ranks, world_size: int):
    for strategy in STRATEGIES:
        for found in ranks(world_size).run(ema_cases.train, strategy, 'at once', bf16=True):
            parameters = [name for name in found['average'] if name.startswith(('first', 'middle', 'head'))]
            assert len(parameters) == 6
            for name in parameters:
                average = found['average'][name]
                torch.testing.assert_close(average, found['by hand'][name], rtol=0, atol=1e-7, msg=strategy)
                assert (average - found['weights'][name]).abs().max() > 1e-4, f'{name}: no average'
                torch.testing.assert_close(found['evaluated'][-1][name], average, rtol=0, atol=0, msg=strategy)
            rounded = max(float((found['average'][n] - found['average'][n].bfloat16()).abs().max()) for n in parameters)
            assert rounded > 1e-4, 'the average must hold more than bf16 can'
            assert found['restored'] == [True] * 4, strategy


def test_what_the_users_own_object_gives(ranks):
    for world_size, strategy in itertools.product((1, 2), STRATEGIES):
        ranks(world_size).run(ema_cases.users_own_object, strategy)


@pytest.mark.parametrize('world_size', [1, 2])
def test_checkpoints_cross_over(ranks, world_size: int, tmp_path):
    pool = ranks(world_size)
    places = [None, 'zero2-cpu', 'zero3-cut']
    runs = {place: pool.run(ema_cases.save, place, str(tmp_path / str(place)))[0] for place in places}
    files = {
        place: torch.load(tmp_path / str(place) / f'ba{ema_cases.SAVED_AT}.pt', weights_only=False)['state']
        for place in places
    }
    plain = dict(files[None]['algorithms'])['EMA']
    assert plain['ema_weights_active'] and plain['ema_started']
    for place in places[1:]:
        # The file is what plain Composer would have written: the average as the model, the weights in the algorithm.
        ours = dict(files[place]['algorithms'])['EMA']
        assert ours.keys() == plain.keys()
        torch.testing.assert_close(ours['ema_model'], plain['ema_model'], rtol=0, atol=2e-6)
        torch.testing.assert_close(dict(files[place]['model']), dict(files[None]['model']), rtol=0, atol=2e-6)
    oracle = runs[None]
    for saved, resumed in [(None, 'zero3-cut'), ('zero3-cut', None), ('zero2-cpu', 'zero3-cut'), (None, 'zero2-cpu')]:
        found = pool.run(ema_cases.resume, resumed, str(tmp_path / str(saved)))[0]
        message = f'{saved} -> {resumed}'
        for key in ('weights', 'average'):
            torch.testing.assert_close(found[key], oracle[key], rtol=0, atol=5e-6, msg=message)
        # Evaluated before anything was trained: with the average, which is the model in the file.
        for name, value in files[saved]['model'].items():
            torch.testing.assert_close(found['evaluated'][name], value, rtol=0, atol=0, msg=message)
    assert (oracle['average']['head.weight'] - oracle['weights']['head.weight']).abs().max() > 1e-3
