"""Time of sharded checkpoints, blocking and in the background: ``python -m tests.benchmarks.sharded``."""

from __future__ import annotations

import argparse
import tempfile

from rich.console import Console
from rich.table import Table

from composer_ds.testing import RankPool
from tests.benchmarks import sharded_cases
from tests.distributed.parity_cases import STRATEGIES

MIB = 2**20


def main() -> None:
    """Measure each strategy in processes of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--layers', type=int, default=12, help='square layers of the model (default: 12)')
    parser.add_argument('--width', type=int, default=2048, help='width of each (default: 2048)')
    parser.add_argument('--ranks', type=int, default=2, help='processes (default: 2)')
    parser.add_argument('--times', type=int, default=5, help='saves of each kind, whose median counts')
    default = ['zero1', 'zero2', 'zero2-cpu', 'zero3', 'zero3-cpu']
    parser.add_argument('--strategies', nargs='+', choices=STRATEGIES, default=default, metavar='STRATEGY')
    options = parser.parse_args()
    weights_mib = options.layers * options.width**2 * 4 / MIB
    listening_sec = 0.0
    table = Table(
        title=f'AdamW, {weights_mib:.0f} MiB of weights, {options.ranks} ranks; seconds, and MiB of one rank',
        caption='torch.save: every rank its own bytes, flushed. load: beyond building the Trainer.',
    )
    columns = ('strategy', 'files', 'blocking', 'torch.save', 'ratio', 'stall', 'of blocking', 'in background')
    for column in (*columns, 'load', 'memory of it'):
        table.add_column(column, justify='left' if column == 'strategy' else 'right')
    for name in options.strategies:
        with tempfile.TemporaryDirectory() as folder, RankPool(options.ranks, timeout_sec=600) as pool:
            arguments = (STRATEGIES[name], folder, options.layers, options.width)
            saved = pool.run(sharded_cases.save, *arguments, options.times)[0]
            loaded = pool.run(sharded_cases.load, *arguments)[0]
            listening_sec = max(pool.run(sharded_cases.listen, 1000))
        table.add_row(
            name,
            f'{saved["file_bytes"] / MIB:.0f}',
            f'{saved["blocking_sec"]:.2f}',
            f'{saved["torch_sec"]:.2f}',
            f'{saved["blocking_sec"] / saved["torch_sec"]:.2f}',
            f'{saved["stalled_sec"]:.2f}',
            f'{saved["stalled_sec"] / saved["blocking_sec"]:.0%}',
            f'{saved["background_sec"]:.2f}',
            f'{loaded["load_sec"]:.2f}',
            f'{loaded["peak_bytes"] / MIB:.0f}',
        )
    console = Console(width=120)
    console.print(table)
    console.print(f'save_on_sigterm: {listening_sec * 1e6:.0f} microseconds a batch')


if __name__ == '__main__':
    main()
