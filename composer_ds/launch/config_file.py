"""Reading a run's YAML file together with the overrides of the command line.

The result remembers where each value came from (a line of the file, or the command line), so that every later problem
can point there. Nothing heavy is imported: a typing mistake in the YAML is answered at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_ds.errors import ConfigError

__all__ = ['ConfigFile', 'KeyPath', 'read']

KeyPath = tuple[Any, ...]


@dataclass
class ConfigFile:
    """The values of a run with their origins.

    Args:
        name (str): The file as the user named it.
        values (dict[str, Any]): File and overrides merged, interpolations resolved, plain containers only.
        lines (dict[KeyPath, int]): First line, counted from 1, of each key in the file.
        overridden (list[KeyPath]): The keys given on the command line.
        unresolved (dict[KeyPath, str]): Keys left out of ``values``, because they are ``???`` or interpolate something
            that does not exist, each with the reason.
    """

    name: str
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overridden: list[KeyPath] = field(default_factory=list)
    unresolved: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """Says where the value at a path came from.

        Args:
            path (KeyPath): Keys from the top, such as ``('train', 'max_duration')``.

        Returns:
            str: ``'on the command line'`` or ``'in FILE, line N'``.
        """
        set_here = any(path[: len(key)] == key for key in self.overridden)
        # Only the overrides mention this key at all, as in `trian.max_duration=1ep`.
        set_below = path not in self.lines and any(key[: len(path)] == path for key in self.overridden)
        if set_here or set_below:
            return 'on the command line'
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f'in {self.name}, line {self.lines[path[:length]]}'
        return f'in {self.name}'


def read(file: str, overrides: Sequence[str] = ()) -> ConfigFile:
    """Reads a YAML file and applies ``key.key=value`` overrides.

    Called first of all, on every rank alike.

    Args:
        file (str): Path of the YAML file, relative to the working directory.
        overrides (Sequence[str]): Dotlist items; the values are YAML; a later item wins.

    Returns:
        ConfigFile: The merged values with their origins.

    Raises:
        ConfigError: The file cannot be read or parsed, or an override is malformed; all problems at once.
    """
    problems = [problem for item in overrides if (problem := _override_problem(item))]
    from_file, lines = None, {}
    try:
        text = _read_text(file)
        lines = _key_lines(file, text)
        from_file = OmegaConf.create(text)
    except ConfigError as error:
        problems = [*error.problems, *problems]
    except yaml.YAMLError as error:
        problems.insert(0, f'{file}{_position(error)}')
    except OmegaConfBaseException as error:
        problems.insert(0, f'{file}: {error}')
    if problems:
        raise ConfigError(problems)
    assert isinstance(from_file, DictConfig)

    from_command_line = OmegaConf.from_dotlist(list(overrides))
    merged = OmegaConf.merge(from_file, from_command_line)
    unresolved: dict[KeyPath, str] = {}
    values = _resolve(merged, (), unresolved)
    overridden = list(_leaves(OmegaConf.to_container(from_command_line, resolve=False), ()))
    return ConfigFile(file, values, lines, overridden, unresolved)


def _override_problem(item: str) -> str | None:
    """Returns what is wrong with one override, or None."""
    key, equals, _ = item.partition('=')
    if not equals or not key.strip():
        return f'override {item!r} on the command line: write it as key=value, for example train.max_duration=1ep'
    try:
        OmegaConf.from_dotlist([item])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        reason = ' '.join(str(error).split())
        return f'override {item!r} on the command line: the value is not valid YAML ({reason})'
    return None


def _read_text(file: str) -> str:
    path = Path(file)
    if path.is_dir():
        names = sorted(entry.name for entry in path.glob('*.yaml'))
        raise ConfigError(f'-f {file}: is a folder, not a YAML file; YAML files in it: {", ".join(names) or "none"}')
    try:
        return path.read_text(encoding='utf-8')
    except FileNotFoundError:
        nearby = [str(entry) for entry in path.parent.glob('*.y*ml')]
        match = difflib.get_close_matches(str(path), nearby, n=1, cutoff=0.5)
        hint = f"; did you mean '{match[0]}'?" if match else f' (the working directory is {Path.cwd()})'
        raise ConfigError(f'-f {file}: no such file{hint}') from None
    except UnicodeDecodeError as error:
        raise ConfigError(f'-f {file}: is not a text file in UTF-8 ({error})') from error
    except OSError as error:
        raise ConfigError(f'-f {file}: cannot be read ({error.strerror})') from error


def _key_lines(file: str, text: str) -> dict[KeyPath, int]:
    """Maps each key path of a YAML text to its line, and refuses texts that are not a mapping."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        raise ConfigError(f'-f {file}: is empty; it needs at least the sections task, optimizer and train')
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f'-f {file}: must be a mapping of sections (`train:` and so on), but is a {root.id}')
    lines: dict[KeyPath, int] = {}

    def walk(node: yaml.Node, path: KeyPath) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    lines[(*path, key.value)] = key.start_mark.line + 1
                    walk(value, (*path, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[(*path, index)] = value.start_mark.line + 1
                walk(value, (*path, index))

    walk(root, ())
    return lines


def _position(error: yaml.YAMLError) -> str:
    """Renders a YAML error as ', line L, column C: what is wrong'."""
    mark = getattr(error, 'problem_mark', None)
    what = ' '.join(part for part in (getattr(error, 'context', None), getattr(error, 'problem', None)) if part)
    if mark is None:
        return f': is not valid YAML: {" ".join(str(error).split())}'
    return f', line {mark.line + 1}, column {mark.column + 1}: is not valid YAML: {what}'


def _resolve(node: Any, path: KeyPath, unresolved: dict[KeyPath, str]) -> Any:
    """Turns OmegaConf containers into plain ones; what cannot be resolved goes to ``unresolved``."""
    if isinstance(node, DictConfig):
        keys: list[Any] = list(node.keys())
    elif isinstance(node, ListConfig):
        keys = list(range(len(node)))
    else:
        return node
    values = {}
    for key in keys:
        try:
            values[key] = _resolve(node[key], (*path, key), unresolved)
        except OmegaConfBaseException as error:
            unresolved[(*path, key)] = str(error.msg or error).splitlines()[0]
    return values if isinstance(node, DictConfig) else list(values.values())


def _leaves(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif path:
        yield path
