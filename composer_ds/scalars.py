"""Parameters of shape (), which DeepSpeed (0.19) cannot broadcast: it views weights as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from composer_ds.partitions import full_shape

__all__ = ['scalars_as_vectors']


@contextmanager
def scalars_as_vectors(parameters: Iterable[Any], zero_stage: int) -> Iterator[None]:
    """Let parameters of shape () pass through DeepSpeed inside.

    Collective.

    Args:
        parameters (Iterable[Any]): Of a model; others than those of shape () are left alone.
        zero_stage (int): 1, 2 or 3.
    """
    scalars = [parameter for parameter in parameters if full_shape(parameter) == ()]
    for parameter in scalars:
        if zero_stage == 3:
            if parameter.numel():  # not cut yet
                parameter.data = parameter.data.view(1)
        else:  # stages 1 and 2 remember the shape, so they broadcast nothing, and it is done here
            parameter.ds_optim_param = True
            if dist.get_world_size() > 1:
                dist.broadcast(parameter.detach(), src=0)
    yield
    for parameter in scalars:
        if zero_stage == 3:
            parameter.ds_shape = torch.Size(())
            if parameter.numel():
                parameter.data = parameter.data.view(())
        else:
            del parameter.ds_optim_param
