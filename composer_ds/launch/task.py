"""The seam between the launcher and a recipe: a module named in the YAML by its import path."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from pydantic import BaseModel

from composer_ds.errors import ConfigError
from composer_ds.launch.problems import suggestion

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
        name (str): An import path such as ``recipes.mt5``.

    Returns:
        Recipe: The module.

    Raises:
        ConfigError: There is no such module, or it lacks a part. An error inside the module comes through as it is.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f'{name}.'.startswith(f'{error.name}.'):
            raise
        raise ConfigError(f"no module '{error.name}' to import{_nearest(name)}") from None
    except (TypeError, ValueError):  # '' or '.mt5'
        raise ConfigError('must be the import path of a module, such as recipes.mt5') from None
    missing = [part for part in ('ModelConfig', 'DataConfig', 'build') if not hasattr(module, part)]
    if missing:
        raise ConfigError(
            f'the module lacks {", ".join(missing)}; a task module defines pydantic models ModelConfig and DataConfig '
            'and a function build(model, data)'
        )
    return module  # type: ignore[return-value]


def _nearest(name: str) -> str:
    """Suggests a sibling of a module that does not exist."""
    package = sys.modules.get(name.rpartition('.')[0])
    if not isinstance(package, ModuleType) or not hasattr(package, '__path__'):
        return '; Python looks in the folder of the script, in the working directory and in installed packages'
    siblings = [f'{package.__name__}.{found.name}' for found in pkgutil.iter_modules(package.__path__)]
    return suggestion(name, siblings)
