"""What the subcommands have in common: how they fail, and what is shown while they import."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.status import Status

from composer_ds.errors import ComposerDSError, ConfigError

__all__ = ['Trusted', 'fail', 'importing']

Trusted = Annotated[
    bool,
    typer.Option(
        '--trusted', help='Unpickle any class in the checkpoint, which can run any code: only if you know its writer.'
    ),
]


def fail(error: ComposerDSError) -> NoReturn:
    """End the command with its message.

    Args:
        error (ComposerDSError): A ``ConfigError`` gives exit code 2, any other 1.
    """
    print(f'composer-ds: error: {error}', file=sys.stderr, flush=True)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def importing(what: str) -> Status:
    """Say that something large is being imported, while it is.

    Args:
        what (str): Names of packages.

    Returns:
        Status: A context manager.
    """
    return Console(stderr=True).status(f'Importing {what}')
