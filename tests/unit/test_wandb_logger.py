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

STATE: Any = SimpleNamespace(run_name='name-of-the-job')
LOGGER: Any = None


@pytest.fixture
def calls(monkeypatch):
    """The calls of wandb.init, which makes an offline run without doing anything."""
    made: list[dict[str, Any]] = []

    def init(**options):
        made.append(options)
        return SimpleNamespace(dir='runs/x/files', offline=True, entity='me', project='p')

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
    logger.init(STATE, LOGGER)
    assert calls == [{'project': 'p', 'mode': 'offline', 'dir': str(folder), 'name': 'name-of-the-job'}]
    assert folder.is_dir()
    assert (logger.run_dir, logger.run_url, logger.entity, logger.project) == ('runs/x/files', None, 'me', 'p')


def test_a_name_of_its_own_wins(calls):
    WandBLogger(name='mine').init(STATE, LOGGER)
    assert calls == [{'name': 'mine'}]


def test_other_ranks_start_no_run(calls, monkeypatch):
    monkeypatch.setattr('composer.loggers.wandb_logger.dist.get_global_rank', lambda: 1)
    logger = WandBLogger()
    logger.init(STATE, LOGGER)
    assert (calls, logger.run_dir) == ([], None)


def test_runs_of_all_ranks_form_a_group(calls, monkeypatch):
    monkeypatch.setattr('composer.loggers.wandb_logger.dist.get_global_rank', lambda: 1)
    WandBLogger(rank_zero_only=False).init(STATE, LOGGER)
    assert calls == [{'name': 'name-of-the-job-rank1', 'group': 'name-of-the-job'}]


@pytest.mark.parametrize(('mode', 'expected'), [('offline', 'false'), ('online', None)])
def test_wandb_reports_nothing_from_offline_runs(calls, mode, expected):
    WandBLogger(init_kwargs={'mode': mode}).init(STATE, LOGGER)
    assert os.environ.get('WANDB_ERROR_REPORTING') == expected


def test_a_refusal_of_wandb_names_both_ways_out(monkeypatch):
    def init(**_):
        raise wandb.Error('No API key configured.')

    monkeypatch.setattr(wandb, 'init', init)
    with pytest.raises(EnvironmentProblem) as caught:
        WandBLogger().init(STATE, LOGGER)
    message = str(caught.value)
    assert 'No API key configured. To log online' in message
    assert '`wandb login`' in message and 'loggers.wandb.init_kwargs.mode=offline' in message


def test_a_folder_that_cannot_be_made_is_named(calls, tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(EnvironmentProblem, match=r'loggers\.wandb\.init_kwargs\.dir: cannot make the folder: .*file'):
        WandBLogger(init_kwargs={'dir': str(tmp_path / 'file')}).init(STATE, LOGGER)
    assert calls == []
