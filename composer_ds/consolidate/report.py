"""The command as the terminal sees it: a progress bar, then what was written."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.filesize import decimal

from composer_ds.consolidate.command import Consolidated, consolidate
from composer_ds.progress import bytes_bar

__all__ = ['run']


def run(checkpoint: str, out: str, **options: Any) -> None:
    """Consolidate, and print what was written.

    Args:
        checkpoint (str): The checkpoint.
        out (str): A folder, or a file whose name ends in ``.pt``.
        **options (Any): As for :func:`~composer_ds.consolidate.command.consolidate`.
    """
    with bytes_bar('Writing weights') as bar:
        written = consolidate(checkpoint, out, progress=bar, **options)
    _print(written, out, Console(highlight=False, soft_wrap=True))


def _print(written: Consolidated, out: str, console: Console) -> None:
    weights = written.weights
    dtypes = sorted({str(weight.dtype).removeprefix('torch.') for weight in weights.tensors})
    count = len(weights.tied)
    tied = f' and {count} further name{"s" if count > 1 else ""} of them' if count else ''
    console.print(
        f'Wrote {len(weights.tensors)} tensors{tied} ({decimal(weights.size_bytes)}, {", ".join(dtypes)}) to {out}, '
        f'from the {written.source.format} {written.source.path}.',
        markup=False,
    )
    for path in written.files if len(written.files) > 1 else ():
        console.print(f'  {path.name:<40} {decimal(path.stat().st_size):>10}', markup=False)
    for remark in written.remarks:
        console.print(remark, markup=False)
