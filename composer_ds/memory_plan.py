"""The settings that memory depends on, read out of a complete ds_config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ['MemoryPlan']

_SIZES = {
    'reduce_bucket_size': 'reduce_bucket_size',
    'persistence_threshold': 'stage3_param_persistence_threshold',
    'max_live_parameters': 'stage3_max_live_parameters',
    'sub_group_size': 'sub_group_size',
}


@dataclass(frozen=True)
class MemoryPlan:
    """The settings that memory depends on.

    Args:
        zero_stage (int): 1 to 3.
        world_size (int): Number of ranks.
        weights (str): The dtype of the weights the model computes with: ``'fp32'``, ``'bf16'`` or ``'fp16'``.
        offload_optimizer (bool): Whether master weights and optimizer state live in host memory.
        offload_param (bool): Whether the partitions of the weights live in host memory; ZeRO 3.
        accumulation (str): The dtype in which the microbatches' gradients are added up.
        communication (str): The dtype in which gradients are reduced.
        reduce_bucket_size (int): Elements of a gradient bucket.
        overlap_comm (bool): Whether ZeRO 2 fills a second bucket while the first is reduced.
        contiguous_gradients (bool): Whether there are buckets at all.
        persistence_threshold (int): ZeRO 3 keeps parameters of at most so many elements whole.
        max_live_parameters (int): ZeRO 3 gathers at most so many elements at a time.
        sub_group_size (int): Elements that ZeRO 3 updates at a time.
        on_cpu (bool): Whether the model is trained on the CPU, where device and host memory are the same.
    """

    zero_stage: int
    world_size: int
    weights: str = 'fp32'
    offload_optimizer: bool = False
    offload_param: bool = False
    accumulation: str = 'fp32'
    communication: str = 'fp32'
    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    on_cpu: bool = False

    @classmethod
    def of_ds_config(
        cls, ds_config: Mapping[str, Any], *, world_size: int, weights: str, on_cpu: bool = False
    ) -> MemoryPlan:
        """Read the settings out of a complete ds_config; the defaults are DeepSpeed's (``zero/config.py``).

        Args:
            ds_config (Mapping[str, Any]): As in ``Plan.ds_config``.
            world_size (int): Number of ranks.
            weights (str): The dtype of the weights the model computes with.
            on_cpu (bool): Whether the model is trained on the CPU.

        Returns:
            MemoryPlan: The settings.
        """
        zero = ds_config['zero_optimization']
        sizes = {name: int(zero[key]) for name, key in _SIZES.items() if zero.get(key) is not None}
        offloaded = [(zero.get(name) or {}).get('device') == 'cpu' for name in ('offload_optimizer', 'offload_param')]
        return cls(
            zero_stage=zero['stage'],
            world_size=world_size,
            weights=weights,
            offload_optimizer=offloaded[0],
            offload_param=offloaded[1],
            accumulation=(ds_config.get('data_types') or {}).get('grad_accum_dtype') or weights,
            communication=ds_config.get('communication_data_type') or weights,
            on_cpu=on_cpu,
            overlap_comm=bool(zero.get('overlap_comm')),
            contiguous_gradients=bool(zero.get('contiguous_gradients', True)),
            **sizes,
        )
