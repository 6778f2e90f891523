"""What may stand in a ds_config, derived from the installed DeepSpeed.

Nothing of DeepSpeed's schema is written down here. ``DeepSpeedConfig`` is handed a dict that records which keys it
looks up, for the whole config and, in turn, for every section that it looks into; what it turns into a pydantic model
brings the keys of that model. A section that DeepSpeed copies, walks over or keeps as it is, such as
``optimizer.params``, is read elsewhere by code that only a training run reaches: there every key is accepted.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

__all__ = ['READ_BY_INITIALIZE', 'Section', 'is_removal', 'refusal', 'schema', 'without_log']

MICROBATCH_SIZE = 'train_micro_batch_size_per_gpu'
READ_BY_INITIALIZE = frozenset({'sequence_parallel_size', 'data_parallel_size'})
"""What ``deepspeed.initialize`` (0.19.8) reads itself, and no config object; a test looks into its source."""

_PROBE = 'composer_ds_probe'


@dataclass(frozen=True)
class Section:
    """What may stand in a section of a ds_config.

    Args:
        keys (Mapping[str, Section | None]): All keys that DeepSpeed looks up, each with its section, or None for a
            value that DeepSpeed does not look into, where anything may stand.
        autos (frozenset[str]): Those of the keys for which ``'auto'`` is DeepSpeed's own default, and so a value.
        model (type[BaseModel] | None): The pydantic model that the section becomes, if any.
        is_open (bool): Whether there may be other keys.
    """

    keys: Mapping[str, Section | None]
    autos: frozenset[str] = frozenset()
    model: type[BaseModel] | None = None
    is_open: bool = False

    def with_path(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Section]]:
        """Walk over this section and all below it.

        Args:
            path (tuple[str, ...]): Where this section stands.

        Yields:
            tuple[tuple[str, ...], Section]: The keys that lead to a section, and the section.
        """
        yield path, self
        for key, section in self.keys.items():
            if section is not None:
                yield from section.with_path((*path, key))


@functools.cache
def schema() -> Section:
    """Derive what may stand in a ds_config, once in a process. Imports deepspeed; on any rank, no collectives.

    Returns:
        Section: The whole config.
    """
    with without_log():
        recorder = _Recorder({MICROBATCH_SIZE: 1})
        outcome = _construct(recorder)
        if isinstance(outcome, Exception):
            raise outcome
        keys: dict[str, Section | None] = dict.fromkeys(READ_BY_INITIALIZE)
        for key in recorder.seen:
            if not is_removal(refusal({key: {}})):
                keys[key] = _derive(lambda section, key=key: {MICROBATCH_SIZE: 1, key: section})
        return Section(keys, _autos(recorder.seen))


def refusal(ds_config: Mapping[str, Any]) -> Exception | None:
    """Try out a part of a ds_config.

    Args:
        ds_config (Mapping[str, Any]): Some of its settings, without the batch sizes.

    Returns:
        Exception | None: What DeepSpeed raises, if it does.
    """
    outcome = _construct({MICROBATCH_SIZE: 1, **ds_config})
    return outcome if isinstance(outcome, Exception) else None


def is_removal(error: Exception | None) -> bool:
    """Tell DeepSpeed's refusal of a key that it once had from its other errors.

    Args:
        error (Exception | None): What ``refusal`` answered.

    Returns:
        bool: Whether it says that a feature has been removed.
    """
    from deepspeed.runtime.config import DeepSpeedConfigError

    return isinstance(error, DeepSpeedConfigError) and 'removed' in str(error)


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Keep DeepSpeed from logging what it makes of a config that is not yet the one that will be run."""
    from deepspeed.utils import logger

    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _construct(ds_config: dict[str, Any]) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        return DeepSpeedConfig(ds_config)
    except Exception as error:
        return error


class _Recorder(dict):
    """A dict that notes which keys are looked up, with their defaults, and whether it is taken as a whole."""

    def __init__(self, contents: Mapping[str, Any]):
        super().__init__(contents)
        self.seen: dict[str, Any] = {}
        self.taken_whole = False

    def get(self, key, default=None):
        self.seen.setdefault(key, default)
        return super().get(key, default)

    def __contains__(self, key):
        self.seen.setdefault(key, None)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.seen.setdefault(key, None)
        return super().__getitem__(key)

    def keys(self):
        return self  # `**` does not come here

    def items(self):
        self.taken_whole = True
        return super().items()

    def __copy__(self):
        self.taken_whole = True
        copy = _Recorder(dict(super().items()))
        copy.seen = self.seen
        return copy

    def __deepcopy__(self, memo):
        return self.__copy__()


def _autos(defaults: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(key for key, default in defaults.items() if isinstance(default, str) and default == 'auto')


def _derive(plant: Callable[[_Recorder], dict[str, Any]]) -> Section | None:
    """Find the keys of one section.

    Args:
        plant (Callable[[_Recorder], dict[str, Any]]): Puts the section into a whole ds_config.

    Returns:
        Section | None: None for a value that DeepSpeed does not look into.
    """
    seen: dict[str, Any] = {}
    found_beside: dict[str, dict[str, Any]] = {}
    taken_whole = False
    trials: list[dict[str, Any]] = [{}]
    while trials:  # a key may be looked up only when another one is there: `params` beside `type`
        beside = trials.pop()
        recorder = _Recorder({_PROBE: 0, **beside})
        outcome = _construct(plant(recorder))
        if isinstance(outcome, ValidationError) and (model := _model_that_refused_the_probe(outcome)) is not None:
            return _section_of(model)
        kept = not isinstance(outcome, Exception) and any(value is recorder for value in vars(outcome).values())
        walked_over = _PROBE in recorder.seen
        taken_whole = taken_whole or recorder.taken_whole or kept or walked_over
        for key in recorder.seen.keys() - seen.keys() - {_PROBE}:
            seen[key] = recorder.seen[key]
            found_beside[key] = beside
            trials += [{**beside, key: True}, {**beside, key: 'a_name'}]
    if not seen:
        return None
    keys = {
        key: _derive(lambda section, key=key: plant(_Recorder({**found_beside[key], key: section}))) for key in seen
    }
    return Section(keys, _autos(seen), is_open=taken_whole)


def _model_that_refused_the_probe(error: ValidationError) -> type[BaseModel] | None:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    for one in error.errors(include_url=False):
        if one['loc'][-1:] == (_PROBE,):
            models = {each.__name__: each for each in _subclasses(DeepSpeedConfigModel)}
            model: type[BaseModel] | None = models.get(error.title)
            for key in one['loc'][:-1]:
                model = _models_of_fields(model).get(str(key)) if model is not None else None
            return model
    return None


def _subclasses(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


def _section_of(model: type[BaseModel]) -> Section:
    below = _models_of_fields(model)
    defaults = {name: field.default for name, field in model.model_fields.items()}
    return Section(
        {key: _section_of(inner) if inner is not None else None for key, inner in below.items()},
        _autos(defaults),
        model,
    )


def _models_of_fields(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Find the names and aliases of all fields, each with the model that it holds, if any."""
    fields: dict[str, type[BaseModel] | None] = {}
    for name, field in model.model_fields.items():
        types = typing.get_args(field.annotation) or (field.annotation,)
        inner = next((each for each in types if isinstance(each, type) and issubclass(each, BaseModel)), None)
        for spelling in (name, field.alias):
            if spelling is not None:
                fields[spelling] = inner
    return fields
