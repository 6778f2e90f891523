"""What a person reads of a job of two ranks: each line once, with numbers that are worked out by hand.

Two batches make an optimizer step. Batches 1 and 2 halve the weight from 2 to 1; batch 3 is spoilt, so that the second
optimizer step is skipped; batch 5, whose loss is the square of 1, makes the third one alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.filesize import decimal

from tests.distributed import console_cases


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('console')


@pytest.fixture(scope='module')
def told(two_ranks, folder) -> dict[str, list[str]]:
    first, second = two_ranks.run(console_cases.lines_of_runs, str(folder))
    for text in second.values():
        # Warnings of Python's belong to whoever looks for them.
        lines = [line for line in text.splitlines() if 'Warning: ' not in line and not line.startswith('  ')]
        assert lines == []
    return {what: text.splitlines() for what, text in first.items()}


def _matching(lines: list[str], pattern: str) -> list[str]:
    return [match[1] for line in lines if (match := re.fullmatch(pattern, line))]


def test_a_run_is_told_from_beginning_to_end(told, folder):
    lines = told['saved']
    beginnings = ('DeepSpeed', 'Optimizer step', 'Saved the', 'A checkpoint is saved in')
    events = [
        re.sub(r'[:,] .*|:$', '', line).replace(str(folder), 'F') for line in lines if line.startswith(beginnings)
    ]
    assert events == [
        'DeepSpeed',
        'Optimizer step 2 skipped',
        'Saved the weights in bf16',
        'Saved the sharded checkpoint F/sharded/ep0-ba4 (batch 4)',
        'Saved the checkpoint F/whole/ep0-ba4-rank0.pt (batch 4)',
        'Saved the weights in bf16',
        'Saved the sharded checkpoint F/sharded/ep0-ba5 (batch 5)',
        'Saved the checkpoint F/whole/ep0-ba5-rank0.pt (batch 5)',
        'DeepSpeed',
    ]
    summary = [line.replace(str(folder), 'F') for line in lines[lines.index('DeepSpeed, training ended:') :]]
    assert re.fullmatch(r'  time        [\d.]+ s, [\d.]+ s of it in training: [\d,.]+ samples/s', summary.pop(3))
    assert summary == [
        'DeepSpeed, training ended:',
        '  optimizer   2 optimizer steps applied, 1 skipped',
        '  data        5 batches, 20 samples',
        '  train loss  1.0000 (last batch)',
        '  saved       F/weights/ep0-ba5 (batch 5, weights in bf16)',
        '  saved       F/sharded/ep0-ba5 (batch 5)',
        '  saved       F/whole/ep0-ba5-rank0.pt (batch 5)',
    ]


def test_sizes_are_those_of_the_files(told, folder):
    size = r' \(batch 5\): ([\d.,]+ \w+) in [\d.]+ s'
    (whole,) = _matching(told['saved'], f'Saved the checkpoint {folder}/whole/ep0-ba5-rank0.pt{size}')
    assert whole == decimal((folder / 'whole/ep0-ba5-rank0.pt').stat().st_size)
    (sharded,) = _matching(told['saved'], f'Saved the sharded checkpoint {folder}/sharded/ep0-ba5{size}')
    manifest = json.loads((folder / 'sharded/ep0-ba5/manifest.json').read_text())
    assert sharded == decimal(sum(entry['size_bytes'] for entry in manifest['files'].values()))
    (weights,) = _matching(told['saved'], f'Saved the weights in bf16, {folder}/weights/ep0-ba5{size}')
    assert weights == '2 bytes'  # one element


@pytest.mark.parametrize(
    ('what', 'line'),
    [
        (
            'resumed',
            'Resumed from F/whole/ep0-ba4-rank0.pt: batch 4, 1 optimizer step applied, 1 skipped; saved under ZeRO 2 '
            'by 2 ranks.',
        ),
        (
            'resumed from shards',
            'Resumed from F/sharded/ep0-ba4: batch 4, 1 optimizer step applied, 1 skipped; saved under ZeRO 2 by 2 '
            'ranks; loaded in T s.',
        ),
        ('weights', 'Loaded F/whole/ep0-ba4-rank0.pt; training begins at batch 0.'),
        (
            'plain',
            'Resumed from F/plain/ep0-ba2-rank0.pt: batch 2, 2 optimizer steps applied; saved by Composer without '
            'DeepSpeed.',
        ),
    ],
)
def test_where_a_run_goes_on_from(told, folder, what, line):
    found = [one for one in told[what] if one.startswith(('Resumed', 'Loaded'))]
    assert [re.sub(r'\d+\.\d+ s', 'T s', one.replace(str(folder), 'F')) for one in found] == [line]


@pytest.mark.parametrize('what', ['resumed', 'resumed from shards'])
def test_a_resumed_run_tells_its_own_part_and_the_whole(told, what):
    lines = told[what]
    summary = lines[lines.index('DeepSpeed, training ended:') :]
    assert summary[1:4] == [
        '  optimizer   1 optimizer step applied, 0 skipped',
        '  in all      2 applied, 1 skipped, in 5 batches',
        '  data        1 batch, 4 samples',
    ]
    assert summary[-1] == '  train loss  1.0000 (last batch)'


def test_bars_have_the_bytes_of_this_ranks_runs(two_ranks, tmp_path):
    # One fp32 weight with two moments, all on the rank that owns it. The file has a header around each.
    saves, loads = zip(*two_ranks.run(console_cases.bytes_of_bars, str(tmp_path)), strict=True)
    assert {what for what, *_ in saves} == {'Saving F/adam/ep0-ba1'}
    assert sorted(total for _, total, _ in saves) == [0, 12]
    assert all(told > total if total else told == 0 for _, total, told in saves)
    assert {what for what, *_ in loads} == {'Loading F/adam/ep0-ba1'}
    assert sorted((total, told) for _, total, told in loads) == [(0, 0), (12, 12)]


_ON_A_TERMINAL = """
from tests.distributed.console_cases import Rests, _deepspeed, _trainer
trainer = _trainer(algorithms=[_deepspeed(2)], callbacks=[Rests()], progress_bar=True)
trainer.fit()
trainer.close()
"""


@pytest.mark.slow
def test_on_a_terminal_there_is_a_second_bar_and_no_noise():
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 120, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != 'DEEPSPEED_LOG_LEVEL'}
    job = subprocess.Popen([sys.executable, '-c', _ON_A_TERMINAL], stdout=writer, stderr=writer, env=env)
    os.close(writer)
    text = b''
    try:
        while data := os.read(reader, 65536):
            text += data
    except OSError:  # how a terminal ends on Linux
        pass
    assert job.wait(60) == 0, text.decode()
    screen = text.decode()
    for state in ('1/3', '1/3, 1 skipped', '2/3, 1 skipped'):
        assert re.search(rf'optimizer steps +\d+%\|[^|]*\| {state}', screen), screen
    assert '5/5' in screen and screen.count('DeepSpeed, training ended:') == 1
    for noise in ('built successfully', 'No CUDA runtime', 'OVERFLOW', 'WARNING', 'deprecated'):
        assert noise not in screen, screen
