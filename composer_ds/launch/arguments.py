"""Checking the arguments that a YAML gives to a class or function, against its signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, create_model

from composer_ds.launch.schema import time_string

__all__ = ['Choice', 'arguments_model']


@dataclass
class Choice:
    """A class or function that the YAML names, with its checked arguments; `composer_ds.launch.build` makes the object.

    Args:
        section (str): Where it stands, such as ``'optimizer'`` or ``'callbacks.speed_monitor'``.
        factory (Callable[..., Any]): The class, or a function that makes the object.
        arguments (dict[str, Any]): Keyword arguments, converted to the annotated types.
    """

    section: str
    factory: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the class or function."""
        return _name(self.factory)


def arguments_model(factory: Callable[..., Any], own_keys: dict[str, Any], reserved: frozenset[str]) -> type[BaseModel]:
    """Makes a pydantic model from the signature of a class or function.

    Args:
        factory (Callable[..., Any]): Whose arguments are checked.
        own_keys (dict[str, Any]): Keys allowed beside the arguments, as ``name: (type, default)``.
        reserved (frozenset[str]): Arguments that the YAML cannot give, such as an optimizer's ``params``.

    Returns:
        type[BaseModel]: Refuses unknown keys, unless the class takes ``**kwargs``.
    """
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(factory).parameters.values()
    try:
        types = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (NameError, TypeError):  # imported for type checkers only; somebody's own
        types = {}
    fields: dict[str, Any] = dict(own_keys)
    for parameter in parameters:
        if parameter.kind in by_keyword and parameter.name not in reserved:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (_with_time_check(types.get(parameter.name, Any)), default)
    kinds = {parameter.kind for parameter in parameters}
    # `*args, **kwargs` together is the constructor of composer.Callback, which ignores all it is given.
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds
    extra = 'allow' if takes_any else 'forbid'
    config = ConfigDict(extra=extra, arbitrary_types_allowed=True, protected_namespaces=())
    return create_model(_name(factory), __config__=config, **fields)


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, '__name__', type(factory).__name__)


def _with_time_check(annotation: Any) -> Any:
    """Where a class takes a string or a `composer.Time`, the string must be one that Composer can read."""
    options = typing.get_args(annotation)
    is_time = str in options and any(getattr(option, '__name__', '') == 'Time' for option in options)
    return Annotated[annotation, AfterValidator(time_string)] if is_time else annotation
