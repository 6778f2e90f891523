"""``ZeroMemoryMonitor``: what each kind of tensor takes on this rank, against the prediction."""

from __future__ import annotations

from typing import Any

import torch
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist

from composer_ds.callbacks.monitor import Monitor
from composer_ds.counts import optimizer_steps
from composer_ds.engine_tensors import bytes_by_kind
from composer_ds.memory import rank_memory
from composer_ds.memory_plan import MemoryPlan
from composer_ds.model_sizes import GroupSizes, ModelSizes, state_bytes_per_element
from composer_ds.partitions import full_numel
from composer_ds.running import running_deepspeed

__all__ = ['ZeroMemoryMonitor']

_MOST_RANKS = 16
"""With more each rank has no key of its own."""


class ZeroMemoryMonitor(Monitor):
    """Counts the tensors of the engine in every n-th optimizer step, when all backward passes are done.

    Each storage is counted once, wherever it is: on a GPU, in host memory, or both. The prediction is that of
    ``composer-ds check``, for the backward pass in which a bucket of gradients is reduced: an upper bound for the
    total, since it includes copies that exist only then, and the weights that ZeRO 3 has gathered. In that moment some
    gradients lie in communication buffers, so these two kinds may differ from what is counted here. The optimizer makes
    its state in the first update, so the first optimizer step of a ``fit`` is not counted. The ranks exchange their
    totals, so that the rank that logs can show them all.

    +------------------------------------------+--------------------------------------------------------------------+
    | Key                                      | Logged data, in bytes of this rank                                 |
    +==========================================+====================================================================+
    | ``optimizer_steps/applied``              | Optimizer steps that changed the weights, for the x-axis           |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/weights``                  | Weights that the model computes with, frozen ones among them       |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/model_buffers``            | The model's buffers, such as running means                         |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/master_weights``           | This rank's part of the fp32 master weights                        |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/optimizer_state``          | This rank's part of the optimizer's state                          |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/gradients``                | Gradients, whole or partitioned                                    |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/communication``            | Buffers of communication and offload                               |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/total``                    | All of these                                                       |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/total/rank{N}``            | The total of each rank. Only on 2 to 16 ranks                      |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/total/lowest``             | The lowest of all ranks. Only on several ranks, here and below     |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/total/highest``            | The highest. Only on several ranks                                 |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/in_host_memory``           | Of this rank's total, in host memory. Only on a GPU                |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/predicted/weights``        | Weights and the model's buffers                                    |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/predicted/optimizer``      | Master weights and optimizer state                                 |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/predicted/gradients``      | Gradients                                                          |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/predicted/communication``  | Buffers of communication and offload                               |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/predicted/total``          | All of these                                                       |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/ratio/weights``            | Measured / predicted, here and below                               |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/ratio/optimizer``          | Master weights and optimizer state                                 |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/ratio/gradients``          | Gradients                                                          |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/ratio/total``              | All                                                                |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/peak_allocated``           | The most that torch has allocated on the GPU since the process     |
    |                                          | began, or since somebody reset it. Only on a GPU                   |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/peak_allocated/highest``   | The highest peak of all ranks. Only on a GPU, with several ranks   |
    +------------------------------------------+--------------------------------------------------------------------+
    | ``zero_memory/activations``              | The peak without the tensors above that are on the GPU: activations|
    |                                          | and everything temporary. Only on a GPU; a CPU does not tell       |
    +------------------------------------------+--------------------------------------------------------------------+

    Args:
        interval (int): Count at every so many applied optimizer steps, and at the first that can be. Default: 100.

    Raises:
        ConfigError: When the interval is no whole number from 1 on; from ``Trainer(...)``, when that has no
            ``DeepSpeed``.
    """

    def __init__(self, interval: int = 100):
        super().__init__(interval)
        self._ds_engine: Any = None
        self._predicted: dict[str, int] = {}
        self._counted: dict[str, float] = {}
        self._is_first = True
        self._applied_before = 0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Predict. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        algorithm = running_deepspeed(state, type(self).__name__)
        plan, self._ds_engine = algorithm.plan, algorithm.ds_engine
        assert plan is not None
        memory_plan = MemoryPlan.of_ds_config(
            plan.ds_config, world_size=dist.get_world_size(), weights=plan.weights, on_cpu=state.device.name == 'cpu'
        )
        moment = rank_memory(_sizes_of_engine(self._ds_engine), memory_plan).reduction
        names = {'buffers': 'communication'}
        self._predicted = {names.get(kind, kind): moment.device[kind] + moment.host[kind] for kind in moment.device}
        self._is_first = True
        self._applied_before = optimizer_steps(state).applied

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Count, when it is time. Called by Composer after the last backward pass of a batch, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        steps = optimizer_steps(state)
        if steps.applied == self._applied_before:
            return  # there is no optimizer state yet
        if self._is_first or (steps.applied + 1) % self.interval == 0:
            self._counted = self._measure()

    def optimizer_step(self, state: State, logger: Logger) -> None:
        """Keep what was counted in this optimizer step. Called on every rank, after each that was applied.

        Collective, in the optimizer steps that are counted.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        if not self._counted:
            return
        counted, self._counted, self._is_first = self._counted, {}, False
        peak = 0
        if state.device.name == 'gpu':
            peak = torch.cuda.max_memory_allocated()
            on_device = counted['zero_memory/total'] - counted['zero_memory/in_host_memory']
            counted |= {'zero_memory/peak_allocated': peak, 'zero_memory/activations': peak - on_device}
        counted |= _of_all_ranks(int(counted['zero_memory/total']), peak, state)
        self.pending = {'optimizer_steps/applied': optimizer_steps(state).applied, **counted}

    def _measure(self) -> dict[str, float]:
        places = bytes_by_kind(self._ds_engine)
        found = {kind: sum(by_place.values()) for kind, by_place in places.items()}
        compared = {
            'weights': found['weights'] + found['model_buffers'],
            'optimizer': found['master_weights'] + found['optimizer_state'],
            'gradients': found['gradients'],
            'total': sum(found.values()),
        }
        predicted = {**self._predicted, 'total': sum(self._predicted.values())}
        metrics: dict[str, float] = {f'zero_memory/{kind}': count for kind, count in found.items()}
        metrics['zero_memory/total'] = compared['total']
        if torch.device(self._ds_engine.device).type == 'cuda':
            metrics['zero_memory/in_host_memory'] = sum(by_place.get('cpu', 0) for by_place in places.values())
        metrics |= {f'zero_memory/predicted/{kind}': count for kind, count in predicted.items()}
        return metrics | {f'zero_memory/ratio/{kind}': compared[kind] / predicted[kind] for kind in compared}


def _of_all_ranks(total: int, peak: int, state: State) -> dict[str, float]:
    if dist.get_world_size() == 1:
        return {}
    own = state.device.tensor_to_device(torch.tensor([total, peak]))
    totals, peaks = torch.stack(list(dist.all_gather(own))).T.tolist()
    found = {'zero_memory/total/lowest': min(totals), 'zero_memory/total/highest': max(totals)}
    if len(totals) <= _MOST_RANKS:
        found |= {f'zero_memory/total/rank{rank}': one for rank, one in enumerate(totals)}
    if peak:
        found['zero_memory/peak_allocated/highest'] = max(peaks)
    return found


def _sizes_of_engine(ds_engine: Any) -> ModelSizes:
    """As ``sizes_of`` reads them before ZeRO has cut the parameters, in the order of the optimizer's groups."""
    optimizer = ds_engine.optimizer.optimizer  # the PartitionedOptimizer that ZeRO wraps
    groups, trained = [], set()
    for theirs, ours in optimizer.group_pairs:
        parameters = [one for one in theirs['params'] if one in optimizer.partitions.names]
        trained.update(parameters)
        numels = tuple(full_numel(parameter) for parameter in parameters)
        groups.append(GroupSizes(numels, state_bytes_per_element(optimizer, ours)))
    frozen = [parameter for parameter in ds_engine.module.parameters() if parameter not in trained]
    return ModelSizes(
        tuple(groups),
        tuple(full_numel(parameter) for parameter in frozen),
        sum(buffer.numel() * buffer.element_size() for buffer in ds_engine.module.buffers()),
    )
