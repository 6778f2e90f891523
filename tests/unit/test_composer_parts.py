"""Every algorithm and callback of the installed Composer is decided, and the docs page says the same."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import composer.algorithms
import composer.callbacks
import composer.checkpoint
import composer.loggers
import composer.profiler
import pytest
import torch
from composer import Algorithm, Callback
from composer.core import Event

from composer_ds.composer_parts import (
    ALGORITHMS,
    CALLBACKS,
    TRAINER_FEATURES,
    Decision,
    decision_on,
    problems_of_late_surgery,
    problems_of_parts,
)

PAGE = Path(__file__).parents[2] / 'docs' / 'composer_algorithms.md'
TABLES = {'Algorithms': ALGORITHMS, 'Callbacks': CALLBACKS, 'Arguments of the Trainer': TRAINER_FEATURES}


def _classes(package: ModuleType, kind: type) -> dict[str, type]:
    """By name, every public class of a kind that a package defines, whether ``__all__`` names it or not."""
    found = {}
    for module in pkgutil.walk_packages(package.__path__, f'{package.__name__}.'):
        for name, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            mine = cls.__module__.startswith(f'{package.__name__}.')
            if mine and issubclass(cls, kind) and not name.startswith('_'):
                found[name] = cls
    return found


def test_all_of_composer_is_decided():
    algorithms = _classes(composer.algorithms, Algorithm)
    callbacks = _classes(composer.callbacks, Callback)
    assert {'EMA', 'SAM', 'NoOpModel'} <= algorithms.keys() and {
        'MLPerfCallback',
        'ImageVisualizer',
    } <= callbacks.keys()
    assert algorithms.keys() == ALGORITHMS.keys()
    added_by_the_trainer = {'LoggerDestination', 'CheckpointUploadCallback', 'Profiler', 'TraceHandler'}
    added_by_the_trainer |= {'SystemProfiler', 'TorchProfiler'}
    assert callbacks.keys() == CALLBACKS.keys() - added_by_the_trainer
    for package in (composer.checkpoint, composer.loggers, composer.profiler):
        callbacks |= _classes(package, Callback)
    assert added_by_the_trainer <= callbacks.keys()
    for cls in (*algorithms.values(), *callbacks.values()):
        decided = decision_on(cls)
        assert decided is not None and decided[1] is not None, cls


@pytest.mark.parametrize('table', TABLES.values(), ids=TABLES)
def test_decisions_are_whole(table: dict[str, Decision]):
    for name, decision in table.items():
        assert decision.reason, name
        refused = decision.verdict == 'refused'
        assert bool(decision.instead) == (refused or decision.problem is not None), name
        assert bool(decision.limit) == (decision.problem is not None), name


def _row(name: str, decision: Decision) -> str:
    verdict = f'{decision.verdict}: {decision.limit}' if decision.limit else decision.verdict
    text = decision.reason[0].upper() + decision.reason[1:]
    if decision.instead:
        text = f'{text.rstrip(".")}. Instead: {decision.instead}.'
    return f'| `{name}` | {verdict} | {text} |'


@pytest.mark.parametrize('heading', TABLES)
def test_the_docs_say_the_same(heading: str):
    section = PAGE.read_text().partition(f'\n## {heading}\n')[2].partition('\n## ')[0]
    written = [line for line in section.splitlines() if line.startswith('| `')]
    expected = [_row(name, decision) for name, decision in sorted(TABLES[heading].items())]
    assert written == expected, f'docs/composer_algorithms.md, {heading}, needs these lines:\n' + '\n'.join(expected)


def _part(name: str, module: str = 'composer.algorithms.new', **attributes: Any) -> Any:
    """An object of a class of this name."""
    return type(name, (), {'__module__': module, **attributes})()


def _problems(*parts: Any, zero_stage: int = 2) -> list[str]:
    return list(problems_of_parts(parts, zero_stage))


def test_what_is_refused_is_named_with_reason_and_alternative():
    refused = {name: d for table in (ALGORITHMS, CALLBACKS) for name, d in table.items() if d.verdict == 'refused'}
    assert {'SAM', 'SWA', 'SeqLengthWarmup', 'OptimizerMonitor', 'ExportForInferenceCallback'} <= refused.keys()
    for name, decision in refused.items():
        (message,) = _problems(_part(name))
        assert message.startswith(f'{name} does not work with DeepSpeed')
        assert decision.reason in message and decision.instead in message


def test_what_works_passes():
    names = [name for table in (ALGORITHMS, CALLBACKS) for name, d in table.items() if d.verdict != 'refused']
    conditional = [name for name in names if (ALGORITHMS | CALLBACKS)[name].problem is not None]
    assert _problems(*(_part(name) for name in names if name not in conditional)) == []
    assert len(conditional) == 4


def test_subclasses_of_the_users_are_treated_like_their_base():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        mine = type('Sharp', (composer.algorithms.SAM,), {'__module__': 'mine'})()
    (message,) = _problems(mine)
    assert message.startswith('Sharp (a SAM) does not work')
    assert _problems(type('Gentle', (composer.algorithms.EMA,), {'__module__': 'mine'})()) == []


def test_the_users_own_pass_and_composers_new_ones_do_not():
    assert _problems(_part('SAM', module='mine'), _part('Anything', module='composer_of_mine.parts')) == []
    (message,) = _problems(_part('Newest'))
    assert 'Newest' in message and 'nobody has decided' in message and '0.32.1' in message


def test_second_derivatives_are_refused():
    (message,) = _problems(_part('Penalty', module='mine', backwards_create_graph=True))
    assert 'Penalty' in message and 'backwards_create_graph' in message


@pytest.mark.parametrize('norm', [composer.algorithms.LowPrecisionLayerNorm, composer.algorithms.LowPrecisionGroupNorm])
def test_layers_are_replaced_at_init_only(norm: Any):
    assert _problems(norm()) == []
    for event in (Event.BEFORE_LOAD, Event.AFTER_LOAD):
        (message,) = _problems(norm(apply_at=event))
        assert event.name in message and 'apply_at' in message


def test_blocks_are_dropped_under_zero_1_only():
    def depth(method: str) -> Any:
        return composer.algorithms.StochasticDepth('ResNetBottleneck', stochastic_method=method)

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert _problems(depth('sample'), zero_stage=3) == _problems(depth('block'), zero_stage=1) == []
        for stage in (2, 3):
            (message,) = _problems(depth('block'), zero_stage=stage)
            assert f'ZeRO {stage}' in message and "stochastic_method='sample'" in message


def test_checkpoints_are_loaded_outside_of_a_batch():
    def load(event: Event, weights_only: bool = False) -> Any:
        return composer.callbacks.LoadCheckpoint('saved.pt', load_weights_only=weights_only, event=event)

    for event in (Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_START):
        assert _problems(load(event)) == []
    assert _problems(load(Event.INIT, weights_only=True)) == []
    assert 'optimizer state' in _problems(load(Event.INIT))[0]
    assert 'AFTER_FORWARD' in _problems(load(Event.AFTER_FORWARD))[0]


def test_new_parameters_are_found():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    taken = frozenset(model.parameters())
    assert list(problems_of_late_surgery(model, taken)) == []
    model[1] = torch.nn.Linear(2, 2)
    (message,) = problems_of_late_surgery(model, taken)
    assert '1.weight, 1.bias' in message and '0.weight' not in message
