"""Reading a ds_config: a dict, or the path of a JSON or YAML file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from composer_ds.errors import ConfigError

__all__ = ['read_ds_config']


def read_ds_config(source: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Read a ds_config. Called when ``DeepSpeed`` is constructed, on every rank.

    Args:
        source (Mapping[str, Any] | str | Path | None): A dict, which is copied and never changed, the path of a JSON or
            YAML file, or None for an empty config.

    Returns:
        dict[str, Any]: The caller's own copy.

    Raises:
        ConfigError: When the file is missing, does not parse, or holds no mapping.
    """
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, str | Path):
        raise ConfigError(f'ds_config is {type(source).__name__}; give a dict or the path of a JSON or YAML file')
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f'ds_config={str(source)!r}: there is no such file')
    try:
        # JSON is a subset of YAML, but for tabs, which no mapping of DeepSpeed's needs.
        config = yaml.safe_load(path.read_text().replace('\t', '  '))
    except yaml.YAMLError as error:
        raise ConfigError(f'ds_config={str(source)!r} does not parse as JSON or YAML: {error}') from error
    if not isinstance(config, dict):
        raise ConfigError(f'ds_config={str(source)!r} holds {type(config).__name__}, not a mapping of settings')
    return config
