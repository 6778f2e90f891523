"""The same number of forward passes on every rank in each batch of evaluation, which ZeRO 3 needs.

Composer (0.32) ends evaluation and prediction on all ranks as soon as one has no batch left, so batches are even. But
an evaluator's ``device_eval_microbatch_size`` cuts a batch into as many microbatches as the rank's batch has samples
for. A rank with fewer than the others runs its first microbatch again, before its own turn, and forgets the result.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from composer.core import get_precision_context

from composer_ds.errors import TrainingError
from composer_ds.no_trace import no_trace

if TYPE_CHECKING:
    from composer.core import Evaluator, State

__all__ = ['EvenEvaluation']


class EvenEvaluation:
    """Runs the forward passes of evaluation that this rank lacks. Active under ZeRO 3 with several ranks only.

    Args:
        state (State): Composer's state; the batch and the evaluators are read.
        model (torch.nn.Module): The user's model, whose ``eval_forward`` Composer calls.
        zero_stage (int): The engine's stage.
    """

    def __init__(self, state: State, model: torch.nn.Module, zero_stage: int):
        self.state = state
        self.model: Any = model
        self.active = zero_stage == 3 and dist.get_world_size() > 1

    def batch_start(self) -> None:
        """Compare the ranks' numbers of microbatches, and make up for those that this rank lacks.

        Called at ``EVAL_BATCH_START``. Collective, when active.

        Raises:
            TrainingError: On every rank, when one has no microbatch at all.
        """
        if not self.active:
            return
        evaluator = self._evaluator()
        # As Composer is about to, which itself does not say into how many. A copy: a split_batch of the user's may take
        # entries out of a dict.
        split_batch: Any = evaluator.dataloader.split_batch
        microbatches = list(split_batch(copy.copy(self.state.batch), evaluator.device_eval_microbatch_size))
        counts = self.state.device.tensor_to_device(torch.tensor([len(microbatches), -len(microbatches)]))
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        most, fewest = int(counts[0]), -int(counts[1])
        if most > fewest == 0:
            raise TrainingError(
                f'A rank has an empty batch of {evaluator.label!r} where another has {most} microbatches. ZeRO 3 needs '
                'at least one sample on every rank; drop the last batch (drop_last=True) or use zero_stage=2.'
            )
        for _ in range(most - len(microbatches)):
            self._run_without_result(evaluator, microbatches[0])

    def _evaluator(self) -> Evaluator:
        # trainer.eval(dataloader) may add one whose label is there already.
        label, dataloader = self.state.dataloader_label, self.state.dataloader
        for evaluator in self.state.evaluators:
            if evaluator.label == label and evaluator.dataloader.dataloader is dataloader:
                return evaluator
        raise AssertionError(f'Composer evaluates {label!r}, which none of its evaluators has')

    def _run_without_result(self, evaluator: Evaluator, microbatch: Any) -> None:
        microbatch = copy.deepcopy(microbatch)  # eval_forward may change it: HuggingFaceModel takes the labels out
        microbatch = evaluator.dataloader.microbatch_transforms(self.state.device.batch_to_device(microbatch))
        precision, config = self.state.precision, self.state.precision_config
        with no_trace(self.model), get_precision_context(precision, config, fp8_autocast_enabled=False):
            self.model.eval_forward(microbatch)
