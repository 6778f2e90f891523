"""Turning what pydantic finds into problems a user can act on."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from composer_ds.launch.config_file import ConfigFile, KeyPath

__all__ = ['dotted', 'explain', 'shown', 'suggestion']

# "must be an instance of Tensor": no YAML value is, so these errors count only where there is no other.
NOT_IN_YAML = ('is_instance_of', 'callable_type')


def dotted(path: KeyPath) -> str:
    """Renders a path as in an override: ``train.max_duration``."""
    return '.'.join(str(part) for part in path)


def shown(value: Any) -> str:
    """Renders a given value on one line, shortened."""
    text = ' '.join(repr(value).split())
    return text if len(text) <= 80 else f'{text[:77]}...'


def suggestion(name: Any, allowed: Iterable[str]) -> str:
    """Returns the nearest allowed name and the list of all.

    Args:
        name (Any): The unknown name.
        allowed (Iterable[str]): What could stand there.

    Returns:
        str: ``"; did you mean 'x'? Allowed: x, y"``.
    """
    names = list(allowed)
    match = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean '{match[0]}'?" if match else '.'
    return f'{hint} Allowed: {", ".join(names) or "nothing"}'


def explain(
    error: ValidationError,
    model: type[BaseModel],
    section: KeyPath,
    source: ConfigFile,
    elsewhere: Mapping[str, str] | None = None,
) -> list[str]:
    """Renders the errors of one section.

    Args:
        error (ValidationError): What pydantic raised.
        model (type[BaseModel]): The model of the section.
        section (KeyPath): Where the section stands in the file.
        source (ConfigFile): For the origin of each value.
        elsewhere (Mapping[str, str] | None): Keys of other sections with their full paths, for a key without section.

    Returns:
        list[str]: One problem for each path, with the path, what is wrong, the value given and its origin.
    """
    given = source.values
    for part in section:
        given = given[part]
    reasons: dict[KeyPath, list[str]] = {}
    values: dict[KeyPath, Any] = {}
    for item in sorted(error.errors(include_url=False), key=lambda item: item['type'] in NOT_IN_YAML):
        path = _real_path(item['loc'], given, item['type'])
        if item['type'] == 'missing' and (*section, *path) in source.unresolved:
            continue  # reported with the reason why it could not be resolved
        if item['type'] in NOT_IN_YAML and path in reasons:
            continue
        reasons.setdefault(path, []).append(_reason(item, path, model, elsewhere or {}))
        values[path] = item['input']
    problems = []
    for path, texts in reasons.items():
        full_path = (*section, *path)
        reason = ' or '.join(dict.fromkeys(texts))
        if reason.startswith('required'):
            problems.append(f'{dotted(full_path)}: {reason} ({source.origin(full_path)})')
        else:
            problems.append(f'{dotted(full_path)} = {shown(values[path])} ({source.origin(full_path)}): {reason}')
    return problems


def _reason(item: Any, path: KeyPath, model: type[BaseModel], elsewhere: Mapping[str, str]) -> str:
    if item['type'] == 'extra_forbidden':
        if path[-1] in elsewhere:
            return f"unknown key here; did you mean '{elsewhere[path[-1]]}'?"
        return f'unknown key{suggestion(path[-1], _fields_at(model, path[:-1]))}'
    if item['type'] == 'missing':
        return 'required key is missing' if path == item['loc'] else 'has too few values'
    if item['type'] in ('dict_type', 'model_type'):
        return 'must be a mapping of keys to values'
    message = str(item['msg']).removeprefix('Value error, ').removeprefix('Assertion failed, ')
    return message[:1].lower() + message[1:]


def _real_path(loc: KeyPath, given: Any, kind: str) -> KeyPath:
    """Drops what pydantic adds to a location, such as the name of a union's member."""
    path: list[Any] = []
    for part in loc:
        in_mapping = isinstance(given, dict) and part in given
        in_list = isinstance(given, list) and isinstance(part, int) and part < len(given)
        if in_mapping or in_list:
            given = given[part]
        elif not (kind == 'missing' and isinstance(given, dict) and len(path) == len(loc) - 1):
            break
        path.append(part)
    return tuple(path)


def _fields_at(model: type[BaseModel], path: KeyPath) -> list[str]:
    for part in path:
        field = model.model_fields.get(part)
        inner = _model_in(field.annotation) if field else None
        model = inner or model  # a list index or a mapping key leaves the model as it is
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((inner for inner in found if inner), None)
