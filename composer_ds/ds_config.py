"""Reading a ds_config: a dict, or the path of a JSON or YAML file."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

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
        config = _parse(path)
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:  # OmegaConf: OSError for a bare scalar
        raise ConfigError(f'ds_config={str(source)!r} does not parse as JSON or YAML: {error}') from error
    if not isinstance(config, dict):
        raise ConfigError(f'ds_config={str(source)!r} holds {type(config).__name__}, not a mapping of settings')
    return config


def _parse(path: Path) -> Any:
    text = path.read_text()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        # OmegaConf rather than yaml: there 5e8 is a number.
        return OmegaConf.to_container(OmegaConf.create(text), resolve=True) if text.strip() else None
