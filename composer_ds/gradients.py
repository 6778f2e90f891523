"""Which parameters got a gradient, and what follows for DeepSpeed's gradient buffers.

DeepSpeed (0.19.8) accumulates into buffers that it does not clear between optimizer steps: with CPU offload
on any stage, and on stage 3 always, a parameter that is not used in the first microbatch of an optimizer step, or in
none of it, receives the gradient of an earlier optimizer step, without a word. The tracker clears just those buffers,
so it costs nothing where every parameter is used. ``tests/distributed/test_parity.py`` holds the cases.

It also makes the ranks agree on who got a gradient: torch leaves a parameter without one alone, and so must we, on
every rank alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from composer_ds.errors import TrainingError
from composer_ds.partitions import Partitions, flat_partitions, full_numel

__all__ = ['GradientTracker']


class GradientTracker:
    """Records which parameters receive a gradient in each microbatch and each optimizer step.

    Args:
        partitions (Partitions): The layout; its parameters are watched until :meth:`close`.
    """

    def __init__(self, partitions: Partitions):
        self.partitions = partitions
        self.zero_optimizer: Any = partitions.ds_engine.optimizer
        self.stage = partitions.ds_engine.zero_optimization_stage()
        self.parameters = [parameter for parameter in partitions.names if full_numel(parameter)]
        self.microbatches = 0
        """Backward passes since the last optimizer step."""
        self.microbatches_of_batch = 0
        """Backward passes of the batch at hand."""
        self._seen: set[int] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._marker(index))
            for index, parameter in enumerate(self.parameters)
        ]

    def _marker(self, index: int):
        def mark(_: torch.Tensor) -> None:
            self._seen.add(index)

        return mark

    def after_backward(self) -> None:
        """Clear the buffers that the first microbatch did not overwrite. Called after every backward, on every rank."""
        self.microbatches += 1
        self.microbatches_of_batch += 1
        if self.microbatches == 1 and len(self._seen) < len(self.parameters):
            self._clear_accumulation([p for i, p in enumerate(self.parameters) if i not in self._seen])

    def end_batch(self) -> None:
        """Note that a batch was not broken off. Called after its last microbatch."""
        self.microbatches_of_batch = 0

    def without_gradient(self) -> set[torch.nn.Parameter]:
        """Say which parameters got no gradient in this optimizer step on any rank. Called before the engine steps.

        Collective.

        Returns:
            set[torch.nn.Parameter]: Alike on all ranks.

        Raises:
            TrainingError: On every rank, when a parameter of ZeRO 2 or 3 was used on some ranks only: DeepSpeed then
                reduces gradients of different parameters with each other.
        """
        ranks = torch.zeros(len(self.parameters), dtype=torch.int32)
        ranks[list(self._seen)] = 1
        if dist.get_world_size() > 1:
            ranks = ranks.to(self.partitions.ds_engine.device)
            dist.all_reduce(ranks)
            ranks = ranks.cpu()
        if bool((ranks == dist.get_world_size()).all()):
            return set()
        self._fill_in(
            [p for p, n in zip(self.parameters, ranks.tolist(), strict=True) if 0 < n < dist.get_world_size()]
        )
        unused = {p for p, n in zip(self.parameters, ranks.tolist(), strict=True) if n == 0}
        self._clear_master_gradients(unused)
        return unused

    def after_optimizer_step(self, skipped: bool) -> None:
        """Begin the next optimizer step.

        Args:
            skipped (bool): Whether DeepSpeed skipped this one, because of a gradient that is infinite or NaN.
        """
        if skipped and self.stage < 3:
            # With CPU offload in 16 bits DeepSpeed (0.19.8) goes on adding to the gradients of the skipped optimizer
            # step, so that every later one is infinite, too. tests/distributed/test_skipped.py fails without this.
            averaged = getattr(self.zero_optimizer, 'averaged_gradients', {})
            for group in averaged:
                averaged[group] = None
        self.microbatches = 0
        self._seen.clear()

    def close(self) -> None:
        """Stop watching the parameters."""
        for handle in self._handles:
            handle.remove()

    def _fill_in(self, partial: list[torch.nn.Parameter]) -> None:
        """Give this rank zero gradients for parameters that only other ranks used."""
        if partial and self.stage > 1:
            names = ', '.join(self.partitions.names[parameter] for parameter in partial)
            raise TrainingError(
                f'In this optimizer step some ranks computed a gradient for {names} and others did not. ZeRO '
                f'{self.stage} reduces gradients during the backward pass and needs the same parameters on every rank. '
                'Use zero_stage=1, or let every rank use the same parameters (for example by adding '
                '0 * parameter.sum() to the loss).'
            )
        for parameter in partial:
            if hasattr(self.zero_optimizer, 'fp32_groups_has_gradients'):  # BF16_Optimizer: a buffer of zeros exists
                for group, parameters in enumerate(self.zero_optimizer.bf16_groups):
                    for index, one in enumerate(parameters):
                        if one is parameter:
                            self.zero_optimizer.fp32_groups_has_gradients[group][index] = True
            elif self.zero_optimizer.get_gradient_for_reduction(parameter) is None:
                attribute = 'grad_accum' if self.zero_optimizer.use_grad_accum_attribute else 'grad'
                setattr(parameter, attribute, torch.zeros_like(parameter))

    def _clear_accumulation(self, unseen: list[torch.nn.Parameter]) -> None:
        buffers: dict[int, torch.Tensor]
        if self.stage == 3:
            buffers = self.zero_optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        else:
            buffers = getattr(self.zero_optimizer, 'accumulated_grads_in_cpu', {})  # there with offload only
        for parameter in unseen:
            buffer = buffers.get(self.zero_optimizer.get_param_id(parameter)) if buffers else None
            if buffer is not None:
                buffer.zero_()

    def _clear_master_gradients(self, unused: set[torch.nn.Parameter]) -> None:
        """Clear what offload left in the fp32 gradient of unused parameters, so that no norm sees it."""
        gradients = {id(flat): flat.grad for flat in flat_partitions(self.zero_optimizer)}
        for fragment in self.partitions.fragments:
            gradient = gradients[id(fragment.flat)]
            if fragment.parameter in unused and gradient is not None:
                fragment.of(gradient).zero_()
