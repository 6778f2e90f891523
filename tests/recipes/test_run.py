"""`run.py` as people start it: by the `composer` launcher on two ranks, and by plain `python`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.recipes import tiny_recipe

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LIMIT_SEC = 180  # a rank imports Composer and DeepSpeed in 10 s, or in a minute on a busy machine
OF_A_LAUNCHER = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT')
NOT_INHERITED = (*OF_A_LAUNCHER, 'OMP_NUM_THREADS', 'PYTHONDONTWRITEBYTECODE', 'COMPOSER_RUN_NAME', 'RUN_NAME')

PYTHON = [sys.executable]
COMPOSER_2 = [str(BIN / 'composer'), '-n', '2']
RUN = """\
task: tests.recipes.tiny_recipe
run_name: tiny
data: {weights_file: weights.pt}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
train: {max_duration: 3ba, device: cpu}
loggers:
  wandb:
    project: test
    init_kwargs: {mode: offline, dir: runs}
"""


def run(launcher: list[str], folder: Path, *arguments: str) -> tuple[int, str]:
    """Starts run.py in a folder; returns the exit code and all output. Ends every process at the time limit."""
    environment = {
        name: value for name, value in os.environ.items() if name not in NOT_INHERITED and not name.startswith('WANDB_')
    }
    environment |= {'DS_ACCELERATOR': 'cpu', 'COLUMNS': '120'}
    log = folder / 'output.log'
    with log.open('w') as output:
        process = subprocess.Popen(
            [*launcher, str(ROOT / 'run.py'), *arguments],
            cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT_SEC)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f'no end after {LIMIT_SEC} s; the output until then:\n{log.read_text()}')
    return code, log.read_text()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'run.yaml').write_text(RUN)
    return tmp_path


def expected_weights(world_size: int) -> dict[str, torch.Tensor]:
    """Three steps of torch's SGD on batches of the samples in order."""
    model = tiny_recipe.Regression(width=3, scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = tiny_recipe.dataset(24, 3)
    batch_size = tiny_recipe.RANK_BATCH * world_size
    for start in range(0, 3 * batch_size, batch_size):
        inputs, targets = samples[start : start + batch_size]
        optimizer.zero_grad()
        mse_loss(model([inputs]), targets).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def assert_trained(folder: Path, world_size: int) -> None:
    written = torch.load(folder / 'weights.pt')['weights']
    expected = expected_weights(world_size)
    start = tiny_recipe.Regression(width=3, scale=1.0).state_dict()
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(written[name], value, atol=1e-6, rtol=0, msg=name)
        assert not torch.equal(written[name], start[name]), f'{name} did not move'


@pytest.mark.slow
def test_two_ranks_train_and_log_one_offline_run(folder):
    code, output = run(COMPOSER_2, folder, '-f', 'run.yaml')
    assert code == 0, output
    assert_trained(folder, world_size=2)

    (run_folder,) = (folder / 'runs' / 'wandb').glob('offline-run-*')
    assert f'W&B run, offline: {run_folder.relative_to(folder)} (to upload it: wandb sync ' in output
    assert re.search(r'3/3 .*loss/train/total=\d', output), 'the progress bar shows the loss'
    assert re.search(r'^Finished after \d+ min \d+ s of wall-clock time\.$', output, re.MULTILINE)

    cores = len(os.sched_getaffinity(0))
    assert f'{cores} CPU cores / 2 ranks = {max(1, cores // 2)} thread(s) for each rank' in output
    assert torch.load(folder / 'weights.pt')['threads'] == max(1, cores // 2)

    (file,) = run_folder.glob('*.wandb')
    inspect = [str(BIN / 'wandb'), 'leet', 'inspect', '--summary', '--json', str(file)]
    read = subprocess.run(inspect, capture_output=True, text=True, timeout=60, check=True)
    config = json.loads(read.stdout)['config']
    assert config['task'] == 'tests.recipes.tiny_recipe'
    assert config['optimizer'] == {'name': 'sgd', 'lr': 0.1, 'momentum': 0.9}
    assert config['model'] == {'width': 3, 'init': {'scale': 1}}  # the task's defaults, too
    assert config['train'] == {'max_duration': '3ba', 'device': 'cpu'}


@pytest.mark.parametrize(
    ('launcher', 'world_size'),
    [pytest.param(COMPOSER_2, 2, marks=pytest.mark.long), (PYTHON, 1)],
    ids=['composer -n 2', 'python'],
)
def test_deepspeed_trains_from_the_yaml(folder, launcher, world_size):
    code, output = run(launcher, folder, '-f', 'run.yaml', 'deepspeed.zero_stage=2', 'loggers.wandb=false')
    assert code == 0, output
    assert_trained(folder, world_size)
    assert not (folder / 'runs').exists()
    assert f'world size {world_size} = global batch {4 * world_size}' in output  # the block that DeepSpeed logs


@pytest.mark.long
def test_an_error_of_two_ranks_is_printed_once_and_ends_the_job(folder):
    code, output = run(COMPOSER_2, folder, '-f', 'run.yaml', 'data.samples=1')
    assert code == 2, output
    assert output.count('data: the training data has fewer samples (1) than there are ranks (2)') == 1, output
    assert 'Traceback' not in output


@pytest.mark.parametrize(
    ('content', 'arguments', 'message'),
    [
        (None, [], '-f run.yaml: no such file'),
        ('train: [1\nseed: 2', [], 'run.yaml, line 2, column 5: is not valid YAML'),
        (RUN, ['model.widht=2'], "unknown key; did you mean 'width'?"),
        (RUN, ['--unknown'], "unknown argument '--unknown'"),
    ],
    ids=['no file', 'syntax error', 'wrong key', 'unknown flag'],
)
def test_wrong_input_is_one_message_and_exit_code_2(tmp_path, content, arguments, message):
    if content:
        (tmp_path / 'run.yaml').write_text(content)
    code, output = run(PYTHON, tmp_path, '-f', 'run.yaml', *arguments)
    assert code == 2, output
    assert output.startswith('run.py: error: ') and output.count(message) == 1
    assert 'Traceback' not in output


@pytest.mark.slow
def test_a_bug_shows_its_traceback(folder, monkeypatch):
    monkeypatch.setenv('TINY_RECIPE_BUG', '1')
    code, output = run(PYTHON, folder, '-f', 'run.yaml', 'loggers.wandb=false')
    assert code == 1, output
    assert 'Traceback (most recent call last)' in output
    assert output.rstrip().endswith('ZeroDivisionError: a bug of the recipe')
