"""Every setting has one owner: the Trainer's facts and the ds_config become one plan, or one error with all conflicts.

Pure functions, without torch's process groups and without an engine: they give the same answer on every rank, before
the first collective of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from composer_ds.auto_values import LEAVE_OUT, leftover_autos, model_values, resolve_auto
from composer_ds.batches import accumulation_of, global_batch_of
from composer_ds.clipping import clipping_of
from composer_ds.conflicts import problems_of_settings, problems_with_trainer
from composer_ds.decisions import SettingDecision, decisions_of
from composer_ds.ds_features import passed_on
from composer_ds.errors import ConfigError
from composer_ds.facts import Settings, TrainerFacts, mapping
from composer_ds.optimizers import section_builds_the_optimizer, use_fused_kernel
from composer_ds.precision import complete_precision, notes_on_precision, precision_of, weights_of

__all__ = ['Plan', 'make_plan', 'plan_of', 'problems_of']


@dataclass(frozen=True)
class Plan:
    """What will be run.

    Args:
        zero_stage (int): 1 to 3.
        offload_optimizer (bool): Whether the master weights and the optimizer state live in host memory.
        offload_param (bool): Whether the weights live in host memory between uses.
        precision (str): Composer's precision.
        weights (str): The dtype that the model computes with: ``'fp32'``, ``'bf16'`` or ``'fp16'``.
        fused_adam (bool): Whether torch's fused CPU kernel runs the user's Adam.
        ds_config (dict[str, Any]): The complete config for ``deepspeed.initialize``.
        decisions (tuple[SettingDecision, ...]): Who decided what.
        notes (tuple[str, ...]): Sentences that the user should read.
    """

    zero_stage: int
    offload_optimizer: bool
    offload_param: bool
    precision: str
    weights: str
    fused_adam: bool
    ds_config: dict[str, Any]
    decisions: tuple[SettingDecision, ...]
    notes: tuple[str, ...]

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the autocast that the model runs under."""
        return {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}.get(self.precision)


def problems_of(settings: Settings, facts: TrainerFacts) -> list[str]:
    """Find everything that stands against a plan.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        list[str]: All problems.
    """
    resolved, _ = resolve_auto(settings.ds_config, _known(settings, facts))
    return [
        *problems_of_settings(settings),
        *problems_with_trainer(settings, facts),
        *leftover_autos(resolved),
    ]


def make_plan(settings: Settings, facts: TrainerFacts) -> Plan:
    """Settle who decides what, or tell everything that stands against it.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        Plan: What will be run.

    Raises:
        ConfigError: With all conflicts, each with both places and both values.
    """
    problems = problems_of(settings, facts)
    if problems:
        raise ConfigError(problems)
    return plan_of(settings, facts)


def plan_of(settings: Settings, facts: TrainerFacts) -> Plan:
    """Settle who decides what, where :func:`problems_of` has found nothing.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        Plan: What will be run.
    """
    ds_config, resolved = resolve_auto(settings.ds_config, _known(settings, facts))
    given = Settings(settings.zero_stage, settings.offload_optimizer, settings.offload_param, ds_config)
    stage = max(1, given.stage)
    zero = _zero_section(given, stage, facts)
    clipping, clipping_source = clipping_of(settings, facts)
    config = {
        **passed_on(given),
        'zero_optimization': zero,
        # Composer splits and weights; the caller of step() owns the accumulation boundary. The microbatch size serves
        # DeepSpeed's counters only.
        'managed_gradient_accumulation': False,
        'gradient_accumulation_steps': 1,
        'train_micro_batch_size_per_gpu': _whole(facts.device_train_microbatch_size),
        'gradient_clipping': clipping,
        'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False,
    }
    complete_precision(config, given, facts, stage)
    offload = {place: given.offload(place) == 'cpu' for place in ('offload_optimizer', 'offload_param')}
    return Plan(
        zero_stage=stage,
        **offload,
        precision=precision_of(settings, facts),
        weights=weights_of(settings, facts),
        fused_adam=use_fused_kernel(facts.optimizer, offload['offload_optimizer']),
        ds_config=config,
        decisions=tuple(decisions_of(settings, facts, config, resolved)),
        notes=tuple(_notes(settings, facts, resolved, clipping_source)),
    )


def _whole(microbatch_size: Any) -> int:
    return max(1, int(microbatch_size)) if isinstance(microbatch_size, int | float) else 1


def _zero_section(settings: Settings, stage: int, facts: TrainerFacts) -> dict[str, Any]:
    zero = {**settings.zero, 'stage': stage}
    for place in ('offload_optimizer', 'offload_param'):
        given = getattr(settings, place)
        if given is not None:
            zero[place] = {**mapping(zero.get(place)), 'device': given}
    if stage == 1:
        zero['overlap_comm'] = False  # needs stage 2 when the caller owns the accumulation boundary
    # DeepSpeed's default of 500 million elements reserves 2 GB however small the model.
    zero.setdefault('reduce_bucket_size', max(1, min(500_000_000, facts.trained_elements)))
    return zero


def _known(settings: Settings, facts: TrainerFacts) -> dict[str, Any]:
    """What each 'auto' of a ds_config stands for. Sizes that are not known before ``fit`` are left out."""
    weights, precision = weights_of(settings, facts), precision_of(settings, facts)
    sizes = {
        'train_micro_batch_size_per_gpu': facts.device_train_microbatch_size,
        'train_batch_size': global_batch_of(facts),
        'gradient_accumulation_steps': accumulation_of(facts),
    }
    known = {
        **{path: LEAVE_OUT if size is None else size for path, size in sizes.items()},
        'gradient_clipping': clipping_of(settings, facts)[0],
        'fp16.enabled': weights == 'fp16',
        'bf16.enabled': weights == 'bf16',
        'torch_autocast.enabled': False,
        'torch_autocast.dtype': 'bfloat16' if precision == 'amp_bf16' else LEAVE_OUT,
        'zero_optimization.stage': settings.stage,
        **model_values(facts.hidden_size, facts.trained_elements),
        **dict.fromkeys(('fp16', 'bf16', 'torch_autocast', 'optimizer', 'scheduler'), LEAVE_OUT),
    }
    return known | _known_of_optimizer(settings, facts) | _known_of_scheduler(settings, facts)


def _known_of_optimizer(settings: Settings, facts: TrainerFacts) -> dict[str, Any]:
    builds = section_builds_the_optimizer(settings, facts)
    defaults = {} if builds or facts.optimizer is None else facts.optimizer.defaults
    parameters = mapping(mapping(settings.ds_config.get('optimizer')).get('params'))
    # Where the section builds the optimizer, torch's default takes the place of an 'auto'; lr has none.
    known = {
        f'optimizer.params.{key}': defaults.get(key, LEAVE_OUT) for key in parameters if not (builds and key == 'lr')
    }
    return known | {'optimizer.type': type(facts.optimizer).__name__}


def _known_of_scheduler(settings: Settings, facts: TrainerFacts) -> dict[str, Any]:
    parameters = mapping(mapping(settings.ds_config.get('scheduler')).get('params'))
    whose = "the Trainer's schedule" if facts.number_of_schedulers else LEAVE_OUT
    return {f'scheduler.{path}': whose for path in ('type', *(f'params.{key}' for key in parameters))}


def _notes(settings: Settings, facts: TrainerFacts, resolved: dict[str, Any], clipping: str) -> list[str]:
    notes = list(notes_on_precision(settings, facts))
    if settings.stage == 0:
        notes.append(
            'zero_stage=0 partitions nothing, and DeepSpeed trains wrongly there in 16 bits; it is run as '
            'zero_stage=1, which gives the same weights with less memory.'
        )
    if resolved:
        values = ', '.join(f'{path} = {value!r}' for path, value in resolved.items())
        notes.append(f"'auto' in the ds_config stands for: {values}.")
    if facts.optimizer_from_section:
        defaults = facts.optimizer.defaults
        arguments = ', '.join(f'{key}={value!r}' for key, value in defaults.items() if value is not None)
        notes.append(
            'The Trainer was given no optimizer: the section optimizer of the ds_config is built, '
            f'torch.optim.{type(facts.optimizer).__name__}({arguments}).'
        )
    if clipping.startswith('GradientClipping'):
        notes.append(f'{clipping} is done by DeepSpeed, as gradient_clipping; the algorithm itself does not run.')
    return notes
