"""``composer-ds report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from composer_ds.commands.ending import fail, importing
from composer_ds.errors import ComposerDSError

__all__ = ['HELP', 'report']

HELP = """Write an HTML page about a run: its plots, plan, environment and checkpoints. No account is needed.

RUN_FOLDER has what W&B has written, offline or online, or the text of Composer's FileLogger. Of several runs the newest
is taken. The page is one file of 5 MB that loads nothing from elsewhere.

Examples:

- composer-ds report runs

- composer-ds report runs/wandb/offline-run-20260131_120000-ab12cd34 --out report.html
"""


def report(
    folder: Annotated[Path, typer.Argument(metavar='RUN_FOLDER', help='A folder, or a file of one run.')],
    out: Annotated[
        Path | None, typer.Option(metavar='FILE.html', help='The page. Default: report.html in RUN_FOLDER.')
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(metavar='FOLDER', help='Of checkpoints. Default: where the run says.')
    ] = None,
) -> None:
    """Write a page. Exit codes as in :func:`composer_ds.cli.main`."""
    try:
        with importing('torch'):
            from composer_ds.report.command import run

            done = run(folder, out, checkpoints)
        typer.echo(done)
    except ComposerDSError as error:
        fail(error)
