"""The dashboard in terms of W&B's own library, ``wandb_workspaces``."""

from __future__ import annotations

from typing import Any

from composer_ds.errors import EnvironmentProblem
from composer_ds.panels import BATCHES, SECTIONS, Panel

__all__ = ['NAME', 'create', 'make_workspace', 'view_of']

NAME = 'DeepSpeed'
_INSTALL = "pip install 'composer-ds[dashboard]'"


def make_workspace(project: str, entity: str) -> Any:
    """Make the workspace, without any network.

    Args:
        project (str): W&B's project.
        entity (str): User or team.

    Returns:
        Any: A ``wandb_workspaces.workspaces.Workspace``.

    Raises:
        EnvironmentProblem: ``wandb_workspaces`` is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
        from wandb_workspaces.reports.v2.interface import Layout
    except ImportError as error:
        raise EnvironmentProblem(f'The dashboard needs wandb-workspaces: {_INSTALL}') from error

    def line_plot(number: int, panel: Panel) -> Any:
        keys: dict[str, Any] = {'metric_regex': panel.regex} if panel.regex else {'y': list(panel.keys)}
        return wr.LinePlot(
            title=panel.title,
            x='Step' if panel.x == BATCHES else panel.x,
            title_x='batches' if panel.x == BATCHES else 'optimizer steps',
            title_y=panel.unit or None,
            log_y=panel.is_log or None,
            plot_type='stacked-area' if panel.is_stacked else 'line',
            layout=Layout(x=8 * (number % 3), y=6 * (number // 3), w=8, h=6),
            **keys,
        )

    sections = [
        ws.Section(
            name=section.title,
            panels=[line_plot(number, panel) for number, panel in enumerate(section.panels)],
            is_open=True,
        )
        for section in SECTIONS
    ]
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def view_of(workspace: Any) -> dict[str, Any]:
    """Return what the library would send to W&B.

    Args:
        workspace (Any): From :func:`make_workspace`.

    Returns:
        dict[str, Any]: In plain types.
    """
    # Private in wandb-workspaces 0.4.13, which has no public way to see a workspace that is not saved.
    return workspace._to_model().model_dump(mode='json', by_alias=True, exclude_none=True)


def create(project: str, entity: str | None) -> str:
    """Save the dashboard in W&B, as a new view of the project. Over the network.

    Args:
        project (str): W&B's project.
        entity (str | None): User or team; None for the default of the account.

    Returns:
        str: Its address.

    Raises:
        EnvironmentProblem: ``wandb_workspaces`` or an account is missing, or W&B refused.
    """
    import wandb

    make_workspace(project, 'check')  # whether it can be made at all, before anything goes over the network
    try:
        workspace = make_workspace(project, entity or wandb.Api().default_entity or '')
        workspace.save()
    except (wandb.Error, ValueError, OSError) as error:
        raise EnvironmentProblem(
            f'W&B did not take the dashboard: {str(error).rstrip(".")}. Without an account, write it to a file: '
            '--export FILE'
        ) from error
    return str(workspace.url)
