"""How many bytes each rank will hold: weights, gradients, optimizer state, offload and communication buffers.

Activations, and what the allocator loses to fragments, are not counted.

The ZeRO paper (arXiv:1910.02054, section 3.1) counts 2Ψ + 2Ψ + KΨ bytes for the 16-bit weights, the 16-bit gradients
and the optimizer state of Ψ parameters, and divides by the world size what a stage partitions. DeepSpeed allocates
more: copies of a gradient bucket while it is reduced, gradients that are added up in fp32, mirrors in host memory. What
exists at the same time is written out here for the two moments at which a rank is fullest:

- *reduction*: the last microbatch's backward pass, while a bucket of gradients is reduced over the ranks;
- *optimizer step*: while the optimizer updates one flat partition.

Names such as ``stage_1_and_2.py:setup_buckets`` are files and functions of ``deepspeed/runtime`` (0.19.8), where the
allocation is made. DeepSpeed's own ``estimate_zero2_model_states_mem_needs`` is a rule of thumb for Adam in 16 bits,
far from what is allocated. ``tests/distributed/test_memory.py`` compares this module with real engines: it is within
2% where a bucket holds the largest parameter. A parameter that is larger than a bucket makes it some 5% too low.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from composer_ds.memory_plan import MemoryPlan
from composer_ds.model_sizes import GroupSizes, ModelSizes

__all__ = ['Moment', 'RankMemory', 'rank_memory']

_FP32 = 4
_BYTES = {'fp32': 4, 'bf16': 2, 'bfp16': 2, 'fp16': 2}
# _reduce_non_expert_gradients of engine.py: elements_per_buffer.
_BF16_OPTIMIZER_BUFFER = 500_000_000


@dataclass(frozen=True)
class Moment:
    """What exists at the same time, in bytes by kind: ``weights``, ``gradients``, ``optimizer``, ``buffers``.

    ``weights`` includes frozen ones and the model's buffers; ``optimizer`` is the fp32 master weights and the
    optimizer's state; ``buffers`` are those of communication and offload.

    Args:
        device (dict[str, int]): In the memory of the rank's device.
        host (dict[str, int]): In host memory, for this rank.
    """

    device: dict[str, int]
    host: dict[str, int]


@dataclass(frozen=True)
class RankMemory:
    """What the fullest rank holds at its fullest moments.

    Args:
        reduction (Moment): While a bucket of gradients is reduced.
        optimizer_step (Moment): While a flat partition is updated.
        gathered_bytes (int): What ZeRO 3 gathers besides, at most, while it computes: an upper bound that is reached
            only by models that use their weights in ever new orders. Not part of the moments.
    """

    reduction: Moment
    optimizer_step: Moment
    gathered_bytes: int = 0

    @property
    def device(self) -> dict[str, int]:
        """Device memory by kind, at the moment at which it is fullest."""
        return max((self.reduction.device, self.optimizer_step.device), key=lambda kinds: sum(kinds.values()))

    @property
    def host(self) -> dict[str, int]:
        """Host memory by kind, at the moment at which it is fullest."""
        return max((self.reduction.host, self.optimizer_step.host), key=lambda kinds: sum(kinds.values()))

    @property
    def device_bytes(self) -> int:
        """Device memory at its fullest."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Host memory at its fullest."""
        return sum(self.host.values())

    @property
    def total_bytes(self) -> int:
        """Both together at the fullest moment: what a process on a CPU holds."""
        moments = (self.reduction, self.optimizer_step)
        return max(sum(moment.device.values()) + sum(moment.host.values()) for moment in moments)


def rank_memory(model: ModelSizes, plan: MemoryPlan) -> RankMemory:
    """Predict the memory of a rank that adds up several microbatches for each optimizer step.

    Args:
        model (ModelSizes): Sizes of the parameters.
        plan (MemoryPlan): The settings.

    Returns:
        RankMemory: Of the fullest rank.
    """
    if plan.zero_stage == 3:
        return _stage_3(model, plan)
    if plan.zero_stage == 1 and plan.weights == 'bf16' and plan.accumulation == 'fp32' and not plan.offload_optimizer:
        return _bf16_optimizer(model, plan)
    return _stage_1_or_2(model, plan)


def _stage_1_or_2(model: ModelSizes, plan: MemoryPlan) -> RankMemory:
    """``stage_1_and_2.py:DeepSpeedZeroOptimizer``: each group's weights are one padded vector, cut into partitions."""
    weight, accumulated = _BYTES[plan.weights], _BYTES[plan.accumulation]
    widened = accumulated != weight  # gradients are added up in another dtype than they are computed in
    several_ranks = plan.world_size > 1
    partitions = [_flat_partition(group, plan.world_size) for group in model.groups]
    partition, trained = sum(partitions), model.trained
    overlapping = _largest_overlap(model, plan.world_size)
    bucket = plan.reduce_bucket_size if plan.contiguous_gradients or plan.offload_optimizer else 0
    buckets = bucket * (2 if plan.overlap_comm and plan.zero_stage == 2 else 1)
    # What is reduced at once, and what of it lies in the bucket: a parameter larger than the bucket passes it by.
    largest = max(model.trained_numels)
    reduced = max(largest, min(plan.reduce_bucket_size, trained))
    inside, beside = (reduced, 0) if largest <= plan.reduce_bucket_size else (0, largest)

    # allreduce_bucket: a further copy where gradients travel in another dtype than they are kept in.
    kept_in = plan.accumulation if widened and plan.zero_stage == 1 else plan.weights
    converted = reduced * _BYTES[plan.communication] if kept_in != plan.communication else 0

    # In bytes: gradients on the device, buffers on the device, gradients in host memory.
    in_host = 0
    if plan.zero_stage == 1 and widened:
        # param.grad_accum of all parameters, of which the bucket's are views into it; the flattened copy that is
        # reduced (average_tensor); the partition that the sum is added to (_build_compact_grad_partition_buffer).
        reduction = (trained - inside + partition) * accumulated, (bucket + reduced) * accumulated
        step = (trained + partition) * accumulated
    elif plan.zero_stage == 1:
        # param.grad of all parameters and the bucket, which takes them up one by one; then the copy that is reduced, or
        # whole parameters of this partition (copy_grads_in_partition).
        kept = 0 if plan.offload_optimizer else overlapping
        then = max(kept, reduced if several_ranks else 0)
        reduction = max(trained * weight, (trained - inside + then) * weight + converted), bucket * weight
        step = kept * weight
    elif widened:
        reduction = (partition * accumulated + beside * weight), (buckets + reduced) * weight
        step = partition * accumulated
    else:
        # Whole parameters of this partition: the sum of the microbatches before (all_grad_tensors, or with offload
        # accumulated_grads_in_cpu), and the reduced ones of this microbatch, which begin with the first bucket.
        copy = reduced if several_ranks else 0
        if plan.offload_optimizer:
            reduction = beside * weight, (buckets + copy) * weight
        elif plan.reduce_bucket_size < trained:
            reduction = (2 * overlapping + beside) * weight, (buckets + copy) * weight
        else:
            reduction = overlapping * weight, (buckets + max(copy, overlapping)) * weight
        step = 0 if plan.offload_optimizer else overlapping * weight
        in_host = overlapping * weight if plan.offload_optimizer else 0

    if plan.zero_stage == 2 or widened:
        reduction = reduction[0], reduction[1] + converted
    weights = partition * plan.world_size * weight + model.frozen * weight + model.buffer_bytes
    optimizer = _optimizer_bytes(model, partitions)
    if not plan.offload_optimizer:
        if not widened:  # step: the partition is flattened, and converted to fp32 where it is not
            step += max(partitions) * (_FP32 if weight == _FP32 else _FP32 + weight)
        return RankMemory(
            Moment(_kinds(weights, reduction[0], optimizer, reduction[1]), _kinds()),
            Moment(_kinds(weights, step, optimizer), _kinds()),
        )
    # temp_grad_buffer_for_gpu_offload and for_cpu_offload; param_buffer_of_bit16_for_cpu_offload_groups; and the fp32
    # gradient for the optimizer (initialize_optimizer_states)
    one = largest * weight
    host = _kinds(0, partition * _FP32 + in_host, optimizer, partition * weight + one)
    return RankMemory(
        Moment(_kinds(weights, reduction[0], 0, reduction[1] + one), host),
        Moment(_kinds(weights, step, 0, one), host),
    )


def _bf16_optimizer(model: ModelSizes, plan: MemoryPlan) -> RankMemory:
    """``bf16_optimizer.py:BF16_Optimizer``, which keeps the fp32 gradients of all parameters, whole, on every rank."""
    weight = _BYTES['bf16']
    partitions = [_flat_partition(group, plan.world_size) for group in model.groups]
    flats = [numel * plan.world_size for numel in partitions]
    weights = sum(flats) * weight + model.frozen * weight + model.buffer_bytes
    gradients = sum(flats) * _FP32 + model.trained * weight
    optimizer = _optimizer_bytes(model, partitions)
    # engine.py:allreduce_no_retain: groups are flattened together until there are enough elements; one alone is not.
    copies, together = [0], []
    for flat in flats:
        together.append(flat)
        if len(together) > 1:
            copies.append(sum(together))
        if sum(together) > _BF16_OPTIMIZER_BUFFER:
            together = []
    return RankMemory(
        Moment(_kinds(weights, gradients, optimizer, max(copies) * _FP32), _kinds()),
        Moment(_kinds(weights, gradients, optimizer), _kinds()),
    )


def _stage_3(model: ModelSizes, plan: MemoryPlan) -> RankMemory:
    """``stage3.py:DeepSpeedZeroOptimizer_Stage3``: each parameter is cut, and padded, by itself."""
    weight, accumulated = _BYTES[plan.weights], _BYTES[plan.accumulation]
    communicated = _BYTES[plan.communication]

    def cut(numels: tuple[int, ...]) -> int:
        return sum(math.ceil(numel / plan.world_size) for numel in numels)

    partitions = [cut(group.numels) for group in model.groups]
    partition = sum(partitions)
    numels = model.trained_numels + model.frozen_numels
    kept_whole = sum(numel for numel in numels if numel <= plan.persistence_threshold)  # mark_persistent_parameters
    # On one rank the whole parameter is its partition, where that lies on the device.
    is_gathered = plan.world_size > 1 or (plan.offload_param and not plan.on_cpu)
    cut_weights = (partition + cut(model.frozen_numels)) * weight
    whole_weights = kept_whole * weight * is_gathered + model.buffer_bytes
    optimizer = _optimizer_bytes(model, partitions)
    gradients = partition * accumulated  # grad_partitions_flat_buffer
    bucket = plan.reduce_bucket_size * communicated if plan.contiguous_gradients else 0
    # coalesced_collectives.py:reduce_scatter_coalesced puts the partitions of a bucket in another order.
    largest = max(model.trained_numels)
    copy = min(plan.reduce_bucket_size, model.trained) * communicated
    if largest > plan.reduce_bucket_size:  # reduced by itself, beside the bucket
        copy = 2 * largest * communicated

    # The parameter whose gradient fills the bucket is whole at that time.
    in_use = max((numel for numel in numels if numel > plan.persistence_threshold), default=0) * weight * is_gathered

    on_device = whole_weights + (0 if plan.offload_param else cut_weights)
    in_host = cut_weights if plan.offload_param else 0
    if plan.offload_optimizer:
        # initialize_optimizer_states: an fp32 gradient for the optimizer besides.
        host = _kinds(in_host, gradients + partition * _FP32, optimizer)
        reduction = Moment(_kinds(on_device + in_use, 0, 0, bucket + copy), host)
        step = Moment(_kinds(on_device, 0, 0, bucket), host)
    else:
        flattened = max(_sub_groups(model, plan)) * _FP32  # _prepare_fp32_grad_for_sub_group
        host = _kinds(in_host)
        reduction = Moment(_kinds(on_device + in_use, gradients, optimizer, bucket + copy), host)
        step = Moment(_kinds(on_device, gradients + flattened, optimizer, bucket), host)
    gathered = min(plan.max_live_parameters, sum(numels) - kept_whole) * weight * is_gathered
    return RankMemory(reduction, step, gathered)


def _kinds(weights: int = 0, gradients: int = 0, optimizer: int = 0, buffers: int = 0) -> dict[str, int]:
    return {'weights': weights, 'gradients': gradients, 'optimizer': optimizer, 'buffers': buffers}


def _flat_partition(group: GroupSizes, world_size: int) -> int:
    """Elements of one rank's part of a group: the whole is padded to two elements for each rank, for NCCL."""
    return 2 * math.ceil(sum(group.numels) / (2 * world_size))


def _optimizer_bytes(model: ModelSizes, partitions: list[int]) -> int:
    """The fp32 master weights and the optimizer's state."""
    return sum(
        numel * (_FP32 + group.state_bytes_per_element) for numel, group in zip(partitions, model.groups, strict=True)
    )


def _largest_overlap(model: ModelSizes, world_size: int) -> int:
    """Elements of the parameters of which a part lies in a rank's partitions, whole, on the rank with most of them."""
    of_ranks = [0] * world_size
    for group in model.groups:
        partition, start = _flat_partition(group, world_size), 0
        for numel in group.numels:
            if numel:
                for rank in range(start // partition, (start + numel - 1) // partition + 1):
                    of_ranks[rank] += numel
            start += numel
    return max(of_ranks)


def _sub_groups(model: ModelSizes, plan: MemoryPlan) -> list[int]:
    """Elements of this rank's part of each sub-group (``stage3.py:_create_fp16_sub_groups``)."""
    sub_groups = []
    for group in model.groups:
        elements = 0
        for numel in group.numels:
            elements += math.ceil(numel / plan.world_size)
            if elements >= plan.sub_group_size:
                sub_groups.append(elements)
                elements = 0
        sub_groups.append(elements)
    return sub_groups
