"""Putting a whole tensor together out of the runs that the ranks own: now or later, for every rank or for rank 0."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from composer.utils.checkpoint import save_checkpoint

__all__ = [
    'PendingTensor',
    'PendingTensorRead',
    'Scratch',
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
        return _later(shape, dtype, lambda scratch: _begin(runs, mine, dtype, device, scratch))
    if not is_saving():
        return _on_every_rank(runs, mine, dtype, device).view(shape)
    whole = _begin(runs, mine, dtype, device, Scratch())()
    return stand_in(shape, dtype) if whole is None else whole.view(shape)


def consolidate_copy(whole: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that every rank has already, as :func:`consolidate` returns one that is partitioned.

    Args:
        whole (torch.Tensor): Equal on all ranks.

    Returns:
        torch.Tensor: Of the same shape.
    """
    if _pending is not None:
        return _later(whole.shape, whole.dtype, lambda _: lambda: whole.cpu() if dist.get_rank() == 0 else None)
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


class Scratch:
    """Memory that one tensor after the other is received into: fresh memory costs as much time as a disk."""

    def __init__(self):
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a tensor; what was taken before is overwritten.

        Args:
            numel (int): Elements.
            dtype (torch.dtype): Of the tensor.
            device (torch.device): Alike in all calls.

        Returns:
            torch.Tensor: Shape ``(numel,)``.
        """
        size_bytes = numel * dtype.itemsize
        if self._bytes.numel() < size_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is taken
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return self._bytes[:size_bytes].view(dtype)


class PendingTensorRead(RuntimeError):
    """Somebody wants the elements of a :class:`PendingTensor`."""


class PendingTensor(torch.Tensor):
    """A tensor of a state dict that is put together when its turn to be written has come.

    It has a shape and a dtype; anything that reads its elements is an error.
    """

    begin: Callable[[Scratch], Callable[[], torch.Tensor | None]]
    """Starts sending and receiving. Collective. Returns what waits for the end, and then gives rank 0 the whole tensor,
    flattened, in host memory."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: a copy would be written with elements that nobody has gathered."""
        raise PendingTensorRead(
            f'{func}: while a checkpoint is written in a stream, weights and moments have a shape, but no elements yet.'
        )


def _later(
    shape: torch.Size, dtype: torch.dtype, begin: Callable[[Scratch], Callable[[], torch.Tensor | None]]
) -> PendingTensor:
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


def _begin(
    runs: Sequence[Run], mine: torch.Tensor | None, dtype: torch.dtype, device: torch.device, scratch: Scratch
) -> Callable[[], torch.Tensor | None]:
    """Start to give rank 0 the whole tensor: every byte crosses the network once, and the other ranks keep nothing."""
    operations = []
    whole = None
    if dist.get_rank() == 0:
        whole = scratch.take(sum(numel for _, _, numel in runs), dtype, device)
        for rank, start, numel in runs:
            run = whole.narrow(0, start, numel)
            if rank == 0:
                assert mine is not None
                run.copy_(mine)
            elif numel:
                operations.append(dist.P2POp(dist.irecv, run, rank))
    elif mine is not None and mine.numel():
        operations.append(dist.P2POp(dist.isend, mine.detach().to(device, dtype).contiguous(), 0))
    # Batched: NCCL would otherwise make a communicator of its own for every pair of ranks.
    requests = dist.batch_isend_irecv(operations) if operations else []

    def finish() -> torch.Tensor | None:
        for request in requests:
            request.wait()
        del operations[:]  # what was sent is kept alive until here
        return None if whole is None else whole.cpu()

    return finish
