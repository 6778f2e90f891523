"""Weights that are not trained, under ZeRO 3: DeepSpeed cuts them over the ranks, but gives them no master weights.

Written against deepspeed 0.19.8, where ``parameter.ds_tensor`` holds this rank's run and padding;
``tests/distributed/test_contents.py`` fails when that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from composer_ds.consolidation import consolidate
from composer_ds.partitions import full_shape

__all__ = ['run_of_frozen', 'whole_frozen', 'write_frozen']


def whole_frozen(parameter: Any, device: torch.device) -> torch.Tensor:
    """Put a frozen parameter together.

    Collective.

    Args:
        parameter (Any): With the attributes that ``deepspeed.zero`` hangs on a parameter.
        device (torch.device): The device that communicates.

    Returns:
        torch.Tensor: Of the parameter's full shape; as :func:`~composer_ds.consolidation.consolidate` returns it.
    """
    mine, _ = run_of_frozen(parameter)
    return consolidate(_runs(parameter), mine, mine.dtype, device, full_shape(parameter))


def write_frozen(parameter: Any, read: Callable[[int, int], torch.Tensor]) -> None:
    """Write a frozen parameter. Every rank calls it, and writes its own run.

    Args:
        parameter (Any): With the attributes that ``deepspeed.zero`` hangs on a parameter.
        read (Callable[[int, int], torch.Tensor]): Given where a run begins and its length, returns its new elements,
            shape ``(numel,)``.
    """
    run, start = run_of_frozen(parameter)
    if run.numel():
        run.copy_(read(start, run.numel()))
    if parameter.data.numel() == parameter.ds_numel:  # small ones stay gathered
        parameter.data.copy_(read(0, parameter.ds_numel).view(full_shape(parameter)))


def run_of_frozen(parameter: Any) -> tuple[torch.Tensor, int]:
    """Return this rank's run of a frozen parameter.

    Args:
        parameter (Any): With the attributes that ``deepspeed.zero`` hangs on a parameter.

    Returns:
        tuple[torch.Tensor, int]: A view of the run, shape ``(numel,)``, and where it begins; empty where other ranks
            have all.
    """
    runs, rank = _runs(parameter), dist.get_rank()
    if rank >= len(runs):
        return parameter.ds_tensor.data[:0], 0
    _, start, numel = runs[rank]
    return parameter.ds_tensor.data[:numel], start


def _runs(parameter: Any) -> list[tuple[int, int, int]]:
    longest, total = parameter.ds_tensor.ds_numel, parameter.ds_numel
    return [(rank, start, min(longest, total - start)) for rank, start in enumerate(range(0, total, longest))]
