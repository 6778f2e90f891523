"""The seam between the launcher and a recipe: a module named in the YAML by its import path."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import BaseModel

from composer_ds.errors import ConfigError
from composer_ds.launch import plugins
from composer_ds.launch.imports import import_module

__all__ = ['Recipe', 'Task', 'load_recipe']


class Task(Protocol):
    """What a recipe's ``build`` returns, on every rank."""

    model: Any
    train_dataloader: Any
    eval_dataloader: Any
    callbacks: Any


class Recipe(Protocol):
    """A module that defines a task."""

    ModelConfig: type[BaseModel]
    DataConfig: type[BaseModel]

    def build(self, model: BaseModel, data: BaseModel) -> Task:
        """Called once on every rank, after the process group exists and the seed is set."""
        ...


def load_recipe(name: str) -> Recipe:
    """Imports a recipe from the folder of the script, the working directory or the installed packages.

    Args:
        name (str): An import path such as ``recipes.mt5``, or a name that a package gives it.

    Returns:
        Recipe: The module.

    Raises:
        ConfigError: There is no such module, or it lacks a part. An error inside the module comes through as it is.
    """
    module = import_module(plugins.names('task', {}).get(name, name))
    missing = [part for part in ('ModelConfig', 'DataConfig', 'build') if not hasattr(module, part)]
    if missing:
        raise ConfigError(
            f'the module lacks {", ".join(missing)}; a task module defines pydantic models ModelConfig and DataConfig '
            'and a function build(model, data)'
        )
    return module  # type: ignore[return-value]
