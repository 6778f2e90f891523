"""What ``composer-ds dashboard`` does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from composer_ds.dashboard.workspace import NAME, create, make_workspace, view_of
from composer_ds.errors import ConfigError, EnvironmentProblem
from composer_ds.panels import SECTIONS

__all__ = ['exported', 'run']


def run(project: str, entity: str | None, export: Path | None) -> str:
    """Create the dashboard in W&B, or write it to a file.

    Args:
        project (str): W&B's project.
        entity (str | None): User or team.
        export (Path | None): The file; None to create the dashboard.

    Returns:
        str: What was done.

    Raises:
        ConfigError: The file cannot be written.
    """
    if export is None:
        return f'Created the dashboard: {create(project, entity)}'
    content = json.dumps(exported(project, entity), indent=2) + '\n'
    try:
        export.write_text(content, encoding='utf-8')
    except OSError as error:
        raise ConfigError(f'--export {export}: cannot be written: {error.strerror or error}') from error
    return f'Wrote {export}. With an account, `composer-ds dashboard {project}` creates it in W&B.'


def exported(project: str, entity: str | None) -> dict[str, Any]:
    """Write the dashboard in plain types.

    Args:
        project (str): W&B's project.
        entity (str | None): User or team.

    Returns:
        dict[str, Any]: ``sections`` are those of :mod:`composer_ds.panels`; ``view`` is what W&B is sent, or None
            without ``wandb_workspaces``.
    """
    try:
        view = view_of(make_workspace(project, entity or ''))
    except EnvironmentProblem:
        view = None
    sections = [dataclasses.asdict(section) for section in SECTIONS]
    return {'project': project, 'entity': entity, 'name': NAME, 'sections': sections, 'view': view}
