"""Every code block of the README and of docs/ does what the page says, or at least runs.

Pages whose blocks have tests of their own are named below, with the test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from composer_ds.cli import app
from tests.distributed import docs_cases
from tests.pages import PAGES, ROOT, blocks, commands
from tests.unit.checkpoint_files import small_model, write_sharded

ELSEWHERE = {
    'docs/your_own_model.md': 'tests/recipes/test_your_own_model.py',
    'docs/migration/': 'tests/distributed/test_migration.py',
}
WITHOUT_TRAINERS = {'docs/configuration_yaml.md', 'docs/exporting.md', 'docs/troubleshooting.md'}
WITH_PYTHON = [
    page for page in PAGES if blocks(page, 'python') and not str(page.relative_to(ROOT)).startswith(tuple(ELSEWHERE))
]


def test_pages_that_are_tested_elsewhere():
    for page, test in ELSEWHERE.items():
        assert (ROOT / page).exists() and (ROOT / test).exists()


@pytest.mark.parametrize('page', WITH_PYTHON, ids=lambda page: page.stem)
def test_python(one_rank, page: Path, tmp_path):
    name = str(page.relative_to(ROOT))
    (trainers,) = one_rank.run(docs_cases.run_page, blocks(page, 'python'), str(tmp_path))
    assert (trainers > 0) == (name not in WITHOUT_TRAINERS)


# In place of what takes minutes; the last value of a key counts.
SHORT = [
    'train.max_duration=2ba', 'train.eval_interval=0', 'train.device=cpu', 'data.max_words=300',
    'data.eval_max_words=16', 'data.global_batch_size=32', 'train.device_train_microbatch_size=8',
]  # fmt: skip
LAUNCHING = 'tests/distributed/test_launching.py'
NOT_RUN_HERE = {
    r'(python -m venv|pip install|uv ) ?.*': '.ci/run does what these do',
    r'wandb login|composer-ds dashboard my-project --entity .*': 'needs an account',
    r'wandb leet runs.*': 'asks the terminal; the next two commands of the page read the same files',
    r'(composer|torchrun|deepspeed|python) .*train\.py': f'{LAUNCHING}; the script itself: test_the_quickstart',
    r'composer .*--node_rank.*': LAUNCHING,
    r'export MASTER_ADDR=.*|srun .*': 'needs Slurm',
    r'.* (recipes\.text_stream .*|data\.stream=my_stream)': 'tests/recipes/test_text_stream.py',
}
COMMANDS = dict.fromkeys(
    command
    for page in PAGES
    if not str(page.relative_to(ROOT)).startswith(tuple(ELSEWHERE))
    for block in blocks(page, 'bash')
    for command in commands(block)
    if not any(re.fullmatch(pattern, command) for pattern in NOT_RUN_HERE)
)
RUNS = [command for command in COMMANDS if re.match(r'(composer -n \d+|python) run\.py ', command)]
TARGETS = [command for command in COMMANDS if command.startswith('make ')]
OTHERS = [command for command in COMMANDS if command not in (*RUNS, *TARGETS)]


@pytest.fixture(scope='module')
def clone(tmp_path_factory) -> Iterator[Path]:
    """A folder that looks like the repository, with the reader's files in it."""
    folder = tmp_path_factory.mktemp('clone')
    for name in ('yamls', 'recipes', 'run.py'):
        (folder / name).symlink_to(ROOT / name)
    (folder / 'ds_config.json').write_text(json.dumps({'zero_optimization': {'stage': 2}, 'bf16': {'enabled': True}}))
    write_sharded(folder / 'ckpts' / 'run' / 'ep1-ba500', small_model(), batch=500)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_targets_of_make():
    targets = re.findall(r'^([a-z0-9]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    assert TARGETS and {shlex.split(command)[1] for command in TARGETS} <= set(targets)


@pytest.mark.long
def test_commands(two_ranks, one_rank, clone):
    """In the order of a reader: first those that train, then those that look at what was trained."""
    assert len(RUNS) >= 4 and len(OTHERS) >= 10
    # As if every job had two ranks, some are the same.
    runs = {(command.startswith('python '), command.partition('run.py ')[2]) for command in RUNS}
    for of_one_rank, arguments in sorted(runs):
        pool = one_rank if of_one_rank else two_ranks
        codes = pool.run(docs_cases.run_command, [*shlex.split(arguments), *SHORT], str(clone))
        assert codes == [0] * pool.world_size, arguments
    offline = str(next((clone / 'runs' / 'wandb').glob('offline-run-*')).relative_to(clone))
    for command in OTHERS:
        program, *arguments = (word.replace('runs/wandb/offline-run-...', offline) for word in shlex.split(command))
        if program == 'composer-ds':
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, (command, result.output, result.exception)
        else:
            assert program == 'wandb', command
            done = subprocess.run(
                [sys.executable, '-m', program, *arguments], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0 and done.stdout, (command, done.stderr)


@pytest.mark.long
def test_the_quickstart(tmp_path):
    (script,) = blocks(ROOT / 'docs' / 'quickstart.md', 'python')
    (tmp_path / 'train.py').write_text(script.text)
    launcher = [str(Path(sys.executable).parent / 'composer'), '-n', '2', 'train.py']
    environment = {**os.environ, 'DS_ACCELERATOR': 'cpu'}
    done = subprocess.run(
        launcher, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    weights = torch.load(tmp_path / 'checkpoints' / 'latest-rank0.pt', weights_only=False)['state']['model']
    network = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    network.load_state_dict({name.removeprefix('module.'): tensor for name, tensor in weights.items()})
    points = torch.randn(1000, 2)
    assert (network(points).argmax(1) == (points.norm(dim=1) < 1)).float().mean() > 0.9
