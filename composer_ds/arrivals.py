"""Tensors that arrive at rank 0 one after the other, whole or in parts, the next one while the last is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

__all__ = ['Begin', 'Finish', 'Scratch', 'begin_copy', 'in_turn']

Finish = Callable[[], torch.Tensor | None]
"""Waits until a tensor, or a part of it, has arrived, and gives it to rank 0: flattened, in host memory."""


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


class Begin(Protocol):
    """Starts sending and receiving a tensor, or a part of it. Collective."""

    def __call__(
        self, scratch: Scratch, start: int = 0, numel: int | None = None, dtype: torch.dtype | None = None
    ) -> Finish:
        """Start.

        Args:
            scratch (Scratch): Memory to receive into; what is received is valid until it is used again.
            start (int): The first element of the flattened tensor. Default: 0.
            numel (int | None): How many elements; None for all that follow. Default: None.
            dtype (torch.dtype | None): To receive them in: whoever owns them casts them, so that fewer bytes may cross
                the network. None for the tensor's own. Default: None.

        Returns:
            Finish: Called when the part is needed. Collective.
        """
        ...


def begin_copy(whole: torch.Tensor, is_first: bool) -> Begin:
    """Make what gives rank 0 a tensor that it has already, as it would receive one that is partitioned.

    Args:
        whole (torch.Tensor): The tensor.
        is_first (bool): Whether this is rank 0.

    Returns:
        Begin: No collective.
    """

    def begin(scratch: Scratch, start: int = 0, numel: int | None = None, dtype: torch.dtype | None = None) -> Finish:
        end = None if numel is None else start + numel
        return lambda: whole.reshape(-1)[start:end].to('cpu', dtype or whole.dtype) if is_first else None

    return begin


def in_turn(begins: Iterable[Callable[[Scratch], Finish]]) -> Iterator[torch.Tensor | None]:
    """Put one tensor, or part of one, after the other together: the next one while the last is in use.

    Collective: every rank iterates to the end.

    Args:
        begins (Iterable[Callable[[Scratch], Finish]]): In an order that is alike on all ranks.

    Yields:
        torch.Tensor | None: On rank 0, flattened, in host memory, valid until the next is asked for; None on others.
    """
    scratches = Scratch(), Scratch()
    finish = None
    for number, begin in enumerate(begins):
        finish_next = begin(scratches[number % 2])
        if finish is not None:
            yield finish()
        finish = finish_next
    if finish is not None:
        yield finish()
