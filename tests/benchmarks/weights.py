"""Time and memory of writing whole weights under ZeRO 3: ``python -m tests.benchmarks.weights``."""

from __future__ import annotations

import argparse
import tempfile

from rich.console import Console
from rich.table import Table

from composer_ds.testing import RankPool
from tests.benchmarks import weights_cases

MIB = 2**20


def main() -> None:
    """Measure all ways in the same processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--layers', type=int, default=12, help='square layers of the model (default: 12)')
    parser.add_argument('--width', type=int, default=2048, help='width of each (default: 2048)')
    parser.add_argument('--ranks', type=int, default=2, help='processes (default: 2)')
    parser.add_argument('--times', type=int, default=5, help='writes of each kind, whose median counts (default: 5)')
    parser.add_argument('--folder', help='where to write (default: a temporary folder)')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, RankPool(options.ranks, timeout_sec=600) as pool:
        found = pool.run(weights_cases.measure, folder, options.layers, options.width, options.times)
    size_bytes = options.layers * options.width**2 * 4
    table = Table(
        title=f'ZeRO 3, {options.ranks} ranks, {options.layers} x Linear({options.width}): {size_bytes / MIB:.0f} MiB '
        f'of fp32 weights, largest tensor {4 * options.width**2 / MIB:.0f} MiB; MiB beyond the start'
    )
    for column in ('written by', 'time', 'of torch.save', 'rank 0', 'others'):
        table.add_column(column, justify='left' if column == 'written by' else 'right')
    torch_sec = found[0]['torch.save of the same bytes']['time_sec']
    for name, first in found[0].items():
        table.add_row(
            name,
            f'{first["time_sec"]:.2f} s',
            f'{first["time_sec"] / torch_sec:.2f}',
            f'{first["peak_bytes"] / MIB:.0f}',
            f'{max(one[name]["peak_bytes"] for one in found[1:]) / MIB:.0f}' if found[1:] else '-',
        )
    Console(width=120).print(table)


if __name__ == '__main__':
    main()
