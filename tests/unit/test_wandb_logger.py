"""The W&B logger: what it asks of wandb, and what it says when there is no run. The real wandb is in tests/recipes."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import Any

import composer.loggers
import pytest
import wandb

from composer_ds.errors import EnvironmentProblem
from composer_ds.wandb_logger import WandBLogger

STATE: Any = SimpleNamespace(
    run_name='name-of-the-job',
    callbacks=[],
    algorithms=[],
    timestamp=SimpleNamespace(batch=SimpleNamespace(value=0)),
)
LOGGER: Any = None


class Run:
    """What wandb.init returns: an offline run that remembers what it is told."""

    dir, offline, entity, project = 'runs/x/files', True, 'me', 'p'
    starting_step = 0

    def __init__(self, options):
        self.id = options.get('id') or 'new'
        self.config = Config()

    def define_metric(self, name, step_metric=None):
        raise AssertionError('there is no monitor')


class Config(dict):
    """wandb's own refuses to change a value unless it is told to."""

    def update(self, values, allow_val_change=False):
        assert allow_val_change
        super().update(values)


def start(logger: WandBLogger, checkpoint: dict[str, Any] | None = None) -> None:
    """What a Trainer does, with a checkpoint or without."""
    logger.init(STATE, LOGGER)
    if checkpoint is not None:
        logger.load_state_dict(checkpoint)
    logger.after_load(STATE, LOGGER)


@pytest.fixture
def calls(monkeypatch):
    """The calls of wandb.init, which makes an offline run without doing anything."""
    made: list[dict[str, Any]] = []

    def init(**options):
        made.append(options)
        return Run(options)

    monkeypatch.setattr(wandb, 'init', init)
    monkeypatch.setenv('WANDB_ERROR_REPORTING', 'to be restored')
    monkeypatch.delenv('WANDB_ERROR_REPORTING')
    return made


def test_composers_logger_still_needs_this_class():
    # When this fails, composer.loggers.WandBLogger works with current versions of wandb: the subclass can go.
    assert '.get_url()' in inspect.getsource(composer.loggers.WandBLogger.init)
    assert issubclass(WandBLogger, composer.loggers.WandBLogger)


def test_one_run_with_the_name_of_the_job_in_a_folder_that_exists(calls, tmp_path):
    folder = tmp_path / 'a' / 'b'
    logger = WandBLogger(project='p', init_kwargs={'mode': 'offline', 'dir': str(folder)})
    start(logger)
    assert calls == [{'project': 'p', 'mode': 'offline', 'dir': str(folder), 'name': 'name-of-the-job'}]
    assert folder.is_dir()
    assert (logger.run_dir, logger.run_url, logger.entity, logger.project) == ('runs/x/files', None, 'me', 'p')


def test_a_name_of_its_own_wins(calls):
    start(WandBLogger(name='mine'))
    assert calls == [{'name': 'mine'}]


def test_other_ranks_start_no_run(calls, monkeypatch):
    monkeypatch.setattr('composer.loggers.wandb_logger.dist.get_global_rank', lambda: 1)
    logger = WandBLogger()
    start(logger)
    assert (calls, logger.run_dir) == ([], None)


def test_runs_of_all_ranks_form_a_group(calls, monkeypatch):
    monkeypatch.setattr('composer.loggers.wandb_logger.dist.get_global_rank', lambda: 1)
    start(WandBLogger(rank_zero_only=False))
    assert calls == [{'name': 'name-of-the-job-rank1', 'group': 'name-of-the-job'}]


@pytest.mark.parametrize(('mode', 'expected'), [('offline', 'false'), ('online', None)])
def test_wandb_reports_nothing_from_offline_runs(calls, mode, expected):
    start(WandBLogger(init_kwargs={'mode': mode}))
    assert os.environ.get('WANDB_ERROR_REPORTING') == expected


def test_a_refusal_of_wandb_names_both_ways_out(monkeypatch):
    def init(**_):
        raise wandb.Error('No API key configured.')

    monkeypatch.setattr(wandb, 'init', init)
    with pytest.raises(EnvironmentProblem) as caught:
        start(WandBLogger())
    message = str(caught.value)
    assert 'No API key configured. To log online' in message
    assert '`wandb login`' in message and 'loggers.wandb.init_kwargs.mode=offline' in message


def test_a_folder_that_cannot_be_made_is_named(calls, tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(EnvironmentProblem, match=r'loggers\.wandb\.init_kwargs\.dir: cannot make the folder: .*file'):
        start(WandBLogger(init_kwargs={'dir': str(tmp_path / 'file')}))
    assert calls == []


OF_THIS_JOB = {'run_id': 'abc', 'name': 'name-of-the-job', 'project': 'p'}


def test_a_job_goes_on_in_the_run_of_its_checkpoint(calls):
    logger = WandBLogger(project='p')
    start(logger, OF_THIS_JOB)
    assert (calls[0]['id'], calls[0]['resume']) == ('abc', 'allow')
    assert logger.state_dict() == OF_THIS_JOB


@pytest.mark.parametrize(
    ('checkpoint', 'init_kwargs', 'expected'),
    [
        ({}, {}, {}),
        ({'anything': 'of another logger'}, {}, {}),
        ({**OF_THIS_JOB, 'name': 'another job'}, {}, {}),
        ({**OF_THIS_JOB, 'project': 'another'}, {}, {}),
        (OF_THIS_JOB, {'resume': 'never'}, {'resume': 'never'}),
        (OF_THIS_JOB, {'id': 'mine'}, {'id': 'mine', 'resume': 'allow'}),
        (OF_THIS_JOB, {'id': 'mine', 'resume': 'must'}, {'id': 'mine', 'resume': 'must'}),
        (OF_THIS_JOB, {'resume': 'must'}, {'id': 'abc', 'resume': 'must'}),
        (OF_THIS_JOB, {'fork_from': 'abc?_step=3'}, {'fork_from': 'abc?_step=3'}),
    ],
)
def test_another_job_or_what_the_user_says_begins_another_run(calls, checkpoint, init_kwargs, expected):
    start(WandBLogger(project='p', init_kwargs=init_kwargs), checkpoint)
    (options,) = calls
    assert {key: options[key] for key in options if key not in ('project', 'name')} == expected


def test_runs_of_all_ranks_are_not_resumed(calls):
    logger = WandBLogger(project='p', rank_zero_only=False)
    start(logger, {**OF_THIS_JOB, 'name': 'name-of-the-job-rank0'})
    assert 'id' not in calls[0] and logger.state_dict() == {}


def test_what_is_logged_before_the_run_is_started_is_not_lost(calls, monkeypatch):
    logged = []
    monkeypatch.setattr(wandb, 'log', lambda metrics, step: logged.append((metrics, step)))
    logger = WandBLogger(project='p')
    logger.init(STATE, LOGGER)
    logger.log_hyperparameters({'seed': 3})
    logger.log_metrics({'time/epoch': 0}, 0)
    assert (calls, logged) == ([], [])
    logger.after_load(STATE, LOGGER)
    assert logged == [({'time/epoch': 0}, 0)]
    config = logger._run.config
    assert config['seed'] == 3 and config['deepspeed_environment']['world_size'] == 1
    assert config['deepspeed_environment']['versions']['wandb'] == wandb.__version__


def test_offline_there_is_no_checkpoint_to_be_found(tmp_path):
    # Composer's own logger asks W&B, and a first start with autoresume=True ends with "No API key configured".
    logger = WandBLogger(project='p', init_kwargs={'mode': 'offline'})
    with pytest.raises(FileNotFoundError):
        logger.download_file('latest-rank0.pt', str(tmp_path / 'file'))
