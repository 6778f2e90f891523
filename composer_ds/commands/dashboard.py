"""``composer-ds dashboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from composer_ds.commands.ending import fail
from composer_ds.errors import ComposerDSError

__all__ = ['HELP', 'dashboard']

HELP = """Create a dashboard for the runs of a W&B project.

Its sections: loss and learning rate, gradient and loss scale, throughput and time, memory and communication,
checkpoints. Needs wandb-workspaces (pip install 'composer-ds[dashboard]') and an account (wandb login). Without them,
--export writes the dashboard to a file.

Examples:

- composer-ds dashboard composer-ds

- composer-ds dashboard composer-ds --export dashboard.json
"""


def dashboard(
    project: Annotated[str, typer.Argument(metavar='PROJECT', help="W&B's project.")],
    entity: Annotated[str | None, typer.Option(help='User or team. Default: that of the account.')] = None,
    export: Annotated[
        Path | None, typer.Option(metavar='FILE.json', help='Write it to a file; nothing goes over the network.')
    ] = None,
) -> None:
    """Create a dashboard. Exit codes as in :func:`composer_ds.cli.main`."""
    try:
        from composer_ds.dashboard.command import run

        typer.echo(run(project, entity, export))
    except ComposerDSError as error:
        fail(error)
