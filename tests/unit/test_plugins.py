"""Names from outside: import paths, and entry points of packages that are installed beside composer_ds."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from composer import Algorithm, Callback
from composer.loggers import LoggerDestination

from composer_ds.errors import ConfigError
from composer_ds.launch.build import make, make_optimizer
from composer_ds.launch.check import RunConfig, check
from composer_ds.launch.config_file import ConfigFile

MODULE = """\
import torch
from composer import Algorithm, Callback
from composer.loggers import LoggerDestination
from composer.optim import ConstantScheduler
from tests.recipes.tiny_recipe import DataConfig, ModelConfig, build

VALUE = 3


def slow_sgd(params, lr: float, slowness: float = 10.0):
    return torch.optim.SGD(params, lr=lr / slowness)


def constant(alpha: float = 1.0):
    return ConstantScheduler(alpha)


class Watch(Callback):
    def __init__(self, interval: int = 1):
        self.interval = interval


class Log(LoggerDestination):
    pass


class Surgery(Algorithm):
    def __init__(self, depth: int):
        self.depth = depth

    def match(self, event, state):
        return False

    def apply(self, event, state, logger):
        pass
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package with a module and, if asked, entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, 'path', [*sys.path])

    def install(name: str, entry_points: str = '') -> None:
        (tmp_path / f'{name}.py').write_text(MODULE)
        info = tmp_path / f'{name}-1.0.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
        (info / 'entry_points.txt').write_text(entry_points)

    yield install
    for name in [name for name in sys.modules if name.startswith('theirs')]:
        del sys.modules[name]


def _checked(**values: Any) -> RunConfig:
    default = {
        'task': 'tests.recipes.tiny_recipe',
        'optimizer': {'name': 'sgd', 'lr': 0.1},
        'train': {'max_duration': '1ba'},
    }
    return check(ConfigFile('run.yaml', {**default, **values}))


def _objects(config: RunConfig) -> None:
    """Make everything, and look at it."""
    optimizer = make_optimizer(config.optimizer, torch.nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]['lr'] == pytest.approx(0.02)
    assert config.scheduler is not None and make(config.scheduler).alpha == 0.5
    (watch,) = (make(choice, Callback) for choice in config.callbacks)
    assert watch.interval == 7
    (algorithm,) = (make(choice, Algorithm) for choice in config.algorithms)
    assert algorithm.depth == 2
    (logger,) = (make(choice, LoggerDestination) for choice in config.loggers)
    assert type(logger).__name__ == 'Log'


def test_import_paths(package):
    package('theirs')
    _objects(
        _checked(
            task='theirs',
            optimizer={'name': 'theirs:slow_sgd', 'lr': 0.1, 'slowness': 5},
            scheduler={'name': 'theirs:constant', 'alpha': 0.5},
            algorithms={'theirs:Surgery': {'depth': 2}},
            callbacks={'theirs:Watch': {'interval': 7}},
            loggers={'theirs:Log': None},
        )
    )


def test_entry_points(package):
    package(
        'theirs',
        """\
[composer_ds_tasks]
their_task = theirs
[composer_ds_optimizers]
slow = theirs:slow_sgd
[composer_ds_schedulers]
theirs_constant = theirs:constant
[composer_ds_algorithms]
surgery = theirs:Surgery
[composer_ds_callbacks]
watch = theirs:Watch
broken = there_is_no_such_module:Thing
[composer_ds_loggers]
log = theirs:Log
""",
    )
    config = _checked(
        task='their_task',
        optimizer={'name': 'slow', 'lr': 0.1, 'slowness': 5},
        scheduler={'name': 'theirs_constant', 'alpha': 0.5},
        algorithms={'surgery': {'depth': 2}},
        callbacks={'watch': {'interval': 7}},  # `broken` is not imported
        loggers={'log': None},
    )
    _objects(config)
    assert vars(config.recipe)['__name__'] == 'theirs'
    with pytest.raises(ConfigError, match=r'callbacks.wacht .*did you mean .watch.*zero_memory_monitor, broken, watch'):
        _checked(callbacks={'wacht': None})


@pytest.mark.parametrize(
    ('values', 'words'),
    [
        ({'callbacks': {'no_such_package.x:Y': None}}, "no module 'no_such_package' to import"),
        ({'callbacks': {'theirs:Wacht': None}}, "no 'Wacht' in the module theirs; did you mean 'Watch'"),
        ({'callbacks': {'theirs:VALUE': None}}, 'theirs:VALUE is int; a class or a function is needed'),
        ({'callbacks': {'theirs:Watch': {'intervall': 2}}}, "did you mean 'interval'"),
        ({'callbacks': {'theirs:Watch': {'interval': 'often'}}}, 'callbacks.theirs:Watch.interval = .often.'),
        ({'optimizer': {'name': 'theirs:slow_sgd', 'lr': 0.1, 'params': []}}, "the launcher gives the model's param"),
        ({'optimizer': {'name': 'nadam', 'lr': 0.1}}, "import path 'my_package.module:name'"),
    ],
)
def test_what_is_wrong_with_a_name_is_told(package, values, words):
    package('theirs')
    with pytest.raises(ConfigError, match=words):
        _checked(**values)


def test_an_object_of_another_kind_is_refused(package):
    package('theirs')
    (choice,) = _checked(callbacks={'theirs:constant': None}).callbacks
    with pytest.raises(ConfigError, match=r'callbacks.theirs:constant: constant made a .*; a Callback is needed'):
        make(choice, Callback)


def test_two_packages_with_one_name_are_both_named(package):
    package('theirs_a', '[composer_ds_callbacks]\nwatch = theirs_a:Watch\nlr_monitor = theirs_a:Watch\n')
    package('theirs_b', '[composer_ds_callbacks]\nwatch = theirs_b:Watch\n')
    with pytest.raises(ConfigError) as error:
        _checked(callbacks={'speed_monitor': None})
    assert "theirs_a and theirs_b both have the name 'watch'" in str(error.value)
    assert "composer_ds and theirs_a both have the name 'lr_monitor'" in str(error.value)


def test_what_watches_deepspeed_is_left_out_without_it(capsys):
    callbacks = {'deepspeed_monitor': None, 'lr_monitor': None, 'zero_memory_monitor': {'interval': 3}}
    config = _checked(callbacks=callbacks)
    assert [choice.section for choice in config.callbacks] == ['callbacks.lr_monitor']
    assert config.left_out == ['deepspeed_monitor', 'zero_memory_monitor']
    assert list(config.resolved['callbacks']) == ['lr_monitor']
    with pytest.raises(ConfigError, match='interval'):  # it is checked all the same
        _checked(callbacks={'zero_memory_monitor': {'interval': 'often'}})
    config = _checked(callbacks=callbacks, deepspeed={'zero_stage': 1})
    assert len(config.callbacks) == 3 and config.left_out == []
