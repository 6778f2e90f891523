"""The matrix: a checkpoint of any strategy and world size resumes under any other, as if nothing had happened.

One set of fresh processes per place (a strategy at a world size) writes a checkpoint for every case, and is killed
while it trains on; then one set of fresh processes per place goes on from every place's checkpoints. The oracle is an
uninterrupted run of plain Composer on one rank; with dropout, whose masks depend on the rank, on as many ranks.
Consolidated and sharded checkpoints are written at the same moment.

The variable ``COMPOSER_DS_MATRIX`` says how much of it is run:

- ``some``: a few places at world sizes 1 and 2, in the processes that all tests share; part of ``make slow``.
- ``covering``, ``make matrix``: every ordered pair of places with one optimizer, so that each ordered pair of
  strategies is met at all mixed world sizes, and each ordered pair of world sizes with each optimizer; dropout in every
  pair of equal world sizes; skipped optimizer steps and a dataset that keeps its own position in some pairs.
- ``all``, ``COMPOSER_DS_MATRIX=all make matrix``: every pair with every case.

Composer's FSDP is there as FSDP 2: its FSDP 1 needs a GPU (``torch.cuda.current_device`` in ``prepare_fsdp_module``).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from rich.table import Table

from composer_ds.testing import RankPool, RanksFailed
from tests.distributed import matrix_cases
from tests.distributed.matrix_cases import LAST, SAVED_AFTER, checkpoint_in, sharded_checkpoint_in

HOW_MUCH = os.environ.get('COMPOSER_DS_MATRIX', 'some')
# Differences of fp32: the world sizes add the same numbers up in another order.
TOLERANCE = 1e-6
OPTIMIZERS = ['sgd', 'adamw', 'decoupled_adamw', 'cpu_adam']


class Place(NamedTuple):
    """Where a run is at home."""

    strategy: str
    world_size: int

    def __str__(self):
        return f'{self.strategy}@{self.world_size}'

    @property
    def has_zero(self) -> bool:
        """Whether DeepSpeed trains there."""
        return self.strategy not in ('plain', 'fsdp')


ZERO = ['zero1', 'zero1-cpu', 'zero2', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu', 'zero3-cut-cpu-params']
EVERYWHERE = [Place(one, size) for one in ['plain', *ZERO] for size in (1, 2, 4)] + [Place('fsdp', 2), Place('fsdp', 4)]
SOME = [
    Place('plain', 1), Place('zero1', 1), Place('zero3-cut-cpu-params', 1),
    Place('plain', 2), Place('zero1-cpu', 2), Place('zero2', 2), Place('zero3-cut', 2),
]  # fmt: skip
PLACES = SOME if HOW_MUCH == 'some' else EVERYWHERE


def cases_of(source: Place, target: Place, how_much: str) -> list[str]:
    """Choose what is resumed in one place from the checkpoints of another."""
    places = SOME if how_much == 'some' else EVERYWHERE
    number = places.index(source) + places.index(target)
    alike = source.world_size == target.world_size
    # DeepSpeedCPUAdam hands raw memory to its C++ kernel, and crashes on FSDP's DTensors.
    optimizers = [one for one in OPTIMIZERS if one != 'cpu_adam' or 'fsdp' not in (source.strategy, target.strategy)]
    if how_much == 'some':  # DeepSpeedCPUAdam takes two minutes to compile: not here
        cases = [OPTIMIZERS[number % 3]] + ['dropout'] * (alike and number % 2 == 1)
        fifth = number % 5 if source.has_zero or target.has_zero else None
    elif how_much == 'covering':
        cases = [optimizers[number % len(optimizers)]] + ['dropout'] * alike
        fifth = number % 5
    else:
        return optimizers + ['dropout'] * alike + ['own_position'] + ['skipped'] * (source.has_zero and target.has_zero)
    if fifth == 0 and source.has_zero and target.has_zero:
        cases.append('skipped')
    if fifth == 1:
        cases.append('own_position')
    return cases


def _kinds(source: Place, target: Place) -> list[str]:
    """Choose the kinds of checkpoints: sharded ones between places with partitions."""
    if not (source.has_zero and target.has_zero):
        return ['consolidated']
    if HOW_MUCH == 'some':
        return ['sharded'] if (SOME.index(source) + SOME.index(target)) % 2 else ['consolidated']
    return ['consolidated', 'sharded']


@contextlib.contextmanager
def _processes(place: Place, ranks: Callable[[int], RankPool]) -> Iterator[RankPool]:
    if HOW_MUCH == 'some':
        yield ranks(place.world_size)
    else:
        with RankPool(place.world_size, timeout_sec=900) as pool:
            yield pool


def _oracle_of(case: str, world_size: int) -> tuple[str, int]:
    return (case, world_size if case == 'dropout' else 1)


class Written(NamedTuple):
    """What all places have left behind."""

    folder: pathlib.Path
    oracles: dict[tuple[str, int], dict[str, Any]]

    def checkpoint(self, place: Place, case: str, kind: str = 'consolidated') -> str:
        """Return the path of a checkpoint."""
        folder = self.folder / str(place) / case
        return checkpoint_in(folder) if kind == 'consolidated' else sharded_checkpoint_in(folder)


@pytest.fixture(scope='module')
def written(ranks, tmp_path_factory) -> Written:
    """Every place's checkpoints; on the way the uninterrupted runs of plain Composer."""
    found = Written(tmp_path_factory.mktemp('matrix'), {})
    for source in PLACES:
        cases = sorted({case for target in PLACES for case in cases_of(source, target, HOW_MUCH)})
        jobs = []
        for case in cases:
            whole = source.strategy == 'plain' and _oracle_of(case, source.world_size)[1] == source.world_size
            ending = 'whole' if whole else 'stopped'
            jobs.append((case, {'folder': str(found.folder / str(source) / case), 'ending': ending}))
        is_killed = HOW_MUCH != 'some' and jobs[-1][1]['ending'] != 'whole'
        with _processes(source, ranks) as pool:
            runs = pool.run(matrix_cases.run_all, source.strategy, jobs[:-1] if is_killed else jobs)[0]
            if is_killed:
                case, arguments = jobs[-1]
                with pytest.raises(RanksFailed, match='SIGKILL'):
                    pool.run(matrix_cases.run, source.strategy, case, **{**arguments, 'ending': 'killed'})
        for (case, arguments), run in zip(jobs, runs, strict=False):
            if arguments['ending'] == 'whole':
                found.oracles[case, source.world_size] = run
            else:
                _check_samples(run, found.oracles, case, source, slice(None, SAVED_AFTER))
    return found


@pytest.fixture(scope='module')
def differences(request) -> Iterator[dict[tuple[str, str], list[float]]]:
    """The largest difference of weights, by strategies; told at the end as a table."""
    found: dict[tuple[str, str], list[float]] = {}
    yield found
    if HOW_MUCH == 'some':
        return
    strategies = list(dict.fromkeys(place.strategy for place in PLACES))
    table = Table('from \\ to', *strategies, title='Largest difference to the weights of the uninterrupted run')
    for source in strategies:
        cells = [found.get((source, target), []) for target in strategies]
        table.add_row(source, *(f'{max(cell):.0e} ({len(cell)})' if cell else '-' for cell in cells))
    with request.config.pluginmanager.getplugin('capturemanager').global_and_fixture_disabled():
        Console(width=200).print('', table)


@pytest.mark.slow
@pytest.mark.parametrize('target', PLACES, ids=str)
def test_a_checkpoint_of_any_place_resumes_in_any_other(ranks, written, differences, target: Place):
    jobs = [
        (source, case, kind)
        for source in PLACES
        for case in cases_of(source, target, HOW_MUCH)
        for kind in _kinds(source, target)
    ]
    with _processes(target, ranks) as pool:
        arguments = [(case, {'checkpoint': written.checkpoint(source, case, kind)}) for source, case, kind in jobs]
        runs = pool.run(matrix_cases.run_all, target.strategy, arguments)[0]
    for (source, case, kind), run in zip(jobs, runs, strict=True):
        with _naming(f'{case}: {kind}, {source} -> {target}'):
            # Also what a sharded one loads is compared with the consolidated one, written at the same moment.
            saved = torch.load(written.checkpoint(source, case), weights_only=False)['state']
            _check_loaded(run, saved)
            _check_samples(run, written.oracles, case, target, slice(SAVED_AFTER, None))
            difference = _check_continued(run, written.oracles, case, source, target)
            moved = min(float((run['weights'][name] - saved['model'][name]).abs().max()) for name in saved['model'])
            assert moved > 1e-3
        differences.setdefault((source.strategy, target.strategy), []).append(difference)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f'{what}: {error}') from error


def _check_loaded(run: dict[str, Any], saved: dict[str, Any]) -> None:
    """Right after loading, weights and optimizer state are those of the file to the last bit."""
    (optimizer,) = saved['optimizers'].values()
    torch.testing.assert_close(run['loaded']['weights'], dict(saved['model']), rtol=0, atol=0)
    _check_optimizer(run['loaded']['optimizer'], optimizer, 0.0)


def _check_optimizer(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found['state'].keys() == expected['state'].keys()
    for name, state in expected['state'].items():
        assert state.keys() == found['state'][name].keys() != set()
        for key, value in state.items():  # 'step' is a tensor for some, an int for others
            mine, theirs = torch.as_tensor(found['state'][name][key]), torch.as_tensor(value)
            where = f'{name} {key}'
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=tolerance, msg=where)
    for mine, theirs in zip(found['param_groups'], expected['param_groups'], strict=True):
        assert sorted(mine['params']) == sorted(theirs['params'])
        for key in ('lr', 'initial_lr', 'weight_decay', 'momentum', 'betas'):
            if key in theirs:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-12), key


def _check_samples(
    run: dict[str, Any], oracles: dict[tuple[str, int], dict[str, Any]], case: str, place: Place, part: slice
) -> None:
    """Before and after the checkpoint each batch has the samples of the uninterrupted run."""
    oracle = oracles['sgd', 1] if case == 'skipped' else oracles[_oracle_of(case, place.world_size)]
    assert run['samples'] == oracle['samples'][part]


def _check_continued(
    run: dict[str, Any], oracles: dict[tuple[str, int], dict[str, Any]], case: str, source: Place, target: Place
) -> float:
    """After the last batch all is as in the uninterrupted run; return the largest difference of weights."""
    oracle = oracles['sgd', 1] if case == 'skipped' else oracles[_oracle_of(case, target.world_size)]
    assert run['timestamp'] == oracle['timestamp'] and oracle['timestamp']['batch'] == LAST
    rates = oracle['learning_rates']
    assert rates[SAVED_AFTER - 1] != rates[SAVED_AFTER] != rates[0]
    if case == 'skipped':
        # Batches 2 and 6 are skipped, and the schedule waits for them.
        assert run['counts'] == (LAST, LAST - 2, 2, LAST - 2)
        assert run['learning_rates'] == [rates[3], rates[4], rates[4]]
        weights = matrix_cases.skipped_by_hand(rates, oracle['samples'])
    else:
        if target.has_zero:
            assert run['counts'] == (LAST, LAST, 0, LAST)
        found, expected = torch.tensor(run['learning_rates']).double(), torch.tensor(rates[SAVED_AFTER:]).double()
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=0)
        assert run['losses'] == pytest.approx(oracle['losses'][SAVED_AFTER:], rel=0, abs=TOLERANCE)
        _check_optimizer(run['optimizer'], oracle['optimizer'], TOLERANCE)
        weights = oracle['weights']
    torch.testing.assert_close(run['weights'], weights, rtol=0, atol=TOLERANCE)
    return max(float((run['weights'][name] - weights[name]).abs().max()) for name in weights)


def test_the_covering_part_covers_what_it_claims():
    seen = {
        (source, target, case)
        for source in EVERYWHERE
        for target in EVERYWHERE
        for case in cases_of(source, target, 'covering')
    }
    with_an_optimizer = [one for one in seen if one[2] in OPTIMIZERS]
    assert len({one[:2] for one in with_an_optimizer}) == len(with_an_optimizer) == len(EVERYWHERE) ** 2
    sizes = {(source.world_size, target.world_size, case) for source, target, case in with_an_optimizer}
    assert len(sizes) == 3 * 3 * len(OPTIMIZERS)
    for case in ('skipped', 'own_position'):
        pairs = [one[:2] for one in seen if one[2] == case and one[0].has_zero and one[1].has_zero]
        assert len({(source.world_size, target.world_size) for source, target in pairs}) == 9
        assert {source.strategy for source, _ in pairs} == {target.strategy for _, target in pairs} == set(ZERO)
