"""`composer-ds`: what is shown, exit codes, and that nothing is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from composer_ds import __version__
from composer_ds.cli import app

ROOT = Path(__file__).parents[2]
RUN = """\
task: tests.recipes.tiny_recipe
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
scheduler: {name: linear_with_warmup, t_warmup: 2ba}
train:
  max_duration: 2ep
  device: cpu
  device_train_microbatch_size: 2
deepspeed:
  zero_stage: 2
  ds_config: {gradient_clipping: 0.5}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls the command on a file of the given text."""
    monkeypatch.setenv('COLUMNS', '160')

    def call(text: str, *arguments: str, name: str = 'run.yaml'):
        path = tmp_path / name
        path.write_text(text)
        return CliRunner().invoke(app, ['check', str(path), *arguments])

    return call


def _row(output: str, first: str) -> list[str]:
    """The cells of the one line that begins so."""
    lines = [line.strip() for line in output.splitlines() if line.strip().startswith(first)]
    assert len(lines) == 1, output
    return [cell.strip() for cell in lines[0].split('  ') if cell.strip()]


def test_the_plan_says_values_owners_and_lines(run):
    result = run(RUN)
    assert result.exit_code == 0, result.output
    assert _row(result.output, 'ZeRO stage') == ['ZeRO stage', '2', 'DeepSpeed', 'deepspeed.zero_stage, line 9']
    assert _row(result.output, 'gradient clipping')[1:3] == ['norm 0.5', 'DeepSpeed']
    assert _row(result.output, 'gradient clipping')[3] == 'ds_config.gradient_clipping, line 10'
    assert _row(result.output, 'microbatch  ')[1:] == ['2', 'Trainer', 'train.device_train_microbatch_size, line 7']
    assert _row(result.output, 'precision')[3] == "Composer's default"


def test_an_override_is_the_source(run):
    result = run(RUN, 'deepspeed.zero_stage=3')
    assert _row(result.output, 'ZeRO stage')[1:] == ['3', 'DeepSpeed', 'deepspeed.zero_stage, command line']


@pytest.mark.parametrize(
    ('world_size', 'arithmetic'),
    [
        ('1', 'microbatch 2 x accumulation 2 x world size 1 = global batch 4'),
        ('4', 'microbatch 2 x accumulation 2 x world size 4 = global batch 16'),
    ],
)
def test_the_world_size_changes_the_arithmetic(run, world_size, arithmetic):
    assert arithmetic in run(RUN, '-n', world_size).output


def test_the_memory_table_has_every_way_and_the_chosen_one(run):
    # 3 weights and 3 biases of a norm, 3 weights and a bias: 10 parameters, in one group. In bytes:
    # weights 40, gradients p.grad 40, master weights and momentum 80, bucket 40.
    output = run(RUN, 'deepspeed.zero_stage=1').output
    assert _row(output, '> 1') == ['> 1', '-', '40 bytes', '40 bytes', '80 bytes', '40 bytes', '200 bytes']
    table = output[output.index('Memory') : output.index('At the fullest')]
    ways = [line.strip(' >')[0] for line in table.splitlines() if line.strip().endswith('bytes')]
    assert ways == ['1', '1', '2', '2', '3', '3', '3', '3']


def test_a_run_for_gpus_tells_device_and_host(run):
    output = run(
        RUN, '-n', '2', 'train.device=gpu', 'train.precision=amp_bf16', 'deepspeed.offload_optimizer=cpu'
    ).output
    assert 'device' in output and 'host' in output
    # Device: bf16 weights 20, the fp32 partition of the gradients 24 (padded to 12), bucket and copy 20 + 20, and a
    # buffer for the largest parameter's gradient, 3 elements. Host: 6 x (master 4, momentum 4, gradient 4, bf16 2), and
    # another such buffer.
    assert _row(output, '> 2')[-2:] == ['94 bytes', '90 bytes']


def test_no_ranks_and_no_launcher_variables_are_left(run, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '1')
    monkeypatch.delenv('RANK', raising=False)
    assert run(RUN, '-n', '4').exit_code == 0
    assert os.environ['WORLD_SIZE'] == '1' and 'RANK' not in os.environ
    assert not torch.distributed.is_initialized()


def test_plain_composer_has_no_plan(run):
    result = run(RUN, 'deepspeed=null')
    assert result.exit_code == 0 and 'plain Composer (DDP)' in result.output and 'Plan' not in result.output


def test_all_conflicts_are_listed_with_exit_code_2(run):
    result = run(
        RUN,
        'deepspeed.ds_config.train_micro_batch_size_per_gpu=3',
        'deepspeed.ds_config.zero_optimization.stage=1',
        'train.max_duration=10ba',
        'scheduler.t_max=5ba',
    )
    assert result.exit_code == 2
    assert '3 problems:' in result.stderr, result.output
    for part in ('train_micro_batch_size_per_gpu=3', 'zero_stage=2', 't_max 5ba must be greater'):
        assert part in result.stderr
    assert result.stdout == ''


@pytest.mark.parametrize(
    ('text', 'arguments', 'message'),
    [
        (RUN + 'trian: {}\n', [], 'trian = {}'),
        (RUN, ['train.precision=amp_bf16'], 'on a CPU Composer computes in fp32 only'),
        (RUN, ['data.samples=3', '-n', '4'], 'fewer samples (3) than there are ranks (4)'),
        (RUN, ['--parameters', '1B'], '--parameters: for a ds_config only'),
        ('a: [', [], 'does not parse'),
    ],
)
def test_other_mistakes_have_exit_code_2(run, text, arguments, message):
    result = run(text, *arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert 'Traceback' not in result.output


def test_a_missing_file(tmp_path):
    (tmp_path / 'mt5.yaml').write_text(RUN)
    result = CliRunner().invoke(app, ['check', str(tmp_path / 'mt6.yaml')])
    assert result.exit_code == 2 and "no such file; did you mean '" in result.stderr


def test_the_picture_is_written(run, tmp_path):
    result = run(RUN, '--plot', str(tmp_path / 'lr.png'))
    assert result.exit_code == 0 and (tmp_path / 'lr.png').read_bytes().startswith(b'\x89PNG')
    assert 'optimizer steps' in result.output and '1.00e-01' in result.output
    assert run(RUN, '--plot', str(tmp_path / 'lr.nothing')).exit_code == 2


DS_CONFIG = json.dumps({
    'zero_optimization': {'stage': 3, 'offload_optimizer': {'device': 'cpu'}, 'reduce_bucket_size': 'auto'},
    'bf16': {'enabled': True},
    'train_micro_batch_size_per_gpu': 'auto',
})  # fmt: skip


def test_a_ds_config_by_itself(run):
    result = run(DS_CONFIG, '-n', '8', name='ds_config.json')
    assert result.exit_code == 0, result.output
    assert _row(result.output, 'ZeRO stage')[1:] == ['3', 'DeepSpeed', 'ds_config.zero_optimization.stage']
    assert '--parameters 1.3B' in result.output and 'Memory' not in result.output


def test_a_ds_config_with_what_the_trainer_would_say(run):
    options = ['--parameters', '1B', '--batch-size', '16', '--microbatch-size', '4']
    result = run(DS_CONFIG, '-n', '8', *options, name='ds_config.json')
    assert 'microbatch 4 x accumulation 4 x world size 8 = global batch 128' in result.output
    # Host, for each of 1/8 billion elements: master weight, two moments, the gradients added up, the optimizer's.
    assert _row(result.output, '> 3')[-1] == f'{(4 + 8 + 4 + 4) / 8:.1f} GB'
    momentum = run(DS_CONFIG, '-n', '8', '--parameters', '1B', '--optimizer', 'sgd', name='ds_config.json')
    assert _row(momentum.output, '> 3')[-1] == f'{(4 + 4 + 4) / 8:.1f} GB'


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--microbatch-size', '3', 'train_micro_batch_size_per_gpu=2'], 'train_micro_batch_size_per_gpu=2'),
        (['--precision', 'fp32'], 'bf16'),
        (['--parameters', 'many'], '--parameters many: write a number such as 1.3B'),
        (['--optimizer', 'adamww'], "did you mean 'adamw'?"),
        (['--plot', 'lr.png'], 'a ds_config has no learning rates'),
        (['zero_optimization.stge=1'], 'stge'),
    ],
)
def test_conflicts_of_a_ds_config(run, options, message):
    result = run(DS_CONFIG, *options, name='ds_config.json')
    assert result.exit_code == 2 and message in result.stderr, result.output


def test_help_and_version_need_nothing_heavy():
    code = (
        'import atexit, sys\n'
        "atexit.register(lambda: print('heavy:', {'torch', 'composer', 'deepspeed'} & set(sys.modules)))\n"
        'from composer_ds.cli import main\nmain()'
    )
    for arguments, expected in ((['--version'], __version__), (['check', '--help'], '--world-size')):
        done = subprocess.run(
            [sys.executable, '-c', code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 and expected in done.stdout
        assert done.stdout.endswith('heavy: set()\n'), done.stdout
