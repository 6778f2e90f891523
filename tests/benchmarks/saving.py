"""Time and memory of saving and loading, against plain Composer: ``make benchmark``."""

from __future__ import annotations

import argparse
import statistics
import tempfile

from rich.console import Console
from rich.table import Table

from composer_ds.testing import RankPool
from tests.benchmarks import saving_cases
from tests.distributed.parity_cases import STRATEGIES

MIB = 2**20


def main() -> None:
    """Measure each strategy in processes of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--layers', type=int, default=8, help='square layers of the model (default: 8)')
    parser.add_argument('--width', type=int, default=2048, help='width of each (default: 2048)')
    parser.add_argument('--ranks', type=int, default=2, help='processes (default: 2)')
    parser.add_argument('--times', type=int, default=6, help='saves of each kind, whose median counts')
    parser.add_argument(
        '--starts', type=int, default=1, help='processes one after another, whose median ratio counts (default: 1)'
    )
    parser.add_argument('--stream', action='store_true', help='leave out what Composer itself writes under DeepSpeed')
    options = parser.parse_args()
    table = Table(
        title=f'AdamW, {options.layers} x Linear({options.width}), {options.ranks} ranks; MiB beyond the start'
    )
    for column in (
        'strategy',
        'written by',
        'file',
        'time',
        'torch.save',
        'ratio',
        'of all starts',
        'unflushed',
        'rank 0',
        'others',
        'load',
        'of it building',
    ):
        table.add_column(column, justify='left' if column in ('strategy', 'written by') else 'right')
    for strategy in (None, 'zero1', 'zero2', 'zero2-cpu', 'zero3', 'zero3-cpu'):
        for by_composer in _writers(strategy, options.stream):
            starts = [_measured(strategy, by_composer, options) for _ in range(options.starts)]
            saved, loaded = starts[0]
            ratios = _ratios(starts, 'time_sec')
            table.add_row(
                strategy or 'plain Composer',
                'Composer' if by_composer else 'a stream',
                f'{saved[0]["file_bytes"] / MIB:.0f}',
                f'{saved[0]["time_sec"]:.2f} s',
                f'{saved[0]["torch_sec"]:.2f} s',
                f'{statistics.median(ratios):.2f}',
                f'{min(ratios):.2f}-{max(ratios):.2f}',
                f'{statistics.median(_ratios(starts, "unflushed_sec")):.2f}',
                f'{saved[0]["peak_bytes"] / MIB:.0f}',
                f'{max(found["peak_bytes"] for found in saved[1:]) / MIB:.0f}' if saved[1:] else '-',
                f'{max(found["peak_bytes"] for found in loaded) / MIB:.0f}',
                f'{max(found["built_bytes"] for found in loaded) / MIB:.0f}',
            )
    Console(width=120).print(table)


def _writers(strategy: str | None, stream: bool) -> list[bool]:
    if strategy is None:
        return [True]
    return [False] if stream else [True, False]


def _ratios(starts: list[list[list[dict[str, float]]]], what: str) -> list[float]:
    """How long it took on rank 0, of the time of ``torch.save``."""
    return [saved[0][what] / saved[0]['torch_sec'] for saved, _ in starts]


def _measured(strategy: str | None, by_composer: bool, options: argparse.Namespace) -> list[list[dict[str, float]]]:
    """Save and load in processes of their own; what each rank measured."""
    with tempfile.TemporaryDirectory() as folder, RankPool(options.ranks, timeout_sec=600) as pool:
        arguments = (
            strategy and STRATEGIES[strategy],
            f'{folder}/checkpoint.pt',
            options.layers,
            options.width,
        )
        saved = pool.run(saving_cases.save, *arguments, options.times, by_composer)
        return [saved, pool.run(saving_cases.load, *arguments)]


if __name__ == '__main__':
    main()
