"""Putting a whole tensor together out of the runs that the ranks own: now or later, for every rank or for rank 0."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from composer.utils.checkpoint import save_checkpoint

from composer_ds.arrivals import Begin, Finish, Scratch, begin_copy

__all__ = [
    'PendingTensor',
    'PendingTensorRead',
    'consolidate',
    'consolidate_copy',
    'consolidating_later',
    'is_saving',
    'stand_in',
]

Run = tuple[int, int, int]
"""``(rank, start, numel)``: which rank owns which elements of a flattened tensor."""
_pending: list[PendingTensor] | None = None


def is_saving() -> bool:
    """Say whether Composer is collecting a checkpoint, which rank 0 alone writes.

    Everybody else who asks for a state dict gets whole tensors on every rank, as from torch's DistributedDataParallel.

    Returns:
        bool: Whether Composer's ``save_checkpoint`` is among the callers. Alike on all ranks.
    """
    # Composer (0.32) asks for the same state dict on every rank and drops it on all but the first, and fires no event
    # around a save. tests/distributed/test_contents.py fails when it saves in another way.
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is save_checkpoint.__code__:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def consolidating_later() -> Iterator[list[PendingTensor]]:
    """Inside, state dicts hold :class:`PendingTensor` in place of what is partitioned.

    Yields:
        list[PendingTensor]: All that were made, in an order that is alike on all ranks.
    """
    global _pending
    _pending = []
    try:
        yield _pending
    finally:
        _pending = None


def consolidate(
    runs: Sequence[Run], mine: torch.Tensor | None, dtype: torch.dtype, device: torch.device, shape: torch.Size
) -> torch.Tensor:
    """Put a tensor together: on every rank, or on rank 0 alone while a checkpoint is saved.

    Collective: every rank calls it, for the same tensors in the same order.

    Args:
        runs (Sequence[Run]): Together they cover the tensor.
        mine (torch.Tensor | None): This rank's run, shape ``(numel,)``; None when it owns none.
        dtype (torch.dtype): Of the result, alike on all ranks.
        device (torch.device): The device that communicates.
        shape (torch.Size): Of the result.

    Returns:
        torch.Tensor: On ``device``. While Composer saves: in host memory on rank 0, a :func:`stand_in` on the others.
            Inside :func:`consolidating_later`: a :class:`PendingTensor`.
    """
    if _pending is not None:
        return _later(shape, dtype, _Gathering(runs, mine, dtype, device))
    if not is_saving():
        return _on_every_rank(runs, mine, dtype, device).view(shape)
    whole = _Gathering(runs, mine, dtype, device)(Scratch())()
    return stand_in(shape, dtype) if whole is None else whole.view(shape)


def consolidate_copy(whole: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that every rank has already, as :func:`consolidate` returns one that is partitioned.

    Args:
        whole (torch.Tensor): Equal on all ranks.

    Returns:
        torch.Tensor: Of the same shape.
    """
    if _pending is not None:
        return _later(whole.shape, whole.dtype, begin_copy(whole, dist.get_rank() == 0))
    if not is_saving():
        return whole.clone()
    return whole.to('cpu', copy=True) if dist.get_rank() == 0 else stand_in(whole.shape, whole.dtype)


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = 'cpu') -> torch.Tensor:
    """Make what the other ranks hold in place of a tensor that rank 0 writes: its shape, without its memory.

    Args:
        shape (Sequence[int]): Of the whole tensor.
        dtype (torch.dtype): Of the whole tensor.
        device (torch.device | str): Where its one element lies. Default: ``'cpu'``.

    Returns:
        torch.Tensor: One element, expanded; NaN where the dtype has one, so that nobody takes it for weights.
    """
    element = torch.full((), float('nan') if dtype.is_floating_point else 0, dtype=dtype, device=device)
    return element.expand(tuple(shape))


class PendingTensorRead(RuntimeError):
    """Somebody wants the elements of a :class:`PendingTensor`."""


class PendingTensor(torch.Tensor):
    """A tensor of a state dict that is put together when its turn to be written has come.

    It has a shape and a dtype; anything that reads its elements is an error.
    """

    begin: Begin

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: a copy would be written with elements that nobody has gathered."""
        raise PendingTensorRead(
            f'{func}: while a checkpoint is written in a stream, weights and moments have a shape, but no elements yet.'
        )


def _later(shape: torch.Size, dtype: torch.dtype, begin: Begin) -> PendingTensor:
    assert _pending is not None
    pending: PendingTensor = torch.Tensor._make_wrapper_subclass(PendingTensor, shape, dtype=dtype)  # pyright: ignore
    pending.begin = begin
    _pending.append(pending)
    return pending


def _on_every_rank(
    runs: Sequence[Run], mine: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Give every rank the whole tensor: each run is broadcast by its owner."""
    whole = torch.empty(sum(numel for _, _, numel in runs), dtype=dtype, device=device)
    for rank, start, numel in runs:
        run = whole.narrow(0, start, numel)
        if rank == dist.get_rank():
            assert mine is not None
            run.copy_(mine)
        if dist.get_world_size() > 1:
            dist.broadcast(run, src=rank)
    return whole


@dataclass(frozen=True)
class _Gathering:
    """Gives rank 0 a partitioned tensor: every byte crosses the network once, and the other ranks keep nothing.

    Args:
        runs (Sequence[Run]): Together they cover the tensor; at most one for each rank.
        mine (torch.Tensor | None): This rank's run, shape ``(numel,)``; None when it owns none.
        dtype (torch.dtype): Of the tensor, alike on all ranks.
        device (torch.device): The device that communicates.
    """

    runs: Sequence[Run]
    mine: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device

    def __call__(
        self, scratch: Scratch, start: int = 0, numel: int | None = None, dtype: torch.dtype | None = None
    ) -> Finish:
        dtype = dtype or self.dtype
        end = sum(numel for _, _, numel in self.runs) if numel is None else start + numel
        me = dist.get_rank()
        received = scratch.take(end - start, dtype, self.device) if me == 0 else None
        operations = []
        for rank, run_start, run_numel in self.runs:
            first, last = max(start, run_start), min(end, run_start + run_numel)
            if last <= first or me not in (0, rank):
                continue
            mine = None
            if rank == me:
                assert self.mine is not None
                mine = self.mine.detach()[first - run_start : last - run_start]
            if received is None:
                assert mine is not None
                operations.append(dist.P2POp(dist.isend, mine.to(self.device, dtype).contiguous(), 0))
            elif mine is None:
                operations.append(dist.P2POp(dist.irecv, received[first - start : last - start], rank))
            else:
                received[first - start : last - start].copy_(mine)
        # Batched: NCCL would otherwise make a communicator of its own for every pair of ranks.
        requests = dist.batch_isend_irecv(operations) if operations else []

        def finish() -> torch.Tensor | None:
            for request in requests:
                request.wait()
            del operations[:]  # what was sent is kept alive until here
            return None if received is None else received.cpu()

        return finish
