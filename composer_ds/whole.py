"""The user's model after ZeRO 3: its weights are still cut over the ranks when the Trainer is closed.

Putting them together takes all ranks, and closing must not: Python closes a Trainer also when one rank alone has
failed, and a collective there would hang. So it is left to the next use: :class:`~composer_ds.DeepSpeed` does it by
itself when it gets such a model again, and :func:`make_whole` is there for everything else.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from composer_ds.errors import ComposerDSError

__all__ = ['is_left_partitioned', 'leave_partitioned', 'make_whole']

_LEFT_PARTITIONED: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


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


@torch.no_grad()
def make_whole(model: torch.nn.Module) -> None:
    """Give a model whole weights again after its Trainer with ZeRO 3 was closed; does nothing to any other model.

    Collective: every rank calls it, and has the memory for the whole model. The weights are those that the forward pass
    used: under ``amp_bf16`` they are bf16 (``trainer.state.model.state_dict()`` has the fp32 master weights).

    Args:
        model (torch.nn.Module): The user's model, as it was given to the Trainer.
    """
    if not is_left_partitioned(model):
        return
    for parameter in model.parameters():
        if hasattr(parameter, 'ds_tensor'):
            parameter.data = _gather(parameter)
            # What deepspeed.zero has hung on the parameter (0.19: ds_id and other ds_ names, and closures of its own).
            for name, value in list(vars(parameter).items()):
                if name.startswith('ds_') or getattr(value, '__module__', '').startswith('deepspeed.'):
                    delattr(parameter, name)
    for module in model.modules():
        if type(module._parameters) is not dict:  # deepspeed's ZeROOrderedDict, which gathers what it hands out
            module._parameters = dict(module._parameters.items())
    _LEFT_PARTITIONED.pop(model).remove()


def _gather(parameter: Any) -> torch.Tensor:
    mine = parameter.ds_tensor.detach().to(parameter.device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape).clone()
