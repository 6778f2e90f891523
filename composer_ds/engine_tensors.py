"""The tensors that a ``ds_engine`` holds, by what they are for.

Known by what they belong to are weights, the model's buffers, master weights and optimizer state. Gradients and
communication buffers live in private attributes of DeepSpeed's ZeRO classes (0.19.8): those that hold gradients are
named here, and every other tensor that the ZeRO optimizer holds is a buffer. ``tests/distributed/test_monitors.py``
compares with bytes counted by hand, and fails when they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from composer_ds.partitions import flat_partitions

__all__ = ['KINDS', 'bytes_by_kind']

KINDS = ('weights', 'model_buffers', 'master_weights', 'optimizer_state', 'gradients', 'communication')
"""In the order in which a storage that serves for two is counted."""

_GRADIENTS = (
    'averaged_gradients',  # stages 1 and 2
    'all_grad_tensors',
    'accumulated_grads_in_cpu',
    'grad_partitions_flat_buffer',  # stage 3
    '_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition',
    'fp32_groups_gradients_flat',  # BF16_Optimizer
)


def bytes_by_kind(ds_engine: Any) -> dict[str, dict[str, int]]:
    """Add up the storages of all tensors that this rank's engine holds now, each once. Makes no collective.

    Args:
        ds_engine (Any): The ``deepspeed.DeepSpeedEngine``.

    Returns:
        dict[str, dict[str, int]]: For each of :data:`KINDS` the bytes by the type of the device, such as ``'cpu'``.
    """
    seen: set[tuple[str, int]] = set()
    found: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for kind, tensors in _tensors(ds_engine).items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            place, key = tensor.device.type, (tensor.device.type, storage.data_ptr())
            if place != 'meta' and storage.nbytes() and key not in seen:
                seen.add(key)
                found[kind][place] = found[kind].get(place, 0) + storage.nbytes()
    return found


def _tensors(ds_engine: Any) -> dict[str, Iterable[torch.Tensor]]:
    zero_optimizer, module = ds_engine.optimizer, ds_engine.module
    parameters, flats = list(module.parameters()), flat_partitions(zero_optimizer)
    partitioned = [
        getattr(parameter, name, None) for parameter in parameters for name in ('ds_tensor', 'ds_secondary_tensor')
    ]
    gradients = [getattr(parameter, name, None) for parameter in parameters for name in ('grad', 'grad_accum')]
    gradients += [flat.grad for flat in flats]
    gradients += [getattr(zero_optimizer, name, None) for name in _GRADIENTS]
    return {
        'weights': list(_within([parameters, partitioned])),
        'model_buffers': list(module.buffers()),
        'master_weights': flats,
        'optimizer_state': list(_within(list(zero_optimizer.optimizer.state.values()))),
        'gradients': list(_within(gradients)),
        'communication': list(_within(list(vars(zero_optimizer).values()), into_objects=True)),
    }


def _within(value: Any, into_objects: bool = False, depth: int = 6) -> Iterator[torch.Tensor]:
    """Find tensors in lists, dicts and DeepSpeed's own small objects, such as its buckets."""
    if torch.is_tensor(value):
        yield value
    elif depth > 0:
        if isinstance(value, dict):
            inner = list(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            inner = list(value)
        elif into_objects and type(value).__module__.startswith('deepspeed.runtime') and hasattr(value, '__dict__'):
            inner = list(vars(value).values())
        else:
            return
        for one in inner:
            yield from _within(one, into_objects, depth - 1)
