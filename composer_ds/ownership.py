"""Every setting has one owner: the Trainer's facts and the ds_config become one plan, or one error with all conflicts.

Pure functions, without torch's process groups and without DeepSpeed: they give the same answer on every rank, before
the first collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from composer_ds.conflicts import PASSED_ON, problems_of_settings, problems_with_trainer
from composer_ds.errors import ConfigError
from composer_ds.facts import PRECISIONS, Settings, TrainerFacts, mapping, offload_device, precision_of

__all__ = ['Plan', 'check_settings', 'make_plan']


@dataclass(frozen=True)
class Plan:
    """What will be run.

    Args:
        zero_stage (int): 1 to 3.
        offload_optimizer (bool): Whether the master weights and the optimizer state live in host memory.
        offload_param (bool): Whether the weights live in host memory between uses.
        precision (str): Composer's precision.
        ds_config (dict[str, Any]): The complete config for ``deepspeed.initialize``.
        notes (tuple[str, ...]): Sentences that the user should read.
    """

    zero_stage: int
    offload_optimizer: bool
    offload_param: bool
    precision: str
    ds_config: dict[str, Any]
    notes: tuple[str, ...]


def check_settings(settings: Settings) -> None:
    """Check what can be checked without a Trainer. Called when ``DeepSpeed`` is constructed.

    Args:
        settings (Settings): What the user gave.

    Raises:
        ConfigError: With all problems.
    """
    problems = list(problems_of_settings(settings))
    if problems:
        raise ConfigError(problems)


def make_plan(settings: Settings, facts: TrainerFacts) -> Plan:
    """Settle who decides what. Called at ``INIT``, on every rank, with the same answer.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        Plan: What will be run.

    Raises:
        ConfigError: With all conflicts, each with both places and both values.
    """
    problems = [*problems_of_settings(settings), *problems_with_trainer(settings, facts)]
    if problems:
        raise ConfigError(problems)
    notes = []
    precision = precision_of(settings, facts)
    if precision != facts.precision:
        notes.append('ds_config.bf16 is enabled: on CPU, where Composer has no amp_bf16, it sets the precision.')
    stage = settings.zero_stage
    if stage == 0:
        stage = 1
        notes.append(
            'zero_stage=0 partitions nothing, and DeepSpeed trains wrongly there in 16 bits; it is run as '
            'zero_stage=1, which gives the same weights with less memory.'
        )
    zero = dict(settings.ds_config.get('zero_optimization', {}))
    zero['stage'] = stage
    for place, given in (('offload_optimizer', settings.offload_optimizer), ('offload_param', settings.offload_param)):
        if given is not None:
            zero[place] = {**(zero.get(place) or {}), 'device': given}
    if stage == 1:
        zero['overlap_comm'] = False  # needs stage 2 when the caller owns the accumulation boundary
    # DeepSpeed's default of 500 million elements reserves 2 GB however small the model.
    zero.setdefault('reduce_bucket_size', max(1, min(500_000_000, facts.trained_elements)))
    return Plan(
        zero_stage=stage,
        offload_optimizer=offload_device(zero.get('offload_optimizer')) == 'cpu',
        offload_param=offload_device(zero.get('offload_param')) == 'cpu',
        precision=precision,
        ds_config=_complete_config(settings, facts, precision, zero),
        notes=tuple(notes),
    )


def _complete_config(settings: Settings, facts: TrainerFacts, precision: str, zero: dict[str, Any]) -> dict[str, Any]:
    given = settings.ds_config
    config = {key: value for key, value in given.items() if key in PASSED_ON}
    clipping = given.get('gradient_clipping', 0.0)
    microbatch_size = facts.device_train_microbatch_size
    config |= {
        'zero_optimization': zero,
        # Composer splits and weights; the caller of step() owns the accumulation boundary. The microbatch size serves
        # DeepSpeed's counters only.
        'managed_gradient_accumulation': False,
        'gradient_accumulation_steps': 1,
        'train_micro_batch_size_per_gpu': max(1, int(microbatch_size))
        if isinstance(microbatch_size, int | float)
        else 1,
        # DeepSpeed >= 0.19.3 clips at 1.0 when nobody asked.
        'gradient_clipping': 0.0 if clipping == 'auto' else clipping,
        'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False,
    }
    section = PRECISIONS[precision]
    if section is not None:
        config[section] = {**mapping(given.get(section)), 'enabled': True}
        # DeepSpeed would add up the microbatches' gradients in 16 bits, where small ones vanish.
        config['data_types'] = {'grad_accum_dtype': 'fp32', **mapping(config.get('data_types'))}
        if zero['stage'] == 1:
            # Stage 1 reduces once per optimizer step, and would round the sum to 16 bits for it. (Stages 2 and 3 reduce
            # the gradients of each microbatch, which are 16 bits wide anyway.)
            config.setdefault('communication_data_type', 'fp32')
    return config
