"""The HTML page: everything is in it, and it asks for nothing from elsewhere."""

from __future__ import annotations

import html
import json
import posixpath
from typing import Any

from composer_ds import __version__
from composer_ds.plan_keys import ENVIRONMENT, PLAN
from composer_ds.report.figures import figures_of
from composer_ds.report.record import RunRecord
from composer_ds.report.template import PAGE

__all__ = ['page_of']


def page_of(record: RunRecord, checkpoints: list[dict[str, str]]) -> str:
    """Write the page.

    Args:
        record (RunRecord): The run.
        checkpoints (list[dict[str, str]]): From :func:`~composer_ds.report.checkpoints.checkpoints_of`.

    Returns:
        str: HTML.
    """
    from plotly.offline import get_plotlyjs

    sections, panels = [], []
    for title, figures in figures_of(record):
        cards = []
        for figure in figures:
            cards.append(
                f'<figure class="card"><figcaption>{_text(figure["title"])} <small>{_keys(figure["keys"])}</small>'
                '</figcaption>'
                f'<div class="plot" id="panel{len(panels)}"></div></figure>'
            )
            panels.append(figure)
        sections.append(_section(title, f'<div class="grid">{"".join(cards)}</div>'))
    if checkpoints:
        columns = list(checkpoints[0])
        rows = [[one[column] for column in columns] for one in checkpoints]
        sections.append(_section('Files of checkpoints', _table(columns, rows)))
    plan = record.config.get(PLAN)
    if isinstance(plan, dict):
        sections.append(_section('Plan', _plan(plan)))
    sections.append(_section('Environment', _table(['', ''], _environment(record))))
    settings = {key: value for key, value in record.config.items() if key not in (PLAN, ENVIRONMENT)}
    if settings:
        text = _text(json.dumps(settings, indent=2, default=str))
        sections.append(_section('Configuration', f'<details><summary>Show</summary><pre>{text}</pre></details>'))
    parts = {
        'TITLE': _text(record.name),
        'SUMMARY': _summary(record),
        'REMARKS': ''.join(f'<p class="remark">{_text(remark)}</p>' for remark in record.remarks),
        'SECTIONS': '\n'.join(sections),
        'FOOT': f'composer-ds {__version__}, from {_text(", ".join(str(path) for path in record.sources))}',
        # "</" would end the script.
        'PANELS': json.dumps(panels).replace('</', '<\\/'),
        'PLOTLY': get_plotlyjs(),
    }
    # At once: what is put in is not looked through again.
    pieces = PAGE.split('@@')
    return ''.join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _text(value: Any) -> str:
    return html.escape(str(value))


def _keys(keys: list[str]) -> str:
    return _text(keys[0] if len(keys) == 1 else f'{posixpath.commonpath(keys)}/...')


def _section(title: str, content: str) -> str:
    return f'<section><h2>{_text(title)}</h2>{content}</section>'


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    head = f'<tr>{"".join(f"<th>{_text(column)}</th>" for column in columns)}</tr>' if any(columns) else ''
    body = ''.join(f'<tr>{"".join(f"<td>{_text(cell)}</td>" for cell in row)}</tr>' for row in rows)
    return f'<div class="card scroll"><table>{head}{body}</table></div>'


def _plan(plan: dict[str, Any]) -> str:
    decisions = plan.get('decisions')
    notes = ''.join(f'<p class="remark">{_text(note)}</p>' for note in plan.get('notes') or [])
    if not isinstance(decisions, dict):
        return notes + _table(['Setting', 'Value'], [[key, _in_words(value)] for key, value in plan.items()])
    rows = [
        [setting, _in_words(one.get('value')), one.get('owner', ''), one.get('source', '')]
        for setting, one in decisions.items()
        if isinstance(one, dict)
    ]
    return notes + _table(['Setting', 'Value', 'Decided by', 'Where'], rows)


def _in_words(value: Any) -> str:
    if value is None:
        return 'not set'
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    return str(value)


def _environment(record: RunRecord) -> list[list[Any]]:
    rows: list[list[Any]] = []
    environment = record.config.get(ENVIRONMENT)
    if isinstance(environment, dict):
        ranks = f'{environment.get("world_size")} on {environment.get("nodes")} node(s)'
        rows += [['ranks', ranks], ['device', environment.get('device')], ['platform', environment.get('platform')]]
        versions = environment.get('versions')
        if isinstance(versions, dict):
            rows += [[package, version] for package, version in versions.items()]
    return rows + [[name, value] for name, value in record.facts.items()]


def _summary(record: RunRecord) -> str:
    series = record.series()

    def last(key: str) -> float | None:
        values = [value for value in series[key].values if value is not None] if key in series else []
        return values[-1] if values else None

    plan = record.config.get(PLAN)
    tiles = [
        ('batches', str(record.rows[-1][0]) if record.rows else '0'),
        ('optimizer steps', _whole(last('optimizer_steps/applied'))),
        ('skipped', _whole(last('optimizer_steps/skipped'))),
        ('training loss, last', _short(last('loss/train/total'))),
        ('samples per second, last', _short(last('speed/samples_per_sec'))),
        ('ZeRO stage', str(plan.get('zero_stage', '')) if isinstance(plan, dict) else ''),
        ('precision', str(plan.get('precision', '')) if isinstance(plan, dict) else ''),
        ('started', record.facts.get('started', '')),
    ]
    return ''.join(
        f'<div class="tile"><b>{_text(value)}</b><span>{name}</span></div>' for name, value in tiles if value
    )


def _whole(value: float | None) -> str:
    return '' if value is None else f'{value:,.0f}'


def _short(value: float | None) -> str:
    return '' if value is None else f'{value:,.4g}' if abs(value) < 1e5 else f'{value:,.0f}'
