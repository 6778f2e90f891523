"""Panels as plotly figures."""

from __future__ import annotations

from typing import Any

from composer_ds.panels import BATCHES, SECTIONS, Panel
from composer_ds.report.record import RunRecord, Series

__all__ = ['figures_of', 'thinned']

# Paul Tol's bright scheme, which colour-blind people can tell apart: https://personal.sron.nl/~pault
_COLOURS = ('#4477AA', '#EE6677', '#228833', '#AA8800', '#66CCEE', '#AA3377', '#777777')
_MOST_POINTS = 2000


def figures_of(record: RunRecord) -> list[tuple[str, list[dict[str, Any]]]]:
    """Draw all panels for which the run has numbers.

    Args:
        record (RunRecord): The run.

    Returns:
        list[tuple[str, list[dict[str, Any]]]]: By section, its panels: each with ``title`` and ``keys``, and ``data``
            and ``layout`` for ``Plotly.newPlot``.
    """
    series, optimizer_steps = record.series(), record.optimizer_steps()
    sections = []
    for section in SECTIONS:
        drawn = [_draw(panel, series, optimizer_steps) for panel in section.panels]
        panels = [panel for panel in drawn if panel is not None]
        if panels:
            sections.append((section.title, panels))
    return sections


def _draw(panel: Panel, series: dict[str, Series], optimizer_steps: dict[int, int]) -> dict[str, Any] | None:
    keys = panel.choose(series)
    if not keys:
        return None
    import plotly.graph_objects as go

    names = _short_names(keys)
    figure = go.Figure()
    for number, key in enumerate(keys):
        one = series[key]
        x, y = one.steps, one.values
        if panel.x != BATCHES and optimizer_steps:
            points = [
                (optimizer_steps[step], value) for step, value in zip(x, y, strict=True) if step in optimizer_steps
            ]
            x, y = [point[0] for point in points], [point[1] for point in points]
        x, y = thinned(x, y)
        colour = _COLOURS[number % len(_COLOURS)]
        figure.add_trace(
            go.Scatter(
                x=x,
                y=[None if value is None else float(f'{value:.6g}') for value in y],
                name=names[key],
                mode='lines+markers' if len(x) < 30 else 'lines',
                line={'color': colour, 'width': 0 if panel.is_stacked else 1.8},
                marker={'size': 5},
                stackgroup='one' if panel.is_stacked else None,
                fillcolor=colour if panel.is_stacked else None,
                hovertemplate='%{y:.5g}',
            )
        )
    counts = 'batches' if panel.x == BATCHES or not optimizer_steps else 'optimizer steps'
    rows_of_legend = (len(keys) + 2) // 3 if len(keys) > 1 else 0
    highest = max((value for key in keys for value in series[key].values if value is not None), default=0.0)
    figure.update_layout(
        template='plotly_white',
        height=300 + 20 * rows_of_legend,
        margin={'l': 60, 'r': 12, 't': 28, 'b': 44 + 20 * rows_of_legend},
        font={'family': 'system-ui, sans-serif', 'size': 12, 'color': '#334155'},
        hovermode='x unified',
        showlegend=len(keys) > 1,
        legend={
            'orientation': 'h',
            # Below the title of the axis, wherever that is.
            'yref': 'container',
            'yanchor': 'bottom',
            'y': 0,
            'x': 0,
            'font': {'size': 11},
            'traceorder': 'normal',
        },
        xaxis={'title': {'text': counts}, 'hoverformat': 'd'},
        yaxis={
            'title': {'text': panel.unit},
            'type': 'log' if panel.is_log else 'linear',
            'rangemode': 'tozero' if panel.unit and not panel.is_log else 'normal',
            # Of zeros alone plotly would draw negative values, too.
            'range': [0, 1] if highest == 0 and not panel.is_log else None,
            'exponentformat': 'SI' if panel.unit == 'bytes' else 'power',
        },
    )
    content = figure.to_plotly_json()
    # Of the template only what is used here: the whole is 6 kB for each panel.
    content['layout']['template'] = {'layout': {'colorway': list(_COLOURS)}}
    for axis in ('xaxis', 'yaxis'):
        content['layout'][axis] |= {'gridcolor': '#e2e8f0', 'zerolinecolor': '#cbd5e1', 'automargin': True}
    content['layout'] |= {'paper_bgcolor': 'white', 'plot_bgcolor': 'white'}
    return {'title': panel.title, 'keys': keys, **content}


def _short_names(keys: list[str]) -> dict[str, str]:
    """What tells the keys of a panel apart."""
    paths = [key.split('/') for key in keys]
    alike = 0
    while all(len(path) > alike + 1 and path[alike] == paths[0][alike] for path in paths):
        alike += 1
    return {key: '/'.join(path[alike:]) for key, path in zip(keys, paths, strict=True)}


def thinned(x: list[int], y: list[float | None]) -> tuple[list[int], list[float | None]]:
    """Leave out points where there are too many to be seen; peaks stay.

    Args:
        x (list[int]): Of a line.
        y (list[float | None]): Of a line.

    Returns:
        tuple[list[int], list[float | None]]: Of each stretch the least and the greatest, the first and the last point.
    """
    if len(x) <= _MOST_POINTS:
        return x, y
    kept = {0, len(x) - 1}
    stretches = _MOST_POINTS // 2
    for number in range(stretches):
        stretch = range(number * len(x) // stretches, (number + 1) * len(x) // stretches)
        finite = [index for index in stretch if y[index] is not None]
        if len(finite) < len(stretch):
            kept.add(next(index for index in stretch if y[index] is None))
        if finite:
            kept |= {min(finite, key=lambda index: y[index] or 0.0), max(finite, key=lambda index: y[index] or 0.0)}
    indices = sorted(kept)
    return [x[index] for index in indices], [y[index] for index in indices]
