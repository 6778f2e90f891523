"""The command line: exit codes, who speaks, and what is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_ds.launch import main, ranks

ROOT = Path(__file__).parents[2]
RUN = """\
task: tests.recipes.tiny_recipe
optimizer: {name: sgd, lr: 0.1}
train: {max_duration: 3ba, device: cpu, progress_bar: false}
"""


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'run.yaml'
    path.write_text(RUN)
    return str(path)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], 'give exactly one YAML file with -f (given: none)'),
        (['train.max_duration=1ep'], 'give exactly one YAML file with -f (given: none)'),
        (['-f'], 'expected one argument'),
        (['-f', 'a.yaml', '-f', 'b.yaml'], "give exactly one YAML file with -f (given: ['a.yaml', 'b.yaml'])"),
        (['-f', 'a.yaml', '--tracebak'], "unknown argument '--tracebak'; did you mean '--traceback'?"),
        (['--fil=a.yaml'], "unknown argument '--fil=a.yaml'; did you mean '--file'?"),
        (['-f', 'no.yaml'], '-f no.yaml: no such file'),
        (['-f', 'no.yaml', 'a'], "override 'a' on the command line: write it as key=value"),
        (['-f', '.'], '-f .: is a folder'),
    ],
)
def test_a_wrong_command_line_is_one_message_and_exit_code_2(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith('run.py: error: ') and captured.err.count(message) == 1
    assert 'Traceback' not in captured.err and captured.out == ''


def test_overrides_may_stand_anywhere(file, capsys):
    assert main(['x.y=1', '-f', file, '--traceback', 'z=2']) == 2
    message = capsys.readouterr().err
    assert 'x = ' in message and 'z = 2' in message


def test_the_rank_that_deepspeeds_launcher_adds_is_taken(file, capsys):
    assert main(['--local_rank=1', '-f', file, 'data.samples=0']) == 2
    assert 'data: the training data is empty: 0 samples' in capsys.readouterr().err


def test_help_explains_with_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        main(['--help'])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert 'composer -n 8 run.py -f yamls/mt5.yaml' in output and 'deepspeed.zero_stage=3' in output


@pytest.mark.parametrize('arguments', [['--help'], ['-f', 'no.yaml'], ['-f', 'bad.yaml']])
def test_help_and_wrong_files_import_nothing_heavy(arguments, tmp_path):
    (tmp_path / 'bad.yaml').write_text('a: [')
    code = (
        'import atexit, sys; from composer_ds.launch import main\n'
        "atexit.register(lambda: print('heavy:', {'torch', 'composer', 'deepspeed', 'wandb'} & set(sys.modules)))\n"
        f'sys.exit(main({arguments}))'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == (0 if '--help' in arguments else 2)
    assert done.stdout.endswith('heavy: set()\n'), done.stdout + done.stderr


def test_errors_of_the_task_are_told_without_a_traceback(file, capsys):
    assert main(['-f', file, 'data.samples=0']) == 2
    assert 'data: the training data is empty: 0 samples' in capsys.readouterr().err


def test_settings_that_composer_refuses_are_told_without_a_traceback(file, capsys):
    assert main(['-f', file, 'train.precision=amp_bf16']) == 2
    message = capsys.readouterr().err
    assert 'Composer refused a setting: ' in message and 'AMP_BF16' in message
    assert 'Traceback' not in message and '--traceback shows what led to it' in message


def test_traceback_shows_where_an_error_was_raised(file, capsys):
    assert main(['-f', file, 'train.precision=amp_bf16', '--traceback']) == 2
    message = capsys.readouterr().err
    assert 'Traceback (most recent call last)' in message and '_validate_precision' in message


def test_a_bug_comes_through_as_an_exception(file, monkeypatch):
    monkeypatch.setenv('TINY_RECIPE_BUG', '1')
    with pytest.raises(ZeroDivisionError, match='a bug of the recipe'):
        main(['-f', file])


def test_an_interrupt_gives_exit_code_130(file, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr('composer_ds.launch.command_line.read', interrupted)
    assert main(['-f', file]) == 130


def test_other_ranks_speak_only_when_rank_0_did_not_end_them(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(ranks.time, 'sleep', lambda seconds: waits.append((seconds, capsys.readouterr().err)))
    monkeypatch.setattr(ranks.signal, 'signal', lambda *_: None)
    monkeypatch.setenv('LOCAL_RANK', '0')
    ranks.tell_once('wrong')
    assert (waits, capsys.readouterr().err) == ([], 'wrong\n')
    monkeypatch.setenv('LOCAL_RANK', '3')
    ranks.tell_once('wrong')
    assert waits == [(ranks.GRACE_SEC, '')]  # nothing was printed before the wait
    assert capsys.readouterr().err == 'wrong\n'


@pytest.mark.parametrize(('cores', 'local_ranks', 'threads'), [(8, 2, '4'), (2, 8, '1'), (7, 2, '3')])
def test_ranks_share_the_cores(cores, local_ranks, threads, monkeypatch):
    monkeypatch.setattr(ranks.os, 'sched_getaffinity', lambda _: range(cores), raising=False)
    monkeypatch.setenv('OMP_NUM_THREADS', 'to be restored')
    monkeypatch.delenv('OMP_NUM_THREADS')
    monkeypatch.setenv('LOCAL_WORLD_SIZE', str(local_ranks))
    note = ranks.share_cores()
    assert os.environ['OMP_NUM_THREADS'] == threads
    assert note is not None and note.startswith(f'{cores} CPU cores / {local_ranks} ranks = {threads} thread(s)')


def test_the_users_choice_of_threads_stays(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '5')
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    assert ranks.share_cores() is None
    assert os.environ['OMP_NUM_THREADS'] == '5'


def test_a_single_process_keeps_the_threads_of_torch(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', 'to be restored')
    monkeypatch.delenv('OMP_NUM_THREADS')
    assert ranks.share_cores() is None
    assert 'OMP_NUM_THREADS' not in os.environ
