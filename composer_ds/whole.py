"""The user's model before and after ZeRO 3, when its weights are cut over the ranks and no engine puts them together.

Before, where ``partitioned_init`` has built it. After, because putting weights together takes all ranks, and closing a
Trainer must not: Python closes a Trainer also when one rank alone has failed, and a collective there would hang. So it
is left to the next use: :class:`~composer_ds.DeepSpeed` does it by itself when it gets such a model again, and
:func:`make_whole` is there for everything else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from composer_ds.errors import ComposerDSError

__all__ = [
    'WAITING',
    'guard',
    'is_left_partitioned',
    'is_waiting',
    'leave_partitioned',
    'lift_guards',
    'make_whole',
    'whole_again',
]

WAITING = 'composer_ds_waiting'
"""Attribute of a parameter that ``partitioned_init`` has cut, until an engine takes it."""

_LEFT_PARTITIONED: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
_GUARDED: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def leave_partitioned(model: torch.nn.Module) -> None:
    """Mark a model whose ZeRO 3 engine has been taken down; from now on its forward says what to do.

    Args:
        model (torch.nn.Module): The user's model.
    """

    def refuse(*_: Any) -> None:
        raise ComposerDSError(
            f'The weights of {type(model).__name__} are still cut over the ranks, as its closed Trainer with ZeRO 3 '
            'has left them. Call composer_ds.make_whole(model) on every rank, or take trainer.state.model.state_dict().'
        )

    _LEFT_PARTITIONED[model] = model.register_forward_pre_hook(refuse)


def is_left_partitioned(model: torch.nn.Module) -> bool:
    """Say whether a closed ZeRO 3 engine has left this model partitioned.

    Args:
        model (torch.nn.Module): A model.

    Returns:
        bool: Whether :func:`make_whole` has something to do.
    """
    return model in _LEFT_PARTITIONED


def is_waiting(parameter: torch.nn.Parameter) -> bool:
    """Say whether a parameter was cut by ``partitioned_init`` and no engine has taken it yet.

    Args:
        parameter (torch.nn.Parameter): A parameter.

    Returns:
        bool: Whether :func:`make_whole` has something to do.
    """
    return hasattr(parameter, WAITING)


def guard(model: torch.nn.Module, refuse: Callable[..., None]) -> None:
    """Let a model of waiting parameters say what to do where it would silently go wrong.

    Args:
        model (torch.nn.Module): Built by ``partitioned_init``, nobody's submodule.
        refuse (Callable[..., None]): Called before its forward, ``state_dict`` and ``load_state_dict``.
    """
    if model not in _GUARDED:
        _GUARDED[model] = [
            model.register_forward_pre_hook(refuse),
            model.register_state_dict_pre_hook(refuse),
            model.register_load_state_dict_pre_hook(refuse),
        ]


def lift_guards(model: torch.nn.Module) -> None:
    """Remove what :func:`guard` has put on a model or on parts of it.

    Args:
        model (torch.nn.Module): The whole model.
    """
    for module in model.modules():
        for handle in _GUARDED.pop(module, ()):
            handle.remove()


@torch.no_grad()
def make_whole(model: torch.nn.Module) -> None:
    """Give a model whole weights again: after its Trainer with ZeRO 3 was closed, or built by ``partitioned_init``.

    Does nothing to any other model. Collective: every rank calls it, and has the memory for the whole model. The
    weights are those that the forward pass used: under ``amp_bf16`` they are bf16
    (``trainer.state.model.state_dict()`` has the fp32 master weights).

    Args:
        model (torch.nn.Module): The user's model, as it was given to the Trainer.
    """
    if is_left_partitioned(model):
        for parameter in model.parameters():
            if hasattr(parameter, 'ds_tensor'):
                whole_again(parameter)
        for module in model.modules():
            if type(module._parameters) is not dict:  # deepspeed's ZeROOrderedDict, which gathers what it hands out
                module._parameters = dict(module._parameters.items())
        _LEFT_PARTITIONED.pop(model).remove()
    for parameter in model.parameters():
        if is_waiting(parameter):
            whole_again(parameter)
    lift_guards(model)


@torch.no_grad()
def whole_again(parameter: Any) -> None:
    """Put the parts of one parameter together, and take off what ``deepspeed.zero`` has hung on it.

    Collective. The parts cross the network once, and the result is allocated once.

    Args:
        parameter (Any): A ``torch.nn.Parameter`` that is cut over the ranks.
    """
    mine = parameter.ds_tensor.detach().to(parameter.device)
    whole = torch.empty(mine.numel() * dist.get_world_size(), dtype=mine.dtype, device=mine.device)
    dist.all_gather_into_tensor(whole, mine)
    padding, shape = whole.numel() - parameter.ds_numel, parameter.ds_shape
    parameter.data = (whole[: parameter.ds_numel].clone() if padding else whole).view(shape)
    # deepspeed 0.19: ds_id and other ds_ names, these two, and closures of its own.
    for name, value in list(vars(parameter).items()):
        ours = name in (WAITING, 'is_external_param', 'nvme_swapper') or name.startswith('ds_')
        if ours or getattr(value, '__module__', '').startswith('deepspeed.'):
            delattr(parameter, name)
