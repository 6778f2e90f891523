"""Parameters that are cut over the ranks before there is an engine: cutting them, and handing them to the engine.

:func:`~composer_ds.partitioned_init` cuts them with ``deepspeed.zero.Init``; from then on a parameter is an empty
tensor with this rank's part beside it, ``parameter.ds_tensor``. It is *waiting* from there until the engine takes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from composer_ds.deepspeed_output import quiet_output, quieten_logger
from composer_ds.errors import ConfigError
from composer_ds.facts import offload_device
from composer_ds.scalars import scalars_as_vectors
from composer_ds.whole import WAITING, is_waiting, lift_guards, whole_again

if TYPE_CHECKING:
    from composer_ds.ownership import Plan
    from composer_ds.partitions import Partitions

__all__ = [
    'PARTITION_SETTINGS',
    'check_waiting',
    'cut',
    'hand_over',
    'restore_runs',
    'storage_of',
    'uncut',
    'waiting_behind',
]

PARTITION_SETTINGS = ('use_all_reduce_for_fetch_params', 'allgather_sequential', 'enable_sanity_checks')
"""Keys of ``zero_optimization`` that a partition keeps from its construction; the engine does not set them again."""

_EMPTY_STORAGES: weakref.WeakValueDictionary[int, torch.nn.Parameter] = weakref.WeakValueDictionary()
"""The parameters that wait, by the address of the empty storage that each has meanwhile."""


@dataclass(frozen=True)
class Waiting:
    """What a parameter remembers while it waits for an engine.

    Args:
        zero (Mapping[str, Any]): The section ``zero_optimization`` it was cut with.
        device (torch.device): Where the whole parameter was.
        version (int): Of the empty tensor, which moves when somebody writes into it.
        part_version (int): Of this rank's part, which moves when ``deepspeed.zero.GatheredParameters`` writes it.
    """

    zero: Mapping[str, Any]
    device: torch.device
    version: int
    part_version: int


def cut(parameters: Iterable[torch.nn.Parameter], zero: Mapping[str, Any]) -> None:
    """Cut whole parameters over the ranks; rank 0's values are taken.

    Collective: every rank cuts the same parameters in the same order.

    Args:
        parameters (Iterable[torch.nn.Parameter]): Whole and not on the meta device.
        zero (Mapping[str, Any]): ``offload_param`` and the keys of ``PARTITION_SETTINGS``, where they are given.
    """
    quieten_logger({})
    holder, devices = torch.nn.Module(), {}
    for index, parameter in enumerate(parameters):
        holder.register_parameter(str(index), parameter)
        devices[parameter] = parameter.device
    # The engine's own settings say later whether torch.nn.functional.linear is replaced: see hand_over.
    section = {**zero, 'stage': 3, 'memory_efficient_linear': False}
    config = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': section}
    with quiet_output(), scalars_as_vectors(devices, 3):
        import deepspeed

        deepspeed.zero.Init(module=holder, config_dict_or_path=config, dtype=torch.float32)
    for parameter, device in devices.items():
        waiting = Waiting(dict(zero), device, parameter._version, parameter.ds_tensor._version)  # pyright: ignore
        setattr(parameter, WAITING, waiting)
        _EMPTY_STORAGES[storage_of(parameter)] = parameter


def uncut(parameter: torch.nn.Parameter) -> None:
    """Make a waiting parameter whole again, on the device where it was, as if it had never been cut.

    Collective.

    Args:
        parameter (torch.nn.Parameter): Waiting for an engine.
    """
    device = getattr(parameter, WAITING).device
    _EMPTY_STORAGES.pop(storage_of(parameter), None)
    whole_again(parameter)
    parameter.data = parameter.data.to(device)


def waiting_behind(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """Find the waiting parameter of which a tensor is a view that torch has told nobody about.

    ``torch.nn.Parameter(other.weight)`` is the one known case: it does not go through ``__torch_function__``.

    Args:
        tensor (torch.Tensor): Any tensor with a storage.

    Returns:
        torch.nn.Parameter | None: None for most tensors.
    """
    found = _EMPTY_STORAGES.get(storage_of(tensor))
    return found if found is not None and is_waiting(found) and storage_of(found) == storage_of(tensor) else None


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address by which torch (2.7, privately) knows the storage of a tensor.

    Args:
        tensor (torch.Tensor): Any tensor with a storage.

    Returns:
        int: Alike for all views of it.
    """
    return tensor.untyped_storage()._cdata


def check_waiting(model: torch.nn.Module, plan: Plan, building: bool) -> None:
    """Compare how a model was built with what is to be run. Called at ``BEFORE_LOAD``, before the engine is built.

    Every rank comes to the same result, because all have built the same model.

    Args:
        model (torch.nn.Module): The user's model.
        plan (Plan): What will be run.
        building (bool): Whether this runs inside of ``partitioned_init``.

    Raises:
        ConfigError: With all that stands against it.
    """
    if building:
        raise ConfigError('Trainer(...) inside of partitioned_init: leave the context before you build the Trainer.')
    problems = _problems_of_waiting(model, plan)
    if problems:
        raise ConfigError(problems)


def _problems_of_waiting(model: torch.nn.Module, plan: Plan) -> list[str]:
    cut_ones: dict[str, Any] = {name: p for name, p in model.named_parameters() if hasattr(p, 'ds_tensor')}
    if not cut_ones:
        return []
    if plan.zero_stage != 3:
        return [
            f'zero_stage={plan.zero_stage}: the model was built already partitioned, which only ZeRO 3 can train. '
            'Give DeepSpeed zero_stage=3, or call composer_ds.make_whole(model) on every rank.'
        ]
    problems = []
    remembered = {name: getattr(p, WAITING) for name, p in cut_ones.items() if is_waiting(p)}
    section = plan.ds_config['zero_optimization']
    for waiting in remembered.values():
        problems += _disagreements(waiting.zero, section)
    lost = [name for name, waiting in remembered.items() if _was_written_to(cut_ones[name], waiting)]
    if lost:
        problems.append(
            f'{", ".join(lost)}: written to after partitioned_init had cut it over the ranks. Only an empty tensor was '
            'there to write to, so the values are lost. Write inside of a "with composer_ds.partitioned_init(...)"; a '
            'second one, after the model was built, will do.'
        )
    if remembered and section.get('zero_hpz_partition_size', 1) > 1:
        problems.append(
            'ds_config.zero_optimization.zero_hpz_partition_size: its second copy of the weights cannot be made for a '
            'model that was built partitioned; leave it out, or build the model without partitioned_init.'
        )
    return list(dict.fromkeys(problems))


def _disagreements(built: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    mine, theirs = (offload_device(section.get('offload_param')) for section in (built, run))
    problems = []
    if mine != theirs:
        problems.append(
            f'offload_param: the model was built with partitioned_init(offload_param={_said(mine)}), DeepSpeed has '
            f'offload_param={_said(theirs)}. Give both the same.'
        )
    for key in PARTITION_SETTINGS:
        if built.get(key, False) != run.get(key, False):
            problems.append(
                f'ds_config.zero_optimization.{key}: partitioned_init has {built.get(key, False)!r}, DeepSpeed has '
                f'{run.get(key, False)!r}. Give both the same ds_config.'
            )
    return problems


def _said(device: str) -> str:
    return 'None' if device == 'none' else repr(device)


def _was_written_to(parameter: Any, waiting: Waiting) -> bool:
    if parameter.ds_tensor._version != waiting.part_version:
        return False  # inside deepspeed.zero.GatheredParameters, then, which keeps what is written
    return parameter.numel() > 0 or parameter._version != waiting.version


def hand_over(model: torch.nn.Module, plan: Plan) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Prepare a model built by ``partitioned_init`` for the engine. Called at ``BEFORE_LOAD``; nothing to any other.

    Collective: parameters that were added whole since are cut, too. In 16 bits the parts are rounded here, because
    the engine leaves a model that was built partitioned as it is.

    Args:
        model (torch.nn.Module): The user's model.
        plan (Plan): What will be run.

    Returns:
        dict[torch.nn.Parameter, torch.Tensor]: For each trained parameter that is rounded this rank's part of before,
        fp32, on the CPU; shape ``(ceil(numel / world_size),)``.
    """
    import deepspeed

    parameters: list[Any] = list(model.parameters())
    waiting = next((getattr(p, WAITING) for p in parameters if is_waiting(p)), None)
    if waiting is None:
        return {}
    lift_guards(model)
    cut([p for p in parameters if not hasattr(p, 'ds_tensor')], waiting.zero)
    # A model that is already cut keeps DeepSpeed (0.19) from looking at this one setting.
    linear = plan.ds_config['zero_optimization'].get('memory_efficient_linear', True)
    deepspeed.zero.Init(module=torch.nn.Module(), mem_efficient_linear=linear, dtype=torch.float32)
    dtype = {'bf16': torch.bfloat16, 'fp16': torch.float16}.get(plan.weights)
    before = {}
    for parameter in parameters:
        if is_waiting(parameter):
            delattr(parameter, WAITING)
        part = parameter.ds_tensor
        if dtype is not None and part.is_floating_point():
            if parameter.requires_grad:
                before[parameter] = part.to('cpu', torch.float32, copy=True)
            rounded = part.data.to(dtype)
            part.data = rounded.pin_memory() if part.is_pinned() else rounded
            parameter.data = parameter.data.to(dtype)
    return before


def restore_runs(partitions: Partitions, before: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
    """Write the weights of before the rounding into the fp32 master weights. Called right after the engine is built.

    Collective. Each rank owns the same run of a parameter as it did before, so nothing is sent.

    Args:
        partitions (Partitions): Of the engine.
        before (Mapping[torch.nn.Parameter, torch.Tensor]): From :func:`hand_over`.
    """
    if not before:
        return
    with partitions.writing_masters():
        for parameter, part in before.items():
            fragment = partitions.fragment(partitions.names.get(parameter, ''))
            if fragment is not None:
                assert fragment.start == dist.get_rank() * part.numel(), fragment.name
                fragment.master.copy_(part[: fragment.numel])
