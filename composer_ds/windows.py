"""Windows: the batches whose gradients make one optimizer step.

Normally one batch is one optimizer step. A ds_config may ask for k batches: every k-th batch then updates, and each
weighs 1/k, or in proportion to its tokens where Composer weighs by tokens. The last window of a ``fit`` may be short;
its j batches weigh 1/j.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from composer.utils import dist

__all__ = ['Window', 'microbatches_of']


class Window:
    """The window at hand. One belongs to each engine.

    Args:
        ds_engine (Any): The ``deepspeed.DeepSpeedEngine``.
    """

    def __init__(self, ds_engine: Any):
        self.ds_engine = ds_engine
        self.size = 1
        """How many batches make one optimizer step."""
        self.batches = 0
        """Batches whose gradients wait for the update."""
        self._first_tokens = 0.0
        self._weight = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the update is due."""
        return self.batches >= self.size

    def begin_batch(self, closure: Callable) -> None:
        """Give the coming batch its weight. Called before its first microbatch.

        Collective, where a window of several batches is weighted by tokens: their numbers are added up over the ranks.

        Args:
            closure (Callable): What Composer gave to ``optimizer.step``.
        """
        weight = 1.0
        if self.size > 1:
            tokens = _tokens_of(closure, self.ds_engine.device)
            if tokens is not None:
                self._first_tokens = tokens if self.batches == 0 else self._first_tokens
                weight = tokens / self._first_tokens
            # DeepSpeed (0.19.8) divides by this number in its hooks on the outputs, and reads it nowhere else
            # when the caller owns the accumulation boundary.
            self.ds_engine._config.gradient_accumulation_steps = 1.0 / weight
        self._weight = weight if self.batches == 0 else self._weight + weight
        self.batches += 1

    @contextlib.contextmanager
    def averaging(self) -> Iterator[None]:
        """Let the optimizer step inside divide the gradients by the weight of all batches of the window."""
        weight, zero_optimizer = self._weight, self.ds_engine.optimizer
        self.batches = 0
        if weight in (0.0, 1.0):
            yield
        elif hasattr(zero_optimizer, 'fp32_groups_gradients_flat'):  # BF16_Optimizer, which has no loss scale
            for gradients in zero_optimizer.fp32_groups_gradients_flat:
                gradients.div_(weight)
            yield
        else:
            # DeepSpeed divides by the loss scale, before it takes the norm and clips.
            scaler = zero_optimizer.loss_scaler
            scaler.cur_scale *= weight
            yield
            scaler.cur_scale /= weight


def microbatches_of(closure: Callable[..., Any]) -> list[Any]:
    """Take the microbatches out of the closure that Composer hands to ``optimizer.step``.

    Args:
        closure (Callable[..., Any]): Composer's.

    Returns:
        list[Any]: The microbatches.
    """
    return _of_closure(closure, 'microbatches')


def _of_closure(closure: Callable[..., Any], name: str) -> Any:
    # Composer (0.32) tells nobody how many microbatches a batch has and how they are weighted, but its closure holds
    # the list and the Trainer. tests/distributed/test_parity.py (unequal batches) fails when that changes.
    value = inspect.getclosurevars(closure).nonlocals.get(name)
    if value is None:
        raise AssertionError(f'the closure that Composer hands to optimizer.step no longer names {name!r}')
    return value


def _tokens_of(closure: Callable[..., Any], device: torch.device) -> float | None:
    """Mean over the ranks of a batch's tokens that count for the loss; None where Composer weighs by samples."""
    trainer = _of_closure(closure, 'self')
    if not trainer.accumulate_train_batch_on_tokens:
        return None
    count = trainer._train_data_spec.get_num_tokens_in_batch
    mine = sum(count(microbatch, token_type='loss_generating') for microbatch in microbatches_of(closure))
    tokens = torch.tensor(float(mine), device=device)
    dist.all_reduce(tokens, reduce_operation='SUM')
    return float(tokens) / dist.get_world_size()
