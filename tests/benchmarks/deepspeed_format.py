"""Time and memory of reading DeepSpeed's checkpoints, against its zero_to_fp32.

``python -m tests.benchmarks.deepspeed_format``
"""

from __future__ import annotations

import argparse
import tempfile

from rich.console import Console
from rich.table import Table

from composer_ds.testing import RankPool
from tests.benchmarks import deepspeed_format_cases

MIB = 2**20


def main() -> None:
    """Save on some ranks, read in a fresh process each, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--layers', type=int, default=11, help='square layers of the model (default: 11)')
    parser.add_argument('--width', type=int, default=2048, help='width of each (default: 2048)')
    parser.add_argument('--ranks', type=int, default=2, help='processes that save (default: 2)')
    parser.add_argument('--stages', type=int, nargs='+', default=[2, 3], help='ZeRO stages (default: 2 3)')
    options = parser.parse_args()
    weights_bytes = options.layers * options.width**2 * 4
    table = Table(
        title=f'AdamW, {options.layers} x Linear({options.width}): {weights_bytes / MIB:.0f} MiB of fp32 weights, '
        f'{options.ranks} ranks; MiB beyond the start'
    )
    for column in ('stage', 'read by', 'time', 'peak', 'of it anonymous', 'elements'):
        table.add_column(column, justify='left' if column == 'read by' else 'right')
    for stage in options.stages:
        with tempfile.TemporaryDirectory() as folder:
            with RankPool(options.ranks, timeout_sec=600) as pool:
                pool.run(deepspeed_format_cases.save, folder, stage, options.layers, options.width)
            for reader in deepspeed_format_cases.READERS:
                with RankPool(1, timeout_sec=600) as pool:
                    found = pool.run(deepspeed_format_cases.read, folder, reader)[0]
                table.add_row(
                    str(stage),
                    reader,
                    f'{found["time_sec"]:.2f} s',
                    f'{found["peak_bytes"] / MIB:.0f}',
                    f'{found["anonymous_bytes"] / MIB:.0f}',
                    f'{found["elements"]:,}',
                )
    Console(width=120).print(table)


if __name__ == '__main__':
    main()
