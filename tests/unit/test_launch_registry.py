"""The registry: each name stands for the class it says, and takes the arguments of that class."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import composer.callbacks
import composer.loggers
import composer.optim
import pytest
import torch
from composer import Algorithm, Callback
from composer.optim import ComposerScheduler

from composer_ds.errors import ConfigError
from composer_ds.launch import registry
from composer_ds.launch.arguments import Choice
from composer_ds.launch.build import make
from composer_ds.launch.check import check
from composer_ds.launch.config_file import ConfigFile
from composer_ds.launch.imports import load

TABLES = {
    'optimizer': registry.OPTIMIZERS,
    'scheduler': registry.SCHEDULERS,
    'algorithms': registry.ALGORITHMS,
    'callbacks': registry.CALLBACKS,
    'loggers': registry.LOGGERS,
}
ENTRIES = [(section, name) for section, table in TABLES.items() for name in table]


def choose(section: str, name: str, arguments: dict[str, Any]) -> Choice:
    """Checks a run whose one interesting entry is the given one."""
    values: dict[str, Any] = {
        'task': 'tests.recipes.tiny_recipe',
        'optimizer': {'name': 'sgd', 'lr': 0.1},
        'train': {'max_duration': '1ba'},
        'deepspeed': {'zero_stage': 1},  # some callbacks are left out without it
    }
    values[section] = {'name': name, **arguments} if section in ('optimizer', 'scheduler') else {name: arguments}
    choice = getattr(check(ConfigFile('run.yaml', values)), section)
    return choice[0] if isinstance(choice, list) else choice


@pytest.mark.parametrize(('section', 'name'), ENTRIES)
def test_an_entry_is_a_class_of_its_kind(section, name):
    kind = {
        'optimizer': torch.optim.Optimizer,
        'scheduler': ComposerScheduler,
        'algorithms': Algorithm,
        'callbacks': Callback,
        'loggers': composer.loggers.LoggerDestination,
    }[section]
    assert kind in load(TABLES[section][name]).__mro__  # a Protocol allows no issubclass()


def test_optimizers_are_the_named_ones():
    assert {name: load(path) for name, path in registry.OPTIMIZERS.items()} == {
        'adamw': torch.optim.AdamW,
        'adam': torch.optim.Adam,
        'sgd': torch.optim.SGD,
        'decoupled_adamw': composer.optim.DecoupledAdamW,
        'decoupled_sgdw': composer.optim.DecoupledSGDW,
    }


def test_every_scheduler_of_composer_has_a_name():
    of_composer = {name for name in composer.optim.__all__ if name.endswith('Scheduler')} - {'ComposerScheduler'}
    assert {load(path).__name__ for path in registry.SCHEDULERS.values()} == of_composer
    for name, path in registry.SCHEDULERS.items():
        words = load(path).__name__.lower()
        assert all(word in words for word in name.split('_')), f'{name} is {words}'


def test_every_callback_of_composer_has_a_name():
    left_out = {
        'CheckpointSaver',  # the section `checkpoint`
        'ExportForInferenceCallback',  # exports on rank 0 alone, which has no whole model under DeepSpeed
        'ImageVisualizer',  # draws on the device's own batches, through functions
        'MLPerfCallback',  # needs a checkout of mlperf_logging
    }
    named = {load(path).__name__ for path in registry.CALLBACKS.values() if path.startswith('composer.')}
    assert named == set(composer.callbacks.__all__) - left_out


def test_every_logger_of_composer_has_a_name():
    left_out = {
        'Logger', 'LoggerDestination', 'ProgressBarLogger', 'ConsoleLogger',  # the Trainer makes these
        'InMemoryLogger',  # for code, which reads it afterwards
        'MosaicMLLogger',  # for one vendor's platform, where the Trainer adds it
    }  # fmt: skip
    assert {load(path).__name__ for path in registry.LOGGERS.values()} == (set(composer.loggers.__all__) - left_out)


@pytest.mark.parametrize(('section', 'name'), ENTRIES)
def test_an_unknown_argument_is_answered_with_the_nearest_of_the_signature(section, name):
    parameters = inspect.signature(load(TABLES[section][name])).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        pytest.skip(f'{name} takes any keyword argument')
    known = [name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
    known = [name for name in known if name not in ('params', 'kwargs', 'slack_logging_api_key')]
    typo = f'{known[-1]}_' if known else 'anything'
    examples: dict[str, Any] = {
        **dict.fromkeys(('gamma', 'power', 'threshold', 'clipping_threshold'), 0.5),
        'milestones': ['1ba'],
        'clipping_type': 'norm',
        'max_sequence_length': 8,
    }
    required = {
        name: examples.get(name, '1ba') for name in known if parameters[name].default is inspect.Parameter.empty
    }
    with pytest.raises(ConfigError) as caught:
        choose(section, name, {**required, typo: 1})
    (problem,) = caught.value.problems
    path = section if section in ('optimizer', 'scheduler') else f'{section}.{name}'
    hint = f"; did you mean '{known[-1]}'?" if known else '. Allowed: nothing'
    assert problem.startswith(f'{path}.{typo} = 1 (in run.yaml): unknown key{hint}')


ARGUMENTS = [
    ('optimizer', 'adamw', {'lr': 0.5, 'betas': [0.8, 0.9], 'eps': 1e-6, 'weight_decay': 0.2}),
    ('optimizer', 'adam', {'lr': 0.5, 'betas': [0.8, 0.9], 'amsgrad': True}),
    ('optimizer', 'sgd', {'lr': 0.5, 'momentum': 0.9, 'nesterov': True}),
    ('optimizer', 'decoupled_adamw', {'lr': 0.5, 'betas': [0.8, 0.9], 'weight_decay': 1e-4}),
    ('optimizer', 'decoupled_sgdw', {'lr': 0.5, 'momentum': 0.9, 'weight_decay': 1e-4}),
    ('scheduler', 'constant', {'alpha': 0.5, 't_max': '3ba'}),
    ('scheduler', 'constant_with_warmup', {'t_warmup': '2ba', 'scale_warmup': True}),
    ('scheduler', 'linear', {'alpha_i': 0.5, 'alpha_f': 0.1, 't_max': '3ba'}),
    ('scheduler', 'linear_with_warmup', {'t_warmup': '2ba', 'alpha_f': 0.1}),
    ('scheduler', 'cosine', {'alpha_f': 0.1, 't_max': '3ba'}),
    ('scheduler', 'cosine_with_warmup', {'t_warmup': '2ba', 'alpha_f': 0.1}),
    ('scheduler', 'cosine_warm_restarts', {'t_0': '2ba', 't_mult': 2.0, 'alpha_f': 0.1}),
    ('scheduler', 'polynomial', {'power': 2.0, 'alpha_f': 0.1}),
    ('scheduler', 'polynomial_with_warmup', {'t_warmup': '2ba', 'power': 3.0}),
    ('scheduler', 'exponential', {'gamma': 0.5, 'decay_period': '2ba'}),
    ('scheduler', 'step', {'step_size': '2ba', 'gamma': 0.5}),
    ('scheduler', 'multi_step', {'milestones': ['2ba', '4ba'], 'gamma': 0.5}),
    ('scheduler', 'multi_step_with_warmup', {'t_warmup': '2ba', 'milestones': ['2ba', '4ba']}),
    ('callbacks', 'activation_monitor', {'ignore_module_types': ['Linear']}),
    ('callbacks', 'early_stopper', {'monitor': 'PER', 'dataloader_label': 'eval', 'min_delta': 0.5}),
    ('callbacks', 'generate', {'prompts': ['a'], 'interval': '2ba', 'batch_size': 3}),
    ('callbacks', 'load_checkpoint', {'load_path': 'x.pt', 'load_weights_only': True}),
    ('callbacks', 'lr_monitor', {}),
    ('callbacks', 'memory_monitor', {'memory_keys': {'a': 'b'}, 'dist_aggregate_batch_interval': 2}),
    ('callbacks', 'nan_monitor', {}),
    ('callbacks', 'free_outputs', {}),
    ('callbacks', 'oom_observer', {'max_entries': 3, 'overwrite': True}),
    ('callbacks', 'memory_snapshot', {'skip_batches': 3, 'overwrite': True}),
    ('callbacks', 'optimizer_monitor', {'batch_log_interval': 3}),
    ('callbacks', 'threshold_stopper', {'monitor': 'PER', 'dataloader_label': 'eval', 'threshold': 0.5}),
    ('loggers', 'file', {'buffer_size': 3, 'flush_interval': 4, 'capture_stdout': False}),
    ('loggers', 'wandb', {'project': 'p', 'entity': 'e'}),
]


@pytest.mark.parametrize(('section', 'name', 'arguments'), ARGUMENTS, ids=[name for _, name, _ in ARGUMENTS])
def test_arguments_arrive_on_the_object(section, name, arguments):
    parameter = torch.nn.Parameter(torch.zeros(2))
    fixed: dict[str, Any] = {'params': [parameter]} if section == 'optimizer' else {}
    built = make(choose(section, name, arguments), **fixed)
    assert type(built) is load(TABLES[section][name])
    if isinstance(built, torch.optim.Optimizer):
        group = built.param_groups[0]
        assert {key: list(value) if key == 'betas' else value for key, value in group.items() if key in arguments} == (
            arguments
        )
        assert group['params'] == [parameter]
        return
    stored = {key: value for key, value in vars(built).items() if key in arguments}
    assert stored or not arguments, f'{name} keeps none of {list(arguments)} under their names'
    for key, value in stored.items():
        times = isinstance(value, composer.Time)
        assert (value.to_timestring() if times else value) == arguments[key], key


def test_speed_monitor_and_runtime_estimator_keep_their_arguments_under_other_names():
    assert make(choose('callbacks', 'speed_monitor', {'window_size': 7})).history_samples.maxlen == 8
    assert make(choose('callbacks', 'runtime_estimator', {'time_unit': 'seconds'})).divider == 1


def test_tensorboard_where_it_is_installed(tmp_path):
    pytest.importorskip('tensorboard')
    assert make(choose('loggers', 'tensorboard', {'log_dir': str(tmp_path)})).log_dir == str(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec('neptune') is not None, reason='neptune is installed')
def test_a_logger_whose_package_is_missing_names_the_remedy():
    with pytest.raises(ConfigError, match=r'loggers\.neptune: NeptuneLogger refused .*pip install'):
        make(choose('loggers', 'neptune', {}))


@pytest.mark.parametrize(
    ('section', 'name', 'key', 'remedy'),
    [
        ('loggers', 'neptune', 'api_token', 'NEPTUNE_API_TOKEN'),
        ('loggers', 'slack', 'slack_logging_api_key', 'SLACK_LOGGING_API_KEY'),
        ('optimizer', 'adamw', 'params', 'the launcher gives'),
    ],
)
def test_secrets_and_parameters_do_not_come_from_the_yaml(section, name, key, remedy):
    assert key in inspect.signature(load(TABLES[section][name])).parameters
    with pytest.raises(ConfigError) as caught:
        choose(section, name, {key: 'secret value'})
    assert f'{key} (in run.yaml): cannot be given here' in str(caught.value)
    assert remedy in str(caught.value) and 'secret value' not in str(caught.value)
