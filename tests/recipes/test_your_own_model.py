"""docs/your_own_model.md: its files, written to a folder, do what the page says."""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml
from composer import Algorithm, Callback

from tests.pages import ROOT, blocks, commands
from tests.recipes.test_run import BIN, run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore

PAGE = ROOT / 'docs' / 'your_own_model.md'


@pytest.fixture
def reader(tmp_path) -> Path:
    """The folder of a reader, who has copied the files of the page."""
    for block in blocks(PAGE, 'python', 'yaml'):
        if name := re.match(r'# (\w+\.(py|yaml))\n', block.text):
            (tmp_path / name[1]).write_text(block.text)
    shutil.copy(ROOT / 'run.py', tmp_path)
    return tmp_path


@pytest.mark.long
def test_the_commands(reader):
    """Under the launcher once; the check needs no ranks."""
    check, circles, parts = [command for block in blocks(PAGE, 'bash') for command in commands(block)]
    assert check == 'composer-ds check circles.yaml -n 2'
    assert circles == 'composer -n 2 run.py -f circles.yaml' and parts == 'composer -n 2 run.py -f parts.yaml'
    code, output = run([str(BIN / 'composer'), '-n', '2'], reader, '-f', 'circles.yaml', 'train.device=cpu')
    assert code == 0, output
    assert 'ZeRO stage  2' in output


@pytest.mark.long
def test_parts_of_your_own(reader):
    code, output = run([str(BIN / 'composer'), '-n', '2'], reader, '-f', 'parts.yaml', 'train.device=cpu')
    assert code == 0, output
    # 512 points in batches of 2 x 64: 4 optimizer steps an epoch, 20 in all.
    assert re.findall(r'optimizer step (\d+): gradient norm [\d.]+', output) == ['8', '16']
    assert 'ZeRO stage  3' in output and 'SGD' in output


def _entry_points(group: str) -> dict[str, Any]:
    declared = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['entry-points'][group]
    return {name: EntryPoint(name, value, group).load() for name, value in declared.items()}


def test_names_for_llm_foundry():
    """It makes them of the mapping in its YAML, by keyword."""
    (text,) = [block.text for block in blocks(PAGE, 'yaml') if block.text.startswith('algorithms:')]
    for section, kind in (('algorithms', Algorithm), ('callbacks', Callback)):
        known = _entry_points(f'llmfoundry_{section}')
        for name, arguments in yaml.safe_load(text)[section].items():
            assert isinstance(known[name](**arguments), kind)
    assert {name: one.__name__ for name, one in _entry_points('llmfoundry_callbacks').items()} == {
        'communication_monitor': 'CommunicationMonitor',
        'consolidated_weights_saver': 'ConsolidatedWeightsSaver',
        'deepspeed_monitor': 'DeepSpeedMonitor',
        'sharded_checkpoint_saver': 'ShardedCheckpointSaver',
        'zero_memory_monitor': 'ZeroMemoryMonitor',
    }
