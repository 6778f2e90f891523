"""Norms of each parameter's gradient, weights and update, under every ZeRO stage, without gathering anything.

Every rank adds up the squares of the runs that it owns while its optimizer updates them, and one all-reduce of three
numbers for each parameter makes them whole. (DeepSpeed's ``safe_get_full_grad`` gathers parameter by parameter, and
between the last backward pass and the update it is wrong, or hangs, in some modes.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from composer_ds.partitioned_optimizer import PartitionedOptimizer
from composer_ds.partitions import Fragment

__all__ = ['Norms', 'ParameterNorms']


class Norms(NamedTuple):
    """L2 norms of one parameter in one optimizer step.

    Args:
        gradient (float): Of the gradient, before clipping.
        weight (float): Of the fp32 master weights, after the update.
        update (float): Of what the update added to them.
    """

    gradient: float
    weight: float
    update: float

    @property
    def update_to_weight(self) -> float:
        """The update's norm in proportion to that of the weights; 0.0 where both are zero."""
        return self.update / self.weight if self.weight else 0.0


class ParameterNorms:
    """Watches the updates of an optimizer, from construction until :meth:`close`.

    Args:
        optimizer (PartitionedOptimizer): The optimizer that DeepSpeed steps.
        is_due (Callable[[], bool]): Asked before each update, whether it is to be measured; alike on all ranks. An
            update that is measured needs memory for a copy of the master weights that are updated at a time.
    """

    def __init__(self, optimizer: PartitionedOptimizer, is_due: Callable[[], bool]):
        self._optimizer = optimizer
        self._is_due = is_due
        self.names = list(optimizer.partitions.parameters)
        """Of the trained parameters, in the model's order."""
        self._index = {name: index for index, name in enumerate(self.names)}
        self._squares: list[tuple[int, torch.Tensor]] = []
        optimizer.observers.append(self._observe)

    def close(self) -> None:
        """Stop watching."""
        if self._observe in self._optimizer.observers:
            self._optimizer.observers.remove(self._observe)

    @contextmanager
    def _observe(self, fragments: list[Fragment]) -> Iterator[None]:
        if not self._is_due():
            yield
            return
        with torch.no_grad():
            # An algorithm may change gradients in place, so they are read before it.
            gradients = [self._gradient_norm(fragment) for fragment in fragments]
            flats = {id(fragment.flat): fragment.flat for fragment in fragments}
            before = {key: flat.detach().clone() for key, flat in flats.items()}
        yield
        with torch.no_grad():
            for fragment, gradient in zip(fragments, gradients, strict=True):
                update = fragment.master - fragment.of(before[id(fragment.flat)])
                weight, change = torch.linalg.vector_norm(fragment.master), torch.linalg.vector_norm(update)
                norms = torch.stack([gradient, weight, change]).double()
                self._squares.append((self._index[fragment.name], norms.square()))

    def _gradient_norm(self, fragment: Fragment) -> torch.Tensor:
        gradient = fragment.flat.grad
        if gradient is None or fragment.parameter in self._optimizer.without_gradient:
            return torch.zeros((), device=fragment.flat.device)
        return torch.linalg.vector_norm(fragment.of(gradient))

    def take(self, clipped_by: float = 1.0) -> dict[str, Norms]:
        """Return the norms of the optimizer step that has just been measured.

        Collective: one all-reduce.

        Args:
            clipped_by (float): What clipping has multiplied the gradients by. Default: 1.0.

        Returns:
            dict[str, Norms]: By the parameter's name, alike on all ranks.
        """
        device = torch.device(self._optimizer.partitions.ds_engine.device)  # pyright: ignore[reportArgumentType]
        total = torch.zeros(len(self.names), 3, dtype=torch.float64)
        if self._squares:
            indices = torch.tensor([index for index, _ in self._squares])
            # One copy from the device; with offload they are in host memory already.
            total.index_add_(0, indices, torch.stack([squares for _, squares in self._squares]).cpu())
            self._squares.clear()
        if dist.get_world_size() > 1:
            total = total.to(device)
            dist.all_reduce(total)
        rows = total.sqrt().tolist()
        return {
            name: Norms(gradient / clipped_by, weight, update)
            for name, (gradient, weight, update) in zip(self.names, rows, strict=True)
        }
