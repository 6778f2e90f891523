"""The YAML files of the project: every command written in them is accepted, and nothing needs the network."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from composer_ds.launch import registry
from composer_ds.launch.check import RunConfig, check
from composer_ds.launch.config_file import read
from composer_ds.launch.schema import Layout

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / 'yamls').glob('*.yaml'))
COMMAND = re.compile(r'run\.py -f (\S+)(( [\w.]+=\S+)*)')


def commands() -> list[tuple[str, str]]:
    """Every `run.py -f ...` in the comments of the YAML files, as file and overrides."""
    texts = [path.read_text() for path in FILES]
    return [(found[1], found[2]) for text in texts for found in COMMAND.finditer(text)]


def checked(file: str, overrides: str = '') -> RunConfig:
    return check(read(str(ROOT / file), shlex.split(overrides)))


def test_there_are_files_and_commands():
    assert len(FILES) == 6 and FILES[-2].name == 'mt5.yaml'
    assert len(commands()) >= 3 and any('=' in overrides for _, overrides in commands())


@pytest.mark.parametrize(('file', 'overrides'), commands())
def test_every_command_in_a_comment_is_accepted(file, overrides):
    run = checked(file, overrides)
    for item in shlex.split(overrides):
        key, _, value = item.partition('=')
        found = run.resolved
        for part in key.split('.'):
            found = found[part]
        assert found == yaml.safe_load(value), item


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.name)
def test_wandb_is_offline_by_default_and_one_override_away(path):
    file = str(path.relative_to(ROOT))
    (logger,) = checked(file).loggers
    assert logger.section == 'loggers.wandb' and logger.arguments['init_kwargs']['mode'] == 'offline'
    assert checked(file, 'loggers.wandb=false').loggers == []
    (online,) = checked(file, 'loggers.wandb.init_kwargs.mode=online').loggers
    assert online.arguments['init_kwargs']['mode'] == 'online'
    assert 'loggers.wandb.init_kwargs.mode=online' in path.read_text()


def test_the_documentation_names_every_section_and_every_class():
    text = (ROOT / 'docs' / 'configuration_yaml.md').read_text()
    tables = (registry.OPTIMIZERS, registry.SCHEDULERS, registry.CALLBACKS, registry.LOGGERS)
    # `linear_with_warmup` is documented as `linear`, "each also as `..._with_warmup`"
    names = {name.removesuffix('_with_warmup') for table in tables for name in table} | set(Layout.model_fields)
    assert {name for name in names if f'`{name}`' not in text} == set()
