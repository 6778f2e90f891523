"""Reading a ds_config: a dict, or the path of a JSON or YAML file.

JSON is read strictly, but for comments and commas before a closing bracket, which files for DeepSpeed often have.
DeepSpeed itself reads them with hjson, for which a word without quotes is a string: a mistyped ``tru`` would be true.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_ds.errors import ConfigError

__all__ = ['read_ds_config']

# A string comes first in both, so that nothing inside one is taken for a comment or a comma.
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


class _DuplicateKey(ValueError):
    """A key that stands twice in one mapping of a JSON file."""


def read_ds_config(source: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Read a ds_config. Called when ``DeepSpeed`` is constructed, on every rank.

    Args:
        source (Mapping[str, Any] | str | Path | None): A dict or an OmegaConf config, which is copied and never
            changed; the path of a JSON file (with comments: ``//``, ``#``, ``/* */``) or of a YAML file; or None for an
            empty config.

    Returns:
        dict[str, Any]: The caller's own copy.

    Raises:
        ConfigError: When the file is missing, does not parse, holds a key twice, or holds no mapping.
    """
    if source is None:
        return {}
    if isinstance(source, Mapping):
        try:
            return _own_copy(source)
        except OmegaConfBaseException as error:
            raise ConfigError(f'ds_config: {error}') from error
    if not isinstance(source, str | Path):
        raise ConfigError(f'ds_config is {type(source).__name__}; give a dict or the path of a JSON or YAML file')
    path, name = Path(source), f'ds_config={str(source)!r}'
    if not path.is_file():
        raise ConfigError(f'{name}: there is no such file')
    try:
        text = path.read_text(encoding='utf-8-sig')  # with or without the mark that editors on Windows put first
        config = _parse_json(text) if _is_json(path, text) else _parse_yaml(text)
    except _DuplicateKey as error:
        raise ConfigError(f'{name}: {error}') from error
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1 : error.lineno]
        raise ConfigError(f'{name} does not parse as JSON: {error}{_shown(line)}') from error
    except UnicodeDecodeError as error:
        raise ConfigError(f'{name} does not parse: it is no text in UTF-8: {error}') from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, AssertionError) as error:
        # For a bare scalar OmegaConf 2.3 raises OSError, 2.4 asserts.
        raise ConfigError(f'{name} does not parse as YAML: {error}') from error
    if not isinstance(config, dict):
        raise ConfigError(f'{name} holds {type(config).__name__}, not a mapping of settings')
    return config


def _own_copy(value: Any) -> Any:
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    if isinstance(value, Mapping):
        return {key: _own_copy(below) for key, below in value.items()}
    return copy.deepcopy(value)


def _is_json(path: Path, text: str) -> bool:
    if path.suffix in ('.yaml', '.yml'):
        return False
    return path.suffix == '.json' or _COMMENT.sub(_blank, text).lstrip().startswith('{')


def _parse_json(text: str) -> Any:
    without_comments = _COMMENT.sub(_blank, text)
    return json.loads(_LAST_COMMA.sub(_blank, without_comments), object_pairs_hook=_unique) if text.strip() else None


def _blank(match: re.Match[str]) -> str:
    """Put spaces in the place of what is not a string, so that lines and columns stay what they are."""
    found = match.group()
    return found if found.startswith('"') else re.sub(r'[^\n]', ' ', found)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if twice:
        raise _DuplicateKey(f'{", ".join(map(repr, twice))} more than once in one mapping; write each key once')
    return dict(pairs)


def _parse_yaml(text: str) -> Any:
    # OmegaConf rather than yaml: there 5e8 is a number, and a key that stands twice is an error.
    config = OmegaConf.create(text) if text.strip() else None
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True) if config is not None else None


def _shown(line: list[str]) -> str:
    return f': {line[0].strip()}' if line else ''
