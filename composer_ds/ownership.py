"""Every setting has one owner: the Trainer's facts and the ds_config become one plan, or one error with all conflicts.

Pure functions, without torch's process groups and without DeepSpeed: they give the same answer on every rank, before
the first collective.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_ds.errors import ConfigError

__all__ = ['Plan', 'Settings', 'TrainerFacts', 'check_settings', 'make_plan']

ELEMENTWISE_OPTIMIZERS = frozenset({
    'ASGD', 'Adadelta', 'Adam', 'AdamW', 'Adamax', 'DecoupledAdamW', 'DecoupledSGDW', 'DeepSpeedCPUAdam',
    'DeepSpeedCPULion', 'FusedAdam', 'FusedLion', 'Lion', 'NAdam', 'RAdam', 'RMSprop', 'Rprop', 'SGD',
})  # fmt: skip
"""Optimizers whose update of an element depends on that element alone, so that ZeRO may flatten and cut parameters."""

PASSED_ON = frozenset({
    'communication_data_type', 'data_types', 'dump_state', 'gradient_predivide_factor', 'memory_breakdown',
    'prescale_gradients', 'steps_per_print', 'wall_clock_breakdown', 'zero_allow_untested_optimizer',
})  # fmt: skip
"""Top-level keys of a ds_config that concern nobody but DeepSpeed."""

READ_HERE = frozenset({
    'bf16', 'fp16', 'gradient_accumulation_steps', 'gradient_clipping', 'optimizer', 'scheduler', 'train_batch_size',
    'train_micro_batch_size_per_gpu', 'zero_force_ds_cpu_optimizer', 'zero_optimization',
})  # fmt: skip
"""Top-level keys of a ds_config that this module compares with the Trainer."""

PRECISIONS = {'fp32': None, 'amp_bf16': 'bf16'}
"""Composer's precisions that are supported, with the section of the ds_config that each needs."""


@dataclass(frozen=True)
class Settings:
    """What the user gave to ``DeepSpeed(...)``.

    Args:
        zero_stage (int): 0 to 3.
        offload_optimizer (str | None): ``'cpu'`` or None.
        offload_param (str | None): ``'cpu'`` or None.
        ds_config (Mapping[str, Any]): The ds_config, read.
    """

    zero_stage: int
    offload_optimizer: str | None
    offload_param: str | None
    ds_config: Mapping[str, Any]


@dataclass(frozen=True)
class TrainerFacts:
    """What the Trainer knows when the engine is built.

    Args:
        precision (str): Composer's precision, such as ``'amp_bf16'``.
        on_cpu (bool): Whether the model is trained on the CPU.
        device_train_microbatch_size (int | float | str | None): As given to the Trainer; None when not given yet.
        world_size (int): Number of ranks.
        number_of_deepspeed_algorithms (int): How often ``DeepSpeed`` stands in ``algorithms``.
        parallelism (tuple[str, ...]): Composer's other ways to shard that are on, such as ``('fsdp',)``.
        optimizer_class (str | None): Class name of the user's optimizer.
        trained_elements (int): Elements of all parameters that are trained.
        trained_without_optimizer (tuple[str, ...]): Names of trainable parameters that the optimizer does not hold.
        scalar_parameters (tuple[str, ...]): Names of parameters of shape ``()``.
    """

    precision: str
    on_cpu: bool
    device_train_microbatch_size: int | float | str | None
    world_size: int
    number_of_deepspeed_algorithms: int
    parallelism: tuple[str, ...]
    optimizer_class: str | None
    trained_elements: int
    trained_without_optimizer: tuple[str, ...]
    scalar_parameters: tuple[str, ...]


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
    problems = list(_problems_of_settings(settings))
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
    problems = [*_problems_of_settings(settings), *_problems_with_trainer(settings, facts)]
    if problems:
        raise ConfigError(problems)
    notes = []
    precision = _precision(settings, facts)
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
        offload_optimizer=_device(zero.get('offload_optimizer')) == 'cpu',
        offload_param=_device(zero.get('offload_param')) == 'cpu',
        precision=precision,
        ds_config=_complete_config(settings, facts, precision, zero),
        notes=tuple(notes),
    )


def _precision(settings: Settings, facts: TrainerFacts) -> str:
    """Return the Trainer's precision, or amp_bf16 where only the ds_config can ask for it."""
    if facts.on_cpu and facts.precision == 'fp32' and _mapping(settings.ds_config.get('bf16')).get('enabled') is True:
        return 'amp_bf16'
    return facts.precision


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
        config[section] = {**_mapping(given.get(section)), 'enabled': True}
        # DeepSpeed would add up the microbatches' gradients in 16 bits, where small ones vanish.
        config['data_types'] = {'grad_accum_dtype': 'fp32', **_mapping(config.get('data_types'))}
        if zero['stage'] == 1:
            # Stage 1 reduces once per optimizer step, and would round the sum to 16 bits for it. (Stages 2 and 3 reduce
            # the gradients of each microbatch, which are 16 bits wide anyway.)
            config.setdefault('communication_data_type', 'fp32')
    return config


def _problems_of_settings(settings: Settings) -> Iterator[str]:
    if isinstance(settings.zero_stage, bool) or settings.zero_stage not in (0, 1, 2, 3):
        yield f'zero_stage={settings.zero_stage!r}: allowed are 1, 2 and 3 (0 is run as 1)'
    for place in ('offload_optimizer', 'offload_param'):
        value = getattr(settings, place)
        if value not in (None, 'cpu'):
            yield f"{place}={value!r}: allowed are 'cpu' and None" + (
                '; NVMe offload is not supported yet' if value == 'nvme' else ''
            )
    if settings.offload_param is not None and settings.zero_stage in (0, 1, 2):
        yield (
            f'offload_param={settings.offload_param!r} with zero_stage={settings.zero_stage}: only ZeRO 3 partitions '
            'the weights, so only there can they be offloaded; write zero_stage=3, or offload_optimizer alone'
        )
    yield from _problems_of_ds_config(settings)


def _problems_of_ds_config(settings: Settings) -> Iterator[str]:
    for key in settings.ds_config:
        if key not in PASSED_ON | READ_HERE:
            near = difflib.get_close_matches(str(key), PASSED_ON | READ_HERE, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ''
            yield f'ds_config.{key}: unknown, or not supported by composer_ds yet{hint}'
    for section, instead in (('optimizer', 'optimizers'), ('scheduler', 'schedulers')):
        if settings.ds_config.get(section) not in (None, 'auto'):
            yield f'ds_config.{section}: the Trainer owns it; give Trainer({instead}=...) and leave the section out'
    zero = settings.ds_config.get('zero_optimization', {})
    if not isinstance(zero, Mapping):
        yield f'ds_config.zero_optimization={zero!r}: a mapping of settings is needed'
        return
    if zero.get('stage', settings.zero_stage) != settings.zero_stage:
        yield (
            f'DeepSpeed(zero_stage={settings.zero_stage}) and ds_config.zero_optimization.stage={zero["stage"]!r} '
            f'disagree; write zero_stage={zero["stage"]!r}, or leave the stage out of the ds_config'
        )
    for place in ('offload_optimizer', 'offload_param'):
        given, device = getattr(settings, place), _device(zero.get(place))
        if device not in ('none', 'cpu'):
            yield f"ds_config.zero_optimization.{place}.device={device!r}: only 'cpu' and 'none' are supported yet"
        elif given is not None and 'device' in _mapping(zero.get(place)) and device != given:
            yield (
                f'DeepSpeed({place}={given!r}) and ds_config.zero_optimization.{place}.device={device!r} disagree; '
                'give one of them'
            )
    if zero.get('overlap_comm') and settings.zero_stage in (0, 1):
        yield 'ds_config.zero_optimization.overlap_comm=True: works with zero_stage 2 and 3 here; leave it out'
    clipping = settings.ds_config.get('gradient_clipping', 0.0)
    if clipping != 'auto' and (isinstance(clipping, bool) or not isinstance(clipping, int | float) or clipping < 0):
        yield f'ds_config.gradient_clipping={clipping!r}: a norm of 0 (no clipping) or more is needed'


def _problems_with_trainer(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    if facts.number_of_deepspeed_algorithms > 1:
        yield f'algorithms holds {facts.number_of_deepspeed_algorithms} DeepSpeed instances; a Trainer can have one'
    for name in facts.parallelism:
        yield (
            f'Trainer(parallelism_config=...) asks for {name!r} beside DeepSpeed: both would shard the model; leave '
            'parallelism_config out, or leave DeepSpeed out'
        )
    if facts.precision not in PRECISIONS:
        reason = " (Composer's default on a GPU)" if facts.precision == 'amp_fp16' else ''
        yield (
            f"Trainer(precision='{facts.precision}'){reason} is not supported yet: allowed are "
            + ' and '.join(f"'{precision}'" for precision in PRECISIONS)
            + "; write Trainer(precision='amp_bf16')"
        )
    if facts.device_train_microbatch_size == 'auto':
        yield (
            "Trainer(device_train_microbatch_size='auto'): when memory runs out in the middle of a batch, DeepSpeed "
            'has already reduced part of its gradients and cannot start over; give a number'
        )
    if facts.optimizer_class is None:
        yield 'The Trainer has no optimizer; write Trainer(optimizers=torch.optim.AdamW(model.parameters()))'
    elif facts.optimizer_class not in ELEMENTWISE_OPTIMIZERS and not settings.ds_config.get(
        'zero_allow_untested_optimizer'
    ):
        yield (
            f'Trainer(optimizers={facts.optimizer_class}(...)): ZeRO flattens parameters and cuts them in pieces, '
            'which is right for optimizers that treat every element by itself, and silently wrong for those that need '
            f'the shape or the norm of a parameter (LAMB, LARS, Adafactor, Shampoo, Muon). Known to be right: '
            f'{", ".join(sorted(ELEMENTWISE_OPTIMIZERS))}. If yours is element-wise, too, say so with '
            "ds_config={'zero_allow_untested_optimizer': True}"
        )
    if facts.trained_without_optimizer:
        some = ', '.join(facts.trained_without_optimizer[:3])
        yield (
            f'{len(facts.trained_without_optimizer)} trainable parameters are not in the optimizer ({some}, ...); give '
            'them to it, or set requires_grad=False on them'
        )
    if facts.scalar_parameters:
        yield (
            f'{", ".join(facts.scalar_parameters)}: DeepSpeed cannot broadcast parameters of shape (); give them the '
            'shape (1,)'
        )
    yield from _precision_sections(settings, facts)
    yield from _batch_sizes(settings, facts)


def _precision_sections(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    for section in ('bf16', 'fp16'):
        enabled = _mapping(settings.ds_config.get(section)).get('enabled', 'auto')
        wanted = PRECISIONS.get(_precision(settings, facts)) == section
        if enabled != 'auto' and bool(enabled) != wanted:
            yield (
                f"Trainer(precision='{facts.precision}') and ds_config.{section}.enabled={enabled!r} disagree; the "
                "Trainer's precision decides, leave the section out"
            )


def _batch_sizes(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    given = settings.ds_config.get('train_micro_batch_size_per_gpu', 'auto')
    ours = facts.device_train_microbatch_size
    if given != 'auto' and given != ours:
        yield (
            f'Trainer(device_train_microbatch_size={ours!r}) and ds_config.train_micro_batch_size_per_gpu={given!r} '
            "disagree; Composer splits the batches, leave it out of the ds_config or write 'auto'"
        )
    for key in ('train_batch_size', 'gradient_accumulation_steps'):
        value = settings.ds_config.get(key, 'auto')
        if value != 'auto':
            yield (
                f'ds_config.{key}={value!r}: one batch of the dataloader is one optimizer step, cut in microbatches by '
                f"Trainer(device_train_microbatch_size=...); leave it out or write 'auto'"
            )


def _device(offload: Any) -> str:
    return str(_mapping(offload).get('device', 'none'))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
