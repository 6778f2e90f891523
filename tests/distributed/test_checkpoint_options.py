"""Every option that Composer has for checkpoints does under DeepSpeed what it does in plain Composer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import option_cases

STRATEGIES = ['zero2-cpu', 'zero3-cut']


def _assert_alike(found: Any, expected: Any, where: str) -> None:
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        if isinstance(value, dict) and all(torch.is_tensor(one) for one in value.values()):
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=f'{where}: {name}')
        else:
            assert found[name] == value, f'{where}: {name}'


@pytest.mark.slow
def test_saving_and_loading(two_ranks, tmp_path):
    saved = two_ranks.run(option_cases.saving, None, str(tmp_path / 'plain'))[0]
    # Composer (0.32) deletes what is not to be saved from the live optimizer, too, and trains on without moments.
    assert (saved['globs weights']['middle.weight'] - saved['interval weights']['middle.weight']).abs().max() > 1e-4
    saved['globs weights'] = saved['interval weights']
    loaded = two_ranks.run(option_cases.loading, None, str(tmp_path / 'plain'))[0]
    assert loaded['strict'] and loaded['absent hand/nothing.pt'] and loaded['all batch'] == 3
    torch.testing.assert_close(loaded['all'], saved['interval weights'], rtol=0, atol=1e-6)
    for strategy in STRATEGIES:
        _assert_alike(two_ranks.run(option_cases.saving, strategy, str(tmp_path / strategy))[0], saved, strategy)
        for source in ('plain', strategy):
            found = two_ranks.run(option_cases.loading, strategy, str(tmp_path / source))[0]
            _assert_alike(found, loaded, f'{source} -> {strategy}')
    _assert_alike(two_ranks.run(option_cases.loading, None, str(tmp_path / STRATEGIES[0]))[0], loaded, 'back to plain')


def test_autoresume(two_ranks, tmp_path):
    expected = two_ranks.run(option_cases.autoresume, None, str(tmp_path / 'plain'))[0]
    for strategy in STRATEGIES:
        found = two_ranks.run(option_cases.autoresume, strategy, str(tmp_path / strategy))[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=strategy)


@pytest.mark.long
def test_object_stores(two_ranks, tmp_path, s3):
    expected = two_ranks.run(option_cases.autoresume, None, str(tmp_path / 'plain'))[0]
    folder = 's3://bucket/checkpoints'
    found = two_ranks.run(option_cases.autoresume, 'zero2', folder, s3)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for strategy in (None, 'zero3-cut'):
        found = two_ranks.run(option_cases.load_from, strategy, f'{folder}/ep0-ba3-rank0.pt', s3)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=str(strategy))
