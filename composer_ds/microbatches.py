"""The same number of backward passes on every rank.

ZeRO 2 and 3 reduce gradients in each backward pass, and ZeRO 3 gathers weights in each forward pass, so a rank whose
batch gives fewer microbatches (a short last batch, say) would leave the others waiting for ever. Plain Composer trains
such batches right. So here the rank with fewer microbatches repeats its last one with a weight of zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from composer.core import Precision, get_precision_context
from composer.utils import ensure_tuple, model_eval_mode

from composer_ds.errors import TrainingError
from composer_ds.no_trace import no_trace
from composer_ds.windows import microbatches_of

if TYPE_CHECKING:
    from composer.core import State

__all__ = ['EvenMicrobatches']


class EvenMicrobatches:
    """Runs the backward passes that this rank lacks. Active under ZeRO 2 and 3 with several ranks only.

    Args:
        state (State): Composer's state; ``state.batch`` and ``state.model`` are read.
        zero_stage (int): The engine's stage.
    """

    def __init__(self, state: State, zero_stage: int):
        self.state = state
        self.zero_stage = zero_stage
        self.active = zero_stage > 1 and dist.get_world_size() > 1
        self._last_microbatch: Any = None
        self._missing = 0

    def begin(self, closure: Callable) -> None:
        """Compare the ranks' numbers of microbatches, before the first.

        Collective, when active.

        Args:
            closure (Callable): What Composer gave to ``optimizer.step``.
        """
        if not self.active:
            return
        mine = len(microbatches_of(closure))
        counts = self.state.device.tensor_to_device(torch.tensor([mine, -mine]))
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        most, fewest = int(counts[0]), -int(counts[1])
        if fewest == 0:
            raise TrainingError(
                f'A rank has an empty batch where another has {most} microbatches. ZeRO 2 and 3 need at least one '
                'sample on every rank; drop the last batch (drop_last=True) or use zero_stage=1.'
            )
        self._missing = most - mine

    def remember(self) -> None:
        """Keep the microbatch at hand, in case it must be repeated. Called before each forward pass."""
        if self._missing:
            self._last_microbatch = self.state.batch

    def finish(self) -> None:
        """Repeat the last microbatch with zero weight as often as this rank lacks microbatches.

        Collective, when active: pairs with the other ranks' last microbatches.
        """
        for _ in range(self._missing):
            self._run_without_weight()
        self._missing = 0
        self._last_microbatch = None

    def _run_without_weight(self) -> None:
        with no_trace(self.state.model):
            with torch.enable_grad(), get_precision_context(Precision(self.state.precision)):
                model: Any = self.state.model
                outputs = model(self._last_microbatch)
                loss = model.loss(outputs, self._last_microbatch)
            losses = list(loss.values()) if isinstance(loss, dict) else list(ensure_tuple(loss))
            total = torch.stack([one.mean() for one in losses]).sum()
            if self.state.precision == Precision.AMP_FP16:
                assert self.state.scaler is not None
                total = self.state.scaler.scale(total)  # without it DeepSpeed refuses the backward pass
            total.backward(torch.zeros_like(total))
            if self.zero_stage == 3 and self.state.train_metrics:
                self._run_for_train_metrics(outputs)

    def _run_for_train_metrics(self, outputs: Any) -> None:
        # The other ranks' forward pass for train metrics gathers weights, unless the model makes do with the outputs.
        model: Any = self.state.model
        precision, config = self.state.precision, self.state.precision_config
        context = get_precision_context(precision, config, fp8_autocast_enabled=False)
        with torch.no_grad(), model_eval_mode(model), context:
            # HuggingFaceModel takes the labels out of the batch.
            model.eval_forward(copy.deepcopy(self._last_microbatch), outputs)
