"""Names that other packages add to those of the registry, by entry points.

A package declares them in its ``pyproject.toml``, for example::

    [project.entry-points.composer_ds_callbacks]
    my_callback = 'my_package.callbacks:MyCallback'

Nothing is imported until a YAML uses the name.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from composer_ds.errors import ConfigError

__all__ = ['GROUPS', 'names']

GROUPS = {
    section: f'composer_ds_{plural}'
    for section, plural in {
        'task': 'tasks',
        'optimizer': 'optimizers',
        'scheduler': 'schedulers',
        'algorithms': 'algorithms',
        'callbacks': 'callbacks',
        'loggers': 'loggers',
    }.items()
}
"""The group of entry points for each section of the YAML."""


def names(section: str, built_in: dict[str, str]) -> dict[str, str]:
    """Collects the names that a section knows.

    Args:
        section (str): Of the YAML, such as ``'callbacks'``.
        built_in (dict[str, str]): Those of the registry, with import paths.

    Returns:
        dict[str, str]: Import paths by name, those of other packages last.

    Raises:
        ConfigError: Two packages give the same name, or one gives a name of the registry.
    """
    found: dict[str, EntryPoint] = {}
    problems = []
    for one in sorted(entry_points(group=GROUPS[section]), key=lambda one: (one.name, one.value)):
        # An editable installation may be listed twice.
        if one.name in found and found[one.name].value == one.value:
            continue
        other = built_in.get(one.name) and 'composer_ds'
        other = other or (one.name in found and _package(found[one.name]))
        if other:
            problems.append(
                f"{section}: the packages {other} and {_package(one)} both have the name '{one.name}' (entry point in "
                f"the group {one.group}); uninstall one, or give the import path '{one.value}' in place of the name"
            )
        found.setdefault(one.name, one)
    if problems:
        raise ConfigError(problems)
    return built_in | {name: one.value for name, one in found.items()}


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else 'unknown'
