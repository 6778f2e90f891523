"""What monitors cost for each optimizer step: ``python -m tests.benchmarks.monitors``.

What DeepSpeedMonitor costs does not depend on the width, so a small one (``--width 64 --batches 1006``) shows the
milliseconds on a busy machine, too; in proportion to a long optimizer step they vanish in the noise.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from composer_ds.testing import RankPool
from tests.benchmarks import monitors_cases


def main() -> None:
    """Measure each monitor in a run that has it on in every second optimizer step, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--layers', type=int, default=12, help='square layers of the model (default: 12)')
    parser.add_argument('--width', type=int, default=1024, help='width of each (default: 1024)')
    parser.add_argument('--samples', type=int, default=64, help="samples in a rank's batch, 2 microbatches")
    parser.add_argument('--ranks', type=int, default=2, help='processes (default: 2)')
    parser.add_argument('--batches', type=int, default=80, help='optimizer steps, half of them with the monitor')
    parser.add_argument('--stages', type=int, nargs='+', default=[1, 2, 3], help='ZeRO stages')
    parser.add_argument(
        '--kinds', nargs='+', choices=monitors_cases.KINDS, default=list(monitors_cases.KINDS), help='monitors'
    )
    options = parser.parse_args()
    title = f'{options.layers} x Linear({options.width}), AdamW, {options.ranks} ranks, an optimizer step'
    table = Table(title=title)
    for column in ('monitor', 'ZeRO', 'without', 'with', 'ratio', 'of CPU time', 'itself', 'of it', 'spread'):
        table.add_column(column, justify='left' if column == 'monitor' else 'right')
    sizes = (options.layers, options.width, options.samples, options.batches)
    with RankPool(options.ranks, timeout_sec=600) as pool:
        for kind in options.kinds:
            for stage in options.stages:
                found = pool.run(monitors_cases.cost, kind, stage, *sizes)[0]
                table.add_row(
                    kind,
                    str(stage),
                    f'{found["off_sec"] * 1000:.1f} ms',
                    f'{found["on_sec"] * 1000:.1f} ms',
                    f'{found["on_sec"] / found["off_sec"]:.4f}',
                    f'{found["on_cpu_sec"] / found["off_cpu_sec"]:.4f}',
                    f'{found["own_sec"] * 1000:.3f} ms',
                    f'{found["own_sec"] / found["off_sec"]:.2%}',
                    f'{found["spread"]:.0%}',
                )
    Console(width=120).print(table)


if __name__ == '__main__':
    main()
