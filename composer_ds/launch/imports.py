"""Importing what a YAML names by its import path, with errors that say which part of it does not exist."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from composer_ds.errors import ConfigError
from composer_ds.launch.problems import suggestion

__all__ = ['import_module', 'load']


def import_module(name: str) -> ModuleType:
    """Imports a module from the folder of the script, the working directory or the installed packages.

    Args:
        name (str): An import path such as ``recipes.mt5``.

    Returns:
        ModuleType: The module.

    Raises:
        ConfigError: There is no such module. An error inside the module comes through as it is.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f'{name}.'.startswith(f'{error.name}.'):
            raise
        raise ConfigError(f"no module '{error.name}' to import{_nearest(name)}") from None
    except (TypeError, ValueError):  # '' or '.mt5'
        raise ConfigError('must be the import path of a module, such as recipes.mt5') from None


def load(import_path: str) -> Any:
    """Imports a class or function.

    Args:
        import_path (str): ``module:Class`` or ``module:function``.

    Returns:
        Any: What can be called.

    Raises:
        ConfigError: There is no such module or no such name in it, or it cannot be called.
    """
    module_name, _, name = import_path.partition(':')
    module = import_module(module_name)
    found = getattr(module, name, None)
    if found is None:
        public = [one for one, value in vars(module).items() if callable(value) and not one.startswith('_')]
        raise ConfigError(f"no '{name}' in the module {module_name}{suggestion(name, public)}")
    if not callable(found):
        raise ConfigError(f'{import_path} is {type(found).__name__}; a class or a function is needed')
    return found


def _nearest(name: str) -> str:
    """Suggests a sibling of a module that does not exist."""
    package = sys.modules.get(name.rpartition('.')[0])
    if not isinstance(package, ModuleType) or not hasattr(package, '__path__'):
        return '; Python looks in the folder of the script, in the working directory and in installed packages'
    siblings = [f'{package.__name__}.{found.name}' for found in pkgutil.iter_modules(package.__path__)]
    return suggestion(name, siblings)
