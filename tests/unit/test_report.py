"""`composer-ds report`: the page has the numbers of the run, and asks for nothing from elsewhere."""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from composer.loggers import FileLogger
from typer.testing import CliRunner

from composer_ds.cli import app
from composer_ds.report.figures import thinned
from composer_ds.report.record import joined

LOSSES = {batch: 10.0 / batch for batch in range(1, 7)}
PLAN = {
    'zero_stage': 2,
    'precision': 'amp_bf16',
    'decisions': {'gradient clipping': {'value': 'norm <0.5>', 'owner': 'DeepSpeed', 'source': 'ds_config'}},
    'notes': ["'auto' stands for </script> & more"],
}


class Page(HTMLParser):
    """What a browser would load, and the text that it would show."""

    def __init__(self, text: str):
        super().__init__()
        self.loads: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self._hidden = ''
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag in ('script', 'style'):
            self._hidden = tag
            self.scripts += [attributes] if tag == 'script' else []
        self.loads += [value or '' for name, value in attrs if name in ('src', 'href', 'data', 'action', 'srcset')]

    def handle_endtag(self, tag):
        self._hidden = '' if tag == self._hidden else self._hidden

    def handle_data(self, data):
        if not self._hidden and data.strip():
            self.texts.append(data.strip())


def page_at(path: Path) -> tuple[Page, dict[str, Any]]:
    """The page, and its panels by title."""
    text = path.read_text(encoding='utf-8')
    (found,) = re.findall(r'<script type="application/json" id="panels">(.*?)</script>', text, re.DOTALL)
    return Page(text), {panel['title']: panel for panel in json.loads(found)}


def lines(panel: dict[str, Any]) -> dict[str, dict[int, float | None]]:
    """What is drawn, by the name of the line."""
    return {line['name']: dict(zip(line['x'], line['y'], strict=True)) for line in panel['data']}


def call(*arguments: str) -> str:
    """The output of `composer-ds report`, which must succeed."""
    result = CliRunner().invoke(app, ['report', *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope='module')
def runs(tmp_path_factory) -> Path:
    """A folder with a run of W&B that was started twice: the second time from batch 4 on."""
    folder = tmp_path_factory.mktemp('runs')
    settings = wandb.Settings(console='off', silent=True, x_disable_stats=True)
    (folder / 'checkpoints').mkdir()
    torch.save({'state': {}}, folder / 'checkpoints' / 'ep0-ba4-rank0.pt')
    for batches in (range(1, 6), range(4, 7)):
        run = wandb.init(
            project='p', dir=folder, mode='offline', id='abc', resume='allow', name='<job>', settings=settings
        )
        run.config.update({'deepspeed_plan': PLAN, 'deepspeed_environment': {'versions': {'torch': '1.2.3'}}})
        for batch in batches:
            first_life = 100.0 if len(batches) == 5 and batch >= 4 else 0.0  # from where the second one began
            # Two batches make an optimizer step.
            optimizer_step = {
                'optimizer_steps/applied': batch // 2,
                'l2_norm/grad/global': math.nan if batch == 4 else batch / 8,
                'time_split/forward_sec': 0.25 * batch,
                'time_split/total_sec': 77.0,
                'zero_memory/weights': 1000 * batch,
            }
            run.log(
                {'loss/train/total': LOSSES[batch] + first_life} | (optimizer_step if batch % 2 == 0 else {}), batch
            )
        run.finish()
        time.sleep(1.1)  # W&B names its folders by the second
    return folder


def test_the_page_has_what_was_logged(runs, tmp_path):
    out = tmp_path / 'page.html'
    assert f'Wrote {out}, about run <job> (6 batches)' in call(str(runs), '--out', str(out)).replace('\n', '')
    page, panels = page_at(out)
    loss = lines(panels['Training loss'])['total']
    assert loss == pytest.approx(LOSSES, rel=1e-5)  # each batch once, and those of the second start
    assert panels['Training loss']['layout']['xaxis']['title']['text'] == 'batches'

    norm = panels['Gradient norm, before clipping']
    assert lines(norm)['global'] == {1: 0.25, 2: None, 3: 0.75}  # over optimizer steps; NaN is a gap
    assert norm['layout']['xaxis']['title']['text'] == 'optimizer steps'
    assert lines(panels['Time of an optimizer step']) == {'forward_sec': {1: 0.5, 2: 1.0, 3: 1.5}}  # not the total
    assert lines(panels['Memory of the rank that logs']) == {'weights': {1: 2000, 2: 4000, 3: 6000}}
    assert 'Loss scale' not in panels  # nothing was logged

    for text in ('<job>', 'norm <0.5>', PLAN['notes'][0], 'amp_bf16', '1.2.3', 'The run was started 2 times.'):
        assert text in page.texts, text
    assert any(text.endswith('ep0-ba4-rank0.pt') for text in page.texts)


def test_the_page_loads_nothing(runs, tmp_path):
    call(str(runs), '--out', str(tmp_path / 'page.html'))
    text = (tmp_path / 'page.html').read_text(encoding='utf-8')
    page, _ = page_at(tmp_path / 'page.html')
    assert page.loads == []
    assert len(page.scripts) == 3 and 'plotly.js v' in text
    assert "default-src 'none'" in text  # a browser would refuse, too
    assert not re.search(r'@import|url\(["\']?http', text.split('<script')[0])


def test_a_page_from_the_text_of_composers_file_logger(tmp_path):
    logger = FileLogger(str(tmp_path / 'logs-rank0.txt'), capture_stdout=False, capture_stderr=False)
    state: Any = type('State', (), {'run_name': 'job'})()
    logger.init(state, None)  # pyright: ignore[reportArgumentType]
    logger.log_hyperparameters({'run_name': 'job', 'deepspeed_plan': PLAN})
    for batch in range(3):
        logger.log_metrics({'loss/train/total': 3.5 - batch}, batch)
        logger.log_metrics({'optimizer_steps/applied': batch + 1, 'l2_norm/grad/global': batch / 4}, batch + 1)
    logger.log_metrics({'gradient/loss_scale': math.inf, 'optimizer_steps/applied': 4}, 4)
    assert logger.file is not None
    logger.file.close()
    call(str(tmp_path))
    page, panels = page_at(tmp_path / 'report.html')
    assert lines(panels['Training loss'])['total'] == {1: 3.5, 2: 2.5, 3: 1.5}  # batches that were done
    assert lines(panels['Gradient norm, before clipping'])['global'] == {1: 0.0, 2: 0.25, 3: 0.5}
    assert lines(panels['Loss scale']) == {'loss_scale': {4: None}}
    assert 'norm <0.5>' in page.texts


@pytest.mark.parametrize(
    ('content', 'arguments', 'code', 'message'),
    [
        (None, [], 2, 'no such file or folder'),
        ({}, [], 2, 'there is no run here'),
        ({'logs.txt': '[stdout]: nothing\n'}, [], 2, 'there is no run here'),
        ({'wandb/offline-run-1-a/run-a.wandb': 'no such format'}, [], 1, 'cannot be read'),
        ({'a.txt': '[metric][batch=1]: loss/train/total: 1.0 \n'}, ['--checkpoints', 'nowhere'], 2, 'no such folder'),
        ({'a.txt': '[metric][batch=1]: loss/train/total: 1.0 \n'}, ['--out', 'no/page.html'], 2, 'cannot be written'),
    ],
    ids=['no folder', 'empty', 'another text', 'damaged', 'no checkpoints', 'nowhere to write'],
)
def test_what_is_wrong_is_one_message(tmp_path, monkeypatch, content, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    for name, text in (content or {}).items():
        path = tmp_path / 'run' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if content == {}:
        (tmp_path / 'run').mkdir()
    result = CliRunner().invoke(app, ['report', 'run', *arguments])
    assert result.exit_code == code, result.output
    assert result.output.startswith('composer-ds: error: ') and message in result.output


def test_many_points_are_thinned_and_peaks_stay():
    y: list[float | None] = [float(x % 7) for x in range(100_000)]
    y[43_210], y[77_777] = 1e9, None
    x, kept = thinned(list(range(100_000)), y)
    assert len(x) < 3000 and (x[0], x[-1]) == (0, 99_999)
    assert (43_210, 1e9) in zip(x, kept, strict=True) and (77_777, None) in zip(x, kept, strict=True)
    assert all(y[index] == value for index, value in zip(x, kept, strict=True))


def test_a_later_start_counts_from_where_it_began():
    first = [(1, {'a': 1}), (2, {'a': 2}), (3, {'a': 3})]
    assert joined([first, [(2, {'a': 20}), (2, {'b': 5})], []]) == [(1, {'a': 1}), (2, {'a': 20, 'b': 5})]
