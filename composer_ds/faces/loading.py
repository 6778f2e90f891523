"""Loading whole weights into partitions through torch's own ``load_state_dict``, with every hook and check it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from composer_ds.consolidation import stand_in
from composer_ds.frozen import write_frozen
from composer_ds.partitions import Partitions, full_shape

__all__ = ['loading_into_partitions']


@contextmanager
def loading_into_partitions(partitions: Partitions, model: torch.nn.Module) -> Iterator[None]:
    """Let ``model.load_state_dict`` take whole weights inside; every rank keeps its own partition of them.

    Collective: on leaving, the weights that the model computes with are made of the new master weights.

    Args:
        partitions (Partitions): Where the trained parameters live.
        model (torch.nn.Module): The user's model.
    """
    copies = _Copies(partitions)
    with partitions.writing_masters():
        with _whole_shapes(model), copies:
            yield
        for parameter, value in copies.frozen:
            flat = value.reshape(-1)
            write_frozen(parameter, lambda start, numel, flat=flat: flat[start : start + numel])


class _Copies(TorchFunctionMode):
    """Inside, what is copied into a partitioned parameter goes where its elements live."""

    def __init__(self, partitions: Partitions):
        super().__init__()
        self.partitions = partitions
        self.frozen: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[0], torch.nn.Parameter):
            parameter, value = args[0], args[1]
            if parameter in self.partitions.names:
                fragment = self.partitions.fragment(self.partitions.names[parameter])
                if fragment is not None:
                    fragment.master.copy_(fragment.cut(value))
                return parameter
            if hasattr(parameter, 'ds_id'):  # frozen, under ZeRO 3: it has a borrowed shape for now
                self.frozen.append((parameter, value))
                return parameter
        return func(*args, **(kwargs or {}))


@contextmanager
def _whole_shapes(model: torch.nn.Module) -> Iterator[None]:
    """Give the empty parameters of ZeRO 3 the shapes that torch compares with those in a checkpoint."""
    cut = [(parameter, parameter.data) for parameter in model.parameters() if hasattr(parameter, 'ds_id')]
    for parameter, _ in cut:
        parameter.data = stand_in(full_shape(parameter), parameter.dtype, parameter.device)
    try:
        yield
    finally:
        for parameter, data in cut:
            parameter.data = data
