"""Keys of a ds_config that the installed DeepSpeed does not have, and values that it refuses."""

from __future__ import annotations

import difflib
import functools
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from composer_ds.ds_schema import READ_BY_INITIALIZE, Section, is_removal, refusal, schema, without_log

__all__ = ['auto_is_a_value', 'problems_of_keys', 'valid_keys']

NOT_TRIED = READ_BY_INITIALIZE | {
    'train_batch_size', 'train_micro_batch_size_per_gpu', 'gradient_accumulation_steps',
}  # fmt: skip
"""Keys whose values depend on each other and on the world size, so that each by itself cannot be tried out."""


def problems_of_keys(ds_config: Mapping[str, Any], zero_stage: int = 1) -> Iterator[str]:
    """Find keys that the installed DeepSpeed does not know, and values that it refuses. Imports deepspeed.

    ``'auto'`` is left alone everywhere, and so are the batch sizes and what two sections, other than the stage, have to
    do with each other.

    Args:
        ds_config (Mapping[str, Any]): The config; it is not changed.
        zero_stage (int): The stage that will be run when the config names none; some values need a stage. Default: 1.

    Yields:
        str: One problem each.
    """
    if not ds_config:
        return
    with without_log():
        problems = [*_unknown_keys(ds_config, schema(), ()), *_refused_values(ds_config, zero_stage)]
    yield from problems


def valid_keys() -> frozenset[str]:
    """List all keys that the installed DeepSpeed looks up, at every depth. Imports deepspeed.

    Returns:
        frozenset[str]: Dotted paths, such as ``'zero_optimization.stage'``, and ``'optimizer.params.*'`` for a section
        where every key is accepted.
    """
    sections = list(schema().with_path())
    named = {'.'.join((*path, key)) for path, section in sections for key in section.keys}
    return frozenset(named | {'.'.join((*path, '*')) for path, section in sections if section.is_open})


def auto_is_a_value(path: Iterable[str]) -> bool:
    """Tell whether DeepSpeed itself understands ``'auto'`` for a key, as its default. Imports deepspeed.

    Args:
        path (Iterable[str]): The keys that lead to the value.

    Returns:
        bool: False where ``'auto'`` is a placeholder that somebody must have replaced before.
    """
    *above, last = path
    section: Section | None = schema()
    for key in above:
        section = section.keys.get(key) if section is not None else None
    return section is not None and last in section.autos


def _unknown_keys(given: Mapping[str, Any], section: Section, path: tuple[str, ...]) -> Iterator[str]:
    for key, value in given.items():
        if key not in section.keys:
            if not section.is_open:
                yield _about_unknown_key(key, section, path)
            continue
        below = section.keys[key]
        if below is not None and isinstance(value, Mapping):
            yield from _unknown_keys(value, below, (*path, key))


def _about_unknown_key(key: Any, section: Section, path: tuple[str, ...]) -> str:
    import deepspeed

    place = '.'.join(('ds_config', *path, str(key)))
    error = refusal(functools.reduce(lambda below, above: {above: below}, reversed((*path, key)), {}))
    if is_removal(error):
        return (
            f'{place}: deepspeed {deepspeed.__version__} does not have it any more: {str(error).strip()} Leave it out.'
        )
    elsewhere = ['.'.join(('ds_config', *above, key)) for above, other in schema().with_path() if key in other.keys]
    if len(elsewhere) == 1:
        return f"{place}: unknown there; did you mean '{elsewhere[0]}'?"
    near = difflib.get_close_matches(str(key), section.keys, n=1)
    return f'{place}: unknown' + (f"; did you mean '{near[0]}'?" if near else '; leave it out')


def _refused_values(ds_config: Mapping[str, Any], zero_stage: int) -> Iterator[str]:
    known = schema().keys
    zero = ds_config.get('zero_optimization')
    stage = zero.get('stage', zero_stage) if isinstance(zero, Mapping) else zero_stage
    default = {'stage': stage if stage in (1, 2, 3) else 1}
    for key, given in ds_config.items():
        if key not in known or key in NOT_TRIED or given == 'auto':
            continue
        section = known[key]
        value = _to_try(given, section)
        if key == 'zero_optimization' and isinstance(value, dict):
            value = default | value
        # A rule about several keys says nothing where one of them may be misspelt.
        misspelt = section is not None and any(_unknown_keys({key: given}, schema(), ()))
        refused = list(_refused_by_models(value, section, (key,), with_rules=not misspelt))
        yield from refused
        error = None if refused or misspelt else refusal({'zero_optimization': default, key: value})
        if error is not None and section is not None and not isinstance(given, Mapping):
            yield f'ds_config.{key}={reprlib.repr(given)}: a mapping of settings is needed, or leave it out'
        elif error is not None:
            yield f'ds_config.{key}={reprlib.repr(given)}: DeepSpeed refuses it: {error}'


def _refused_by_models(value: Any, section: Section | None, path: tuple[str, ...], with_rules: bool) -> Iterator[str]:
    if section is None or not isinstance(value, Mapping):
        return
    if section.model is None:
        for key, below in value.items():
            yield from _refused_by_models(below, section.keys.get(key), (*path, key), with_rules)
        return
    place = '.'.join(('ds_config', *path))
    try:
        section.model(**value)
    except ValidationError as error:
        yield from _sentences(error, value, place, with_rules)
    except Exception as error:  # DeepSpeed asserts and raises beside pydantic, too
        if with_rules:
            yield f'{place}: DeepSpeed refuses it: {error}'


def _sentences(error: ValidationError, section: Mapping[str, Any], place: str, with_rules: bool) -> Iterator[str]:
    messages: dict[str, list[str]] = {}
    for one in error.errors(include_url=False):
        where: str = place
        value: Any = section
        for key in one['loc']:  # ends in names of types, where a field may have one of several
            if isinstance(value, Mapping) and key in value:
                where, value = f'{where}.{key}', value[key]
            elif isinstance(value, list) and isinstance(key, int):
                where, value = f'{where}[{key}]', value[key]
        if isinstance(value, Mapping) and not with_rules:
            continue
        if value is not section:
            where += f'={reprlib.repr(value)}'
        messages.setdefault(where, []).append(one['msg'])
    for where, found in messages.items():
        yield f'{where}: {"; or: ".join(found)}'


def _to_try(value: Any, section: Section | None) -> Any:
    """Copy a value without unknown keys, which have their own sentence, and without placeholders."""
    if section is None or not isinstance(value, Mapping):
        return value
    return {
        key: _to_try(below, section.keys.get(key))
        for key, below in value.items()
        if (key in section.keys or section.is_open) and (below != 'auto' or key in section.autos)
    }
