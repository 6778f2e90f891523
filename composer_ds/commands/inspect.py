"""``composer-ds inspect``."""

from __future__ import annotations

from typing import Annotated

import typer

from composer_ds.commands.ending import Trusted, fail, importing
from composer_ds.errors import ComposerDSError

__all__ = ['HELP', 'inspect']

HELP = """Tell what a checkpoint is, from which run, and whether it is complete and undamaged.

CHECKPOINT is a sharded checkpoint, one of DeepSpeed's own, a file of Composer, or a folder of several, which are
listed. Exit code 1 says that something is missing or damaged.

Examples:

- composer-ds inspect ckpts

- composer-ds inspect ckpts/ep3-ba1200 --all

- composer-ds inspect ckpts/latest-rank0.pt --no-verify --json
"""


def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar='CHECKPOINT', help='A file or a folder.')],
    show_all: Annotated[bool, typer.Option('--all', help='List every tensor.')] = False,
    verify: Annotated[bool, typer.Option(help='Read everything and compare it with its checksums.')] = True,
    as_json: Annotated[bool, typer.Option('--json', help='For programs.')] = False,
    trusted: Trusted = False,
) -> None:
    """Tell what a checkpoint is. Exit codes as in :func:`composer_ds.cli.main`."""
    try:
        with importing('torch'):
            from composer_ds.inspect.terminal import run
        good = run(checkpoint, show_all=show_all, reads=verify, as_json=as_json, trusted=trusted)
    except ComposerDSError as error:
        fail(error)
    if not good:
        raise typer.Exit(1)
