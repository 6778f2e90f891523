"""What the Trainer knows, read from Composer's state, and the plan that all ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from composer.core import State
from composer.devices import DeviceCPU
from composer.utils import dist, ensure_tuple

from composer_ds.auto_values import hidden_size_of
from composer_ds.batches import problems_of_batches
from composer_ds.composer_parts import problems_of_late_surgery
from composer_ds.errors import ConfigError, TrainingError
from composer_ds.faces import ModelFace
from composer_ds.facts import Settings, TrainerFacts
from composer_ds.optimizers import problems_of_schedulers
from composer_ds.ownership import Plan, plan_of, problems_of
from composer_ds.partitions import full_numel

__all__ = ['agreed_plan', 'check_still_frozen', 'check_still_ours', 'facts_of', 'facts_of_model', 'parameters_of']


def facts_of(state: State, optimizer_from_section: bool = False) -> TrainerFacts:
    """Read what the Trainer knows. Called at ``BEFORE_LOAD`` and at ``FIT_START``.

    Collective: the ranks' batch sizes are gathered.

    Args:
        state (State): Composer's state.
        optimizer_from_section (bool): Whether its optimizer was built from the ds_config.

    Returns:
        TrainerFacts: Alike on all ranks.
    """
    optimizers = ensure_tuple(state.optimizers)
    dataloader = state.train_dataloader
    own_size = getattr(dataloader, 'batch_size', None)
    sizes = dist.all_gather_object(None if dataloader is None else (own_size,))
    return TrainerFacts(
        precision=str(state.precision.value),
        on_cpu=isinstance(state.device, DeviceCPU),
        fp16_supported=_fp16_supported(),
        world_size=dist.get_world_size(),
        batch_sizes=None if None in sizes else tuple(size[0] for size in sizes if size is not None),
        device_train_microbatch_size='auto' if state.auto_microbatching else state.device_train_microbatch_size,
        number_of_deepspeed_algorithms=sum(type(part).__name__ == 'DeepSpeed' for part in state.algorithms),
        parts=(*state.algorithms, *state.callbacks),
        parallelism=tuple(
            name for name, config in (('fsdp', state.fsdp_config), ('tp', state.tp_config)) if config is not None
        ),
        optimizer=optimizers[0] if optimizers else None,
        optimizer_from_section=optimizer_from_section,
        scheduler_classes=tuple(type(scheduler).__name__ for scheduler in state.schedulers),
        **facts_of_model(state.model, *optimizers),
    )


def facts_of_model(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Read what of the facts the model alone decides, with the optimizer that holds its parameters.

    Args:
        model (torch.nn.Module): The model.
        *optimizers (torch.optim.Optimizer): One, or none.

    Returns:
        dict[str, Any]: Fields of :class:`TrainerFacts`.
    """
    held = parameters_of(*optimizers)
    parameters = dict(model.named_parameters())
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    frozen = (name for name, p in parameters.items() if not p.requires_grad and p.is_floating_point())
    return {
        'hidden_size': hidden_size_of(model),
        'trained_elements': sum(full_numel(parameter) for parameter in trainable.values()),
        'trained_without_optimizer': tuple(name for name, parameter in trainable.items() if parameter not in held),
        'strided_parameters': tuple(name for name, parameter in parameters.items() if not parameter.is_contiguous()),
        'frozen_parameters': tuple(frozen),
        'float_buffers': tuple(name for name, buffer in model.named_buffers() if buffer.is_floating_point()),
    }


def parameters_of(*optimizers: torch.optim.Optimizer) -> set[torch.nn.Parameter]:
    """Collect the parameters that optimizers hold.

    Args:
        *optimizers (torch.optim.Optimizer): Any number.

    Returns:
        set[torch.nn.Parameter]: Of all their groups.
    """
    return {parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group['params']}


def _fp16_supported() -> bool:
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    return bool(accelerator.is_fp16_supported())


def agreed_plan(settings: Settings, facts: TrainerFacts) -> Plan:
    """Make the plan, or raise the same error on every rank.

    Collective: a conflict that one rank alone sees (its ds_config file differs, say) is told to all, so that none goes
    on and waits for it forever.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        Plan: What will be run.

    Raises:
        ConfigError: On every rank, with the problems of all ranks.
    """
    _raise_together(problems_of(settings, facts))
    return plan_of(settings, facts)


def _raise_together(problems: list[str]) -> None:
    """Raise the problems of all ranks on every rank. Collective."""
    everyones = dist.all_gather_object(problems)
    together = list(dict.fromkeys(problem for one in everyones for problem in one))
    if together:
        raise ConfigError(together)


def check_still_ours(
    state: State, plan: Plan, settings: Settings, taken: frozenset[torch.nn.Parameter]
) -> TrainerFacts:
    """Compare what ``fit`` was given, and what became of the model, with what the engine was built for.

    Collective: called at ``FIT_START``, on every rank.

    Args:
        state (State): Composer's state.
        plan (Plan): What is run.
        settings (Settings): What the user gave to ``DeepSpeed``.
        taken (frozenset[torch.nn.Parameter]): The parameters that the engine has.

    Returns:
        TrainerFacts: As they are now.

    Raises:
        ConfigError: On every rank, with the problems of all ranks.
    """
    facts = facts_of(state)
    problems = [
        *problems_of_batches(settings.ds_config, facts),
        *problems_of_late_surgery(state.model, taken),
        *problems_of_schedulers(facts),
    ]
    if state.precision.value != plan.precision:
        problems.append(
            f"fit(precision='{state.precision.value}'): the engine was built for '{plan.precision}'; give the "
            'precision to the Trainer'
        )
    if not isinstance(state.model, ModelFace):
        problems.append(
            f'state.model has become {type(state.model).__name__}; nothing may wrap or replace the model after '
            'DeepSpeed has taken it at BEFORE_LOAD'
        )
    elif 'forward' in vars(state.model):
        problems.append('Trainer(compile_config=...): compiling the engine is not supported yet; leave it out')
    _raise_together(problems)
    return facts


def check_still_frozen(frozen: Mapping[str, torch.nn.Parameter]) -> None:
    """See to it that nobody wants to train what the engine has not. Called before each batch, on every rank.

    Args:
        frozen (Mapping[str, torch.nn.Parameter]): By name, the parameters that were frozen when the engine was built.

    Raises:
        TrainingError: When one is not frozen any more.
    """
    unfrozen = [name for name, parameter in frozen.items() if parameter.requires_grad]
    if unfrozen:
        raise TrainingError(
            f'{", ".join(unfrozen)}: frozen when the Trainer was built, and so not part of the engine, but '
            'requires_grad is True now. To train a part of the model later, save a checkpoint and '
            'build a new Trainer; freezing a trained parameter is possible at any time.'
        )
