"""`composer-ds dashboard`: what would be sent to W&B, and that the keys are those that are logged."""

from __future__ import annotations

import json
import re
import sys

import pytest
import wandb
from typer.testing import CliRunner

from composer_ds import callbacks
from composer_ds.cli import app
from composer_ds.panels import OPTIMIZER_STEPS, SECTIONS


def exported(tmp_path) -> dict:
    """The file that `--export` writes."""
    result = CliRunner().invoke(app, ['dashboard', 'p', '--entity', 'me', '--export', str(tmp_path / 'd.json')])
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / 'd.json').read_text())


def test_the_view_has_every_panel_with_its_axis(tmp_path):
    pytest.importorskip('wandb_workspaces')
    view = exported(tmp_path)['view']
    assert (view['entity'], view['project']) == ('me', 'p')
    sections = view['spec']['section']['panelBankConfig']['sections']
    assert [section['name'] for section in sections] == [section.title for section in SECTIONS]
    plots = {panel['config']['chartTitle']: panel['config'] for section in sections for panel in section['panels']}
    assert len(plots) == sum(len(section.panels) for section in SECTIONS)
    assert plots['Training loss']['xAxis'] == '_step'
    assert re.fullmatch(plots['Training loss']['metricRegex'], 'loss/train/total')
    norm = plots['Gradient norm, before clipping']
    assert (norm['xAxis'], norm['metrics'], norm['yLogScale']) == (OPTIMIZER_STEPS, ['l2_norm/grad/global'], True)
    split = plots['Time of an optimizer step']
    assert split['plotType'] == 'stacked-area' and 'time_split/backward_sec' in split['metrics']
    assert 'time_split/total_sec' not in split['metrics']


def test_without_wandb_workspaces_the_sections_are_exported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb_workspaces.workspaces', None)
    content = exported(tmp_path)
    assert content['view'] is None
    assert content['sections'][1]['panels'][0]['keys'] == ['l2_norm/grad/global']
    result = CliRunner().invoke(app, ['dashboard', 'p'])
    assert result.exit_code == 1 and "pip install 'composer-ds[dashboard]'" in result.output


def test_without_an_account_the_way_out_is_named(monkeypatch):
    pytest.importorskip('wandb_workspaces')

    def no_account(*_, **__):
        raise wandb.Error('No API key configured. Use `wandb login` to log in.')

    monkeypatch.setattr(wandb, 'Api', no_account)
    result = CliRunner().invoke(app, ['dashboard', 'p'])
    assert result.exit_code == 1
    assert 'Use `wandb login` to log in. Without an account, write it to a file: --export FILE' in result.output


def test_panels_draw_keys_that_the_monitors_document():
    documented = ' '.join(
        vars(callbacks)[name].__doc__ for name in ('DeepSpeedMonitor', 'ZeroMemoryMonitor', 'CommunicationMonitor')
    )
    for section in SECTIONS:
        for panel in section.panels:
            for key in panel.keys:
                known = key if '*' not in key else key.split('*')[0]
                assert known in documented or known.startswith(('loss/', 'metrics/')), key
