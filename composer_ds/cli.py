"""The command `composer-ds`. Each subcommand is a module of ``composer_ds.commands``."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from composer_ds import __version__
from composer_ds.commands import check, consolidate, dashboard, inspect, report
from composer_ds.commands.ending import fail
from composer_ds.errors import ComposerDSError

__all__ = ['app', 'main']

app = typer.Typer(
    name='composer-ds',
    no_args_is_help=True,
    add_completion=False,
    context_settings={'help_option_names': ['-h', '--help']},
    rich_markup_mode='markdown',
    pretty_exceptions_enable=False,
)


def main() -> NoReturn:
    """Runs the command; the entry point of the package.

    Exit codes: 0 done, 2 wrong command line, settings that conflict or a file that cannot be read, 1 any other error,
    such as a checkpoint that is missing, incomplete or damaged.
    """
    try:
        app()
    except ComposerDSError as error:
        fail(error)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f'composer-ds {__version__}')
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option('--version', callback=_print_version, is_eager=True, help='Show the version and exit.')
    ] = False,
) -> None:
    """DeepSpeed for MosaicML Composer: look at runs before and after they are trained."""


app.command(help=check.HELP, no_args_is_help=True)(check.check)
app.command(help=consolidate.HELP, no_args_is_help=True)(consolidate.consolidate)
app.command(help=inspect.HELP, no_args_is_help=True)(inspect.inspect)
app.command(help=report.HELP, no_args_is_help=True)(report.report)
app.command(help=dashboard.HELP, no_args_is_help=True)(dashboard.dashboard)
