"""The checks of a run's values: what is accepted, what each error says, and that all errors come at once."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import composer
import pytest
import torch
import yaml

import composer_ds
from composer_ds.errors import ConfigError
from composer_ds.launch.check import RunConfig, check
from composer_ds.launch.config_file import read
from composer_ds.launch.schema import CheckpointConfig, DeepSpeedConfig, Layout, TrainConfig
from tests.recipes import tiny_recipe

MINIMAL: dict[str, Any] = {
    'task': 'tests.recipes.tiny_recipe',
    'optimizer': {'name': 'sgd', 'lr': 0.1},
    'train': {'max_duration': '3ba'},
}


@pytest.fixture
def checked(tmp_path):
    """Writes MINIMAL with other sections, and checks it with overrides."""

    def run(*overrides: str, **sections: Any) -> RunConfig:
        path = tmp_path / 'run.yaml'
        path.write_text(yaml.safe_dump({**MINIMAL, **sections}, sort_keys=False))
        return check(read(str(path), overrides))

    return run


@pytest.fixture
def problems(checked):
    """The same for a run that must be refused."""

    def run(*overrides: str, **sections: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            checked(*overrides, **sections)
        return caught.value.problems

    return run


def test_a_minimal_run_gets_defaults(checked):
    run = checked()
    assert run.recipe is tiny_recipe
    assert run.model == tiny_recipe.ModelConfig()
    assert run.optimizer.factory is torch.optim.SGD
    assert run.optimizer.arguments == {'lr': 0.1}
    assert run.train.model_dump(exclude_unset=True) == {'max_duration': '3ba'}
    assert (run.scheduler, run.deepspeed, run.callbacks, run.loggers, run.layout.seed) == (None, None, [], [], 17)


def test_every_section_arrives(checked):
    run = checked(
        'deepspeed.zero_stage=3',
        'model.init.scale=2',
        model={'width': 5},
        data={'samples': 8},
        scheduler={'name': 'linear_with_warmup', 't_warmup': '2ba'},
        deepspeed={'zero_stage': 1, 'offload_optimizer': 'cpu', 'ds_config': {'gradient_clipping': 1.0}},
        callbacks={'speed_monitor': {'window_size': 7}, 'lr_monitor': None},
        loggers={'wandb': {'name': 'mine', 'init_kwargs': {'mode': 'offline'}}},
        checkpoint={'save_folder': 'here', 'save_interval': '1ep'},
    )
    assert run.model == tiny_recipe.ModelConfig(width=5, init=tiny_recipe.InitConfig(scale=2.0))
    assert run.data == tiny_recipe.DataConfig(samples=8)
    assert run.scheduler is not None and run.scheduler.arguments == {'t_warmup': '2ba'}
    assert run.deepspeed is not None
    assert run.deepspeed.model_dump(exclude_unset=True) == {
        'zero_stage': 3, 'offload_optimizer': 'cpu', 'ds_config': {'gradient_clipping': 1.0}
    }  # fmt: skip
    assert [(choice.section, choice.arguments) for choice in run.callbacks] == [
        ('callbacks.speed_monitor', {'window_size': 7}),
        ('callbacks.lr_monitor', {}),
    ]
    assert run.loggers[0].arguments == {'name': 'mine', 'init_kwargs': {'mode': 'offline'}}
    assert run.checkpoint.model_dump(exclude_unset=True) == {'save_folder': 'here', 'save_interval': '1ep'}
    # What is logged holds the defaults of the task, too, and only plain values.
    assert run.resolved['model'] == {'width': 5, 'init': {'scale': 2.0}}
    assert yaml.safe_load(yaml.safe_dump(run.resolved)) == run.resolved


def test_false_switches_an_entry_off_and_null_or_true_mean_defaults(checked):
    entries = {'speed_monitor': None, 'lr_monitor': True, 'memory_monitor': False, 'nan_monitor': {}}
    run = checked('callbacks.nan_monitor=false', callbacks=entries, loggers={'wandb': False})
    assert [choice.section for choice in run.callbacks] == ['callbacks.speed_monitor', 'callbacks.lr_monitor']
    assert run.loggers == []


def test_empty_sections_are_like_absent_ones(checked):
    run = checked(model=None, data=None, deepspeed=None, callbacks=None, loggers=None, checkpoint=None, scheduler=None)
    assert run.resolved == checked().resolved
    assert (run.deepspeed, run.scheduler, run.callbacks, run.loggers) == (None, None, [], [])


@pytest.mark.parametrize(
    ('override', 'path', 'value', 'nearest'),
    [
        ('trian.max_duration=1ep', 'trian', "{'max_duration': '1ep'}", 'train'),
        ('train.max_duraton=1ep', 'train.max_duraton', "'1ep'", 'max_duration'),
        ('deepspeed.zero_stag=1', 'deepspeed.zero_stag', '1', 'zero_stage'),
        ('checkpoint.save_foldr=x', 'checkpoint.save_foldr', "'x'", 'save_folder'),
        ('model.widht=1', 'model.widht', '1', 'width'),
        ('model.init.scal=1', 'model.init.scal', '1', 'scale'),
        ('data.sample=1', 'data.sample', '1', 'samples'),
        ('optimizer.momentm=0.9', 'optimizer.momentm', '0.9', 'momentum'),
        ('scheduler.t_warmpu=1ba', 'scheduler.t_warmpu', "'1ba'", 't_warmup'),
        ('callbacks.speed_monitor.window=1', 'callbacks.speed_monitor.window', '1', 'window_size'),
        ('loggers.wandb.projet=x', 'loggers.wandb.projet', "'x'", 'project'),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_match(problems, override, path, value, nearest):
    scheduler = {'name': 'linear_with_warmup', 't_warmup': '1ba'}
    (problem,) = problems(override, scheduler=scheduler)
    assert problem.startswith(f'{path} = {value} (on the command line): unknown key; ')
    assert f"; did you mean '{nearest}'? Allowed: " in problem
    assert nearest in problem.split('Allowed: ')[1].split(', ')


def test_an_unknown_key_of_the_file_is_told_with_its_line(problems, tmp_path):
    (problem,) = problems(train={'max_duration': '1ep', 'max_duraton': 10})
    line = (tmp_path / 'run.yaml').read_text().splitlines().index('  max_duraton: 10') + 1
    assert problem.startswith(f'train.max_duraton = 10 (in {tmp_path / "run.yaml"}, line {line}): unknown key')


@pytest.mark.parametrize(
    ('override', 'full_path'),
    [
        ('max_duration=1ep', 'train.max_duration'),
        ('zero_stage=1', 'deepspeed.zero_stage'),
        ('save_folder=x', 'checkpoint.save_folder'),
    ],
)
def test_a_key_without_its_section_is_answered_with_its_full_path(problems, override, full_path):
    (problem,) = problems(override)
    assert problem.endswith(f"unknown key here; did you mean '{full_path}'?")


@pytest.mark.parametrize(
    ('override', 'beginning', 'reason'),
    [
        ('deepspeed.zero_stage=two', "deepspeed.zero_stage = 'two' (", '0, 1, 2 or 3'),
        ('deepspeed.zero_stage=4', 'deepspeed.zero_stage = 4 (', '0, 1, 2 or 3'),
        ('deepspeed.zero_stage=true', 'deepspeed.zero_stage = True (', '0, 1, 2 or 3'),
        ('deepspeed.offload_optimizer=gpu', "deepspeed.offload_optimizer = 'gpu' (", "'cpu'"),
        ('deepspeed=5', 'deepspeed = 5 (', 'mapping'),
        ('train.max_duration=3bananas', "train.max_duration = '3bananas' (", "'1200ba'"),
        ('train.max_duration=0ba', "train.max_duration = '0ba' (", 'greater than zero'),
        ('train.max_duration=1.5ba', "train.max_duration = '1.5ba' (", "'1200ba'"),
        ('train.eval_interval=often', "train.eval_interval = 'often' (", "'1200ba'"),
        ('train.precision=bf16', "train.precision = 'bf16' (", "'amp_bf16'"),
        ('train.device_train_microbatch_size=0', 'train.device_train_microbatch_size = 0 (', 'greater than 0'),
        ('train.device_train_microbatch_size=auto', "train.device_train_microbatch_size = 'auto' (", 'FSDP'),
        ('seed=-1', 'seed = -1 (', 'greater than or equal to 0'),
        ('task=5', 'task = 5 (', 'valid string'),
        ('optimizer=5', 'optimizer = 5 (', 'mapping'),
        ('optimizer.lr=fast', "optimizer.lr = 'fast' (", 'valid number'),
        ('optimizer.params=[]', 'optimizer.params (', 'cannot be given here'),
        ('scheduler.t_warmup=3bananas', "scheduler.t_warmup = '3bananas' (", "'1200ba'"),
        ('model.width=wide', "model.width = 'wide' (", 'valid integer'),
        ('model.init=wide', "model.init = 'wide' (", 'mapping'),
        ('callbacks.speed_monitor=5', 'callbacks.speed_monitor = 5 (', 'mapping'),
        ('checkpoint.load_ignore_keys=a', "checkpoint.load_ignore_keys = 'a' (", 'valid list'),
        ('optimizer.name=sdg', 'optimizer.name (', "unknown name 'sdg'; did you mean 'sgd'? Allowed: adamw"),
        ('optimizer.name=[sgd]', 'optimizer.name (', "unknown name ['sgd']"),
        ('scheduler.name=linear_warmup', 'scheduler.name (', "did you mean 'linear_with_warmup'?"),
        ('callbacks.lr_moniter=null', 'callbacks.lr_moniter (', "did you mean 'lr_monitor'?"),
        ('loggers.wnadb=null', 'loggers.wnadb (', "did you mean 'wandb'?"),
        ('task=tests.recipes.tiny_recip', "task = 'tests.recipes.tiny_recip' (", "'tests.recipes.tiny_recipe'?"),
        ('task=no_such_module', "task = 'no_such_module' (", "no module 'no_such_module'"),
        ('task=.mt5', "task = '.mt5' (", 'import path'),
        ('task=os', "task = 'os' (", 'lacks ModelConfig, DataConfig, build'),
    ],
)
def test_a_wrong_value_is_told_with_path_value_and_what_is_allowed(problems, override, beginning, reason):
    (problem,) = problems(override, scheduler={'name': 'constant_with_warmup', 't_warmup': '1ba'})
    assert problem.startswith(f'{beginning}on the command line): ')
    assert reason in problem


def test_missing_keys_are_named(problems):
    found = problems(optimizer={'lr': 0.1}, train={}, scheduler={'name': 'linear_with_warmup'}, loggers={'neptune': {}})
    assert [problem.split(' ')[0].rstrip(':') for problem in found] == [
        'optimizer.name', 'scheduler.t_warmup', 'train.max_duration'
    ]  # fmt: skip
    assert all('required key is missing' in problem for problem in found)


def test_values_that_cannot_be_resolved_are_reported_once_and_with_the_reason(problems):
    (problem,) = problems('train.max_duration=${nope}')
    assert problem.startswith('train.max_duration (on the command line): ') and "'nope' not found" in problem


def test_a_class_that_no_yaml_value_can_be_is_not_offered(problems):
    (problem,) = problems('optimizer.lr=fast')  # annotated as float | torch.Tensor
    assert 'Tensor' not in problem


def test_too_few_values_are_not_called_a_missing_key(problems):
    (problem,) = problems('optimizer.name=adamw', 'optimizer.betas=[0.9]')
    assert problem.endswith('optimizer.betas = [0.9] (on the command line): has too few values')


def test_all_problems_come_at_once(problems):
    found = problems(
        'zero_stage=3',
        'optimizer.lr=x',
        task='no_such_module',
        run_name=5,
        optimizer={'name': 'sgd', 'lrr': 1},
        scheduler={'name': 'nope'},
        train={'max_duration': 'x', 'precision': 'x', 'y': 1},
        deepspeed={'zero_stage': 'two'},
        callbacks={'lr_monitor': {'a': 1}, 'nope': None},
        loggers={'wandb': {'projet': 'x'}},
        checkpoint={'save_interval': 'x'},
    )
    paths = [problem.split(' ')[0] for problem in found]
    assert sorted(paths) == sorted(
        [
            'zero_stage', 'task', 'run_name', 'optimizer.lr', 'optimizer.lrr', 'scheduler.name', 'train.max_duration',
            'train.precision', 'train.y', 'deepspeed.zero_stage', 'callbacks.lr_monitor.a', 'callbacks.nope',
            'loggers.wandb.projet', 'checkpoint.save_interval',
        ]
    )  # fmt: skip


def test_an_error_inside_the_task_is_not_hidden(checked, tmp_path, monkeypatch):
    (tmp_path / 'broken_task.py').write_text('import a_package_nobody_has\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match='a_package_nobody_has'):
        checked('task=broken_task')


def test_a_task_in_the_working_directory_is_found(checked, tmp_path, monkeypatch):
    source = 'from tests.recipes.tiny_recipe import DataConfig, ModelConfig, build\n'
    (tmp_path / 'task_of_a_user.py').write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [entry for entry in sys.path if entry])
    assert checked('task=task_of_a_user').recipe.__name__ == 'task_of_a_user'


@pytest.mark.parametrize('section', [TrainConfig, CheckpointConfig])
def test_keys_and_defaults_are_those_of_the_trainer(section):
    trainer = inspect.signature(composer.Trainer).parameters
    for name, field in section.model_fields.items():
        assert name in trainer
        if name != 'max_duration':  # the Trainer lets fit() give it
            assert field.default == trainer[name].default, name


def test_the_trainer_has_no_argument_that_the_yaml_forgot():
    covered = {*TrainConfig.model_fields, *CheckpointConfig.model_fields, *Layout.model_fields}
    built = {'train_dataloader', 'eval_dataloader', 'optimizers', 'schedulers'}
    objects = {'algorithm_passes', 'load_object_store', 'profiler', 'parallelism_config'}
    not_offered = {
        'train_dataloader_label',  # names in the logs; the task's evaluators have their own
        'auto_log_hparams',  # the whole configuration is logged
        'compile_config',  # torch.compile is not supported under DeepSpeed's hooks
        'precision_config',  # fp8 recipes are objects of Transformer Engine
    }
    assert set(inspect.signature(composer.Trainer).parameters) - covered == built | objects | not_offered


def test_keys_and_defaults_are_those_of_the_algorithm():
    parameters = inspect.signature(composer_ds.DeepSpeed).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        name: field.default for name, field in DeepSpeedConfig.model_fields.items()
    }
