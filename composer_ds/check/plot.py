"""The learning rate over a run, as characters for a terminal and as a picture."""

from __future__ import annotations

from pathlib import Path

from composer_ds.errors import ConfigError
from composer_ds.learning_rate import LearningRates

__all__ = ['save_picture', 'terminal_plot']

_MARKERS = ('braille', 'x', 'o', '*', '+')


def terminal_plot(rates: LearningRates, width: int, height: int = 14) -> str:
    """Draw the curves with characters, without colours, so that they survive a pipe.

    Args:
        rates (LearningRates): The curves.
        width (int): Columns.
        height (int): Lines.

    Returns:
        str: The lines.
    """
    import plotext

    plotext.clear_figure()
    plotext.plotsize(width, height)
    plotext.theme('clear')
    curves = rates.curves
    for number, (name, values) in enumerate(curves.items()):
        marker = _MARKERS[number % len(_MARKERS)]
        plotext.plot(rates.optimizer_steps, values, marker=marker, label=name if len(curves) > 1 else None)
    highest = max(max(values) for values in curves.values())
    lowest = min(0.0, *(min(values) for values in curves.values()))
    plotext.ylim(lowest, highest or 1.0)
    plotext.yticks(*_ticks(lowest, highest or 1.0))
    last = rates.optimizer_steps[-1]
    at = sorted({1 + round(part * (last - 1) / 4) for part in range(5)})
    plotext.xticks(at, [f'{step:,}' for step in at])
    plotext.xlabel('optimizer steps')
    drawn = plotext.uncolorize(plotext.build())
    plotext.clear_figure()
    return '\n'.join(line.rstrip() for line in drawn.splitlines())


def _ticks(lowest: float, highest: float) -> tuple[list[float], list[str]]:
    values = [lowest + part * (highest - lowest) / 3 for part in range(4)]
    return values, [f'{value:.2e}' if value else '0' for value in values]


def save_picture(rates: LearningRates, path: Path, title: str) -> None:
    """Draw the curves into a file.

    Args:
        rates (LearningRates): The curves.
        path (Path): The suffix says the format, such as ``.png`` or ``.svg``.
        title (str): Above the picture.

    Raises:
        ConfigError: When the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout='constrained')
    axes = figure.add_subplot()
    for name, values in rates.curves.items():
        axes.plot(rates.optimizer_steps, values, label=name, linewidth=2)
    axes.set(title=title, xlabel='optimizer steps', ylabel='learning rate', xlim=(0, rates.optimizer_steps[-1]))
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.ticklabel_format(axis='y', scilimits=(-3, 3), useMathText=True)
    axes.xaxis.set_major_formatter('{x:,.0f}')
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    if len(rates.curves) > 1:
        axes.legend(frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f'--plot {path}: cannot be written: {error}') from error
