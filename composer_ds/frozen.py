"""Weights that are not trained, under ZeRO 3: DeepSpeed cuts them over the ranks, but gives them no master weights.

Written against deepspeed 0.19.8, where ``parameter.ds_tensor`` holds this rank's run and padding;
``tests/distributed/test_contents.py`` fails when that changes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from composer_ds.consolidation import consolidate
from composer_ds.partitions import full_shape

__all__ = ['whole_frozen', 'write_frozen']


def whole_frozen(parameter: Any, device: torch.device) -> torch.Tensor:
    """Put a frozen parameter together.

    Collective.

    Args:
        parameter (Any): With the attributes that ``deepspeed.zero`` hangs on a parameter.
        device (torch.device): The device that communicates.

    Returns:
        torch.Tensor: Of the parameter's full shape; as :func:`~composer_ds.consolidation.consolidate` returns it.
    """
    runs, rank = _runs(parameter), dist.get_rank()
    mine = parameter.ds_tensor.detach()[: runs[rank][2]] if rank < len(runs) else None
    return consolidate(runs, mine, parameter.ds_tensor.dtype, device, full_shape(parameter))


def write_frozen(parameter: Any, whole: torch.Tensor) -> None:
    """Write a frozen parameter. Every rank calls it, and writes its own run.

    Args:
        parameter (Any): With the attributes that ``deepspeed.zero`` hangs on a parameter.
        whole (torch.Tensor): Of its full shape.
    """
    runs, rank = _runs(parameter), dist.get_rank()
    if rank < len(runs):
        _, start, numel = runs[rank]
        parameter.ds_tensor.data[:numel].copy_(whole.reshape(-1)[start : start + numel])
    if parameter.data.numel() == parameter.ds_numel:  # small ones stay gathered
        parameter.data.copy_(whole.view(full_shape(parameter)))


def _runs(parameter: Any) -> list[tuple[int, int, int]]:
    longest, total = parameter.ds_tensor.ds_numel, parameter.ds_numel
    return [(rank, start, min(longest, total - start)) for rank, start in enumerate(range(0, total, longest))]
