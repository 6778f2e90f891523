"""Who decided what: the plan as a table, for ``composer-ds check`` and for people who wonder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_ds.batches import accumulation_of, global_batch_of
from composer_ds.clipping import clipping_of
from composer_ds.facts import Settings, TrainerFacts, mapping
from composer_ds.precision import precision_of, weights_of

__all__ = ['SettingDecision', 'decisions_of']


@dataclass(frozen=True)
class SettingDecision:
    """One line of the plan.

    Args:
        setting (str): What is decided, such as ``'gradient clipping'``.
        value (Any): What will be run.
        owner (str): Who decides it: ``'Trainer'``, ``'DeepSpeed'`` (the algorithm's arguments and its ds_config),
            ``'launcher'`` or ``'composer_ds'``.
        source (str): Where the value comes from: an argument, a path in the ds_config, a default.
    """

    setting: str
    value: Any
    owner: str
    source: str


def decisions_of(
    settings: Settings, facts: TrainerFacts, config: Mapping[str, Any], resolved: Mapping[str, Any]
) -> Iterator[SettingDecision]:
    """List every setting of a plan with its owner.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.
        config (Mapping[str, Any]): The complete config for DeepSpeed.
        resolved (Mapping[str, Any]): By path, what each 'auto' of the ds_config stands for.

    Yields:
        SettingDecision: One for each setting.
    """
    yield _zero_stage(settings, config)
    for place in ('offload_optimizer', 'offload_param'):
        if getattr(settings, place) is not None:
            source = f'{place}={getattr(settings, place)!r}'
        else:
            path = f'ds_config.zero_optimization.{place}'
            source = path if mapping(settings.zero.get(place)) else 'nobody asked'
        yield SettingDecision(place.replace('_', ' '), settings.offload(place), 'DeepSpeed', source)
    yield from _precision(settings, facts, config)
    clipping, source = clipping_of(settings, facts)
    yield SettingDecision('gradient clipping', f'norm {clipping}' if clipping else 'none', 'DeepSpeed', source)
    if facts.optimizer is not None:
        source = 'ds_config.optimizer' if facts.optimizer_from_section else 'optimizers='
        yield SettingDecision('optimizer', type(facts.optimizer).__name__, 'Trainer', source)
    schedule = f'{facts.number_of_schedulers} of the Trainer' if facts.number_of_schedulers else 'constant'
    yield SettingDecision('learning-rate schedule', schedule, 'Trainer', 'schedulers=')
    yield from _batches(facts)
    yield from _rest(settings, config, resolved)


def _zero_stage(settings: Settings, config: Mapping[str, Any]) -> SettingDecision:
    if settings.zero_stage is not None:
        source = f'zero_stage={settings.zero_stage}'
    elif settings.zero.get('stage', 'auto') != 'auto':
        source = 'ds_config.zero_optimization.stage'
    else:
        source = 'default'
    return SettingDecision('ZeRO stage', config['zero_optimization']['stage'], 'DeepSpeed', source)


def _precision(settings: Settings, facts: TrainerFacts, config: Mapping[str, Any]) -> Iterator[SettingDecision]:
    precision, weights = precision_of(settings, facts), weights_of(settings, facts)
    source = 'precision=' if precision == facts.precision else 'ds_config, because Composer has fp32 only on a CPU'
    yield SettingDecision('precision', precision, 'Trainer', source)
    yield SettingDecision('weights', f'{weights}, master weights fp32', 'Trainer', 'precision=')
    if weights != 'fp32':
        given = 'grad_accum_dtype' in mapping(settings.ds_config.get('data_types'))
        yield SettingDecision(
            'gradients added up in',
            config['data_types']['grad_accum_dtype'],
            'DeepSpeed',
            'ds_config.data_types.grad_accum_dtype' if given else 'default of composer_ds',
        )


def _batches(facts: TrainerFacts) -> Iterator[SettingDecision]:
    yield SettingDecision('world size', facts.world_size, 'launcher', 'composer -n')
    yield SettingDecision('microbatch', facts.device_train_microbatch_size, 'Trainer', 'device_train_microbatch_size=')
    source = 'the batch of the dataloader'
    yield SettingDecision('accumulation', accumulation_of(facts), 'Trainer', f'{source} / microbatch')
    yield SettingDecision('global batch', global_batch_of(facts), 'Trainer', f'{source} x world size')


_TOLD_ABOVE = {'stage', 'offload_optimizer', 'offload_param'}
_SECTIONS = ('bf16', 'fp16', 'torch_autocast', 'data_types')
_OURS = {
    'managed_gradient_accumulation', 'gradient_accumulation_steps', 'train_micro_batch_size_per_gpu',
    'gradient_clipping', 'zero_allow_untested_optimizer', 'zero_force_ds_cpu_optimizer',
}  # fmt: skip


def _rest(settings: Settings, config: Mapping[str, Any], resolved: Mapping[str, Any]) -> Iterator[SettingDecision]:
    """Everything else that is handed to DeepSpeed, by its path."""
    for key, value in config.items():
        if key in _OURS:
            continue
        leaves = value.items() if isinstance(value, Mapping) else [('', value)]
        for name, leaf in leaves:
            if key == 'zero_optimization' and name in _TOLD_ABOVE:
                continue
            path = f'{key}.{name}' if name else key
            given = settings.ds_config.get(key) if not name else mapping(settings.ds_config.get(key)).get(name)
            if path in resolved:
                source = f"ds_config.{path} = 'auto'"
            elif given is not None:
                source = f'ds_config.{path}'
            elif key in _SECTIONS:
                source = 'precision='
            else:
                source = 'default of composer_ds'
            yield SettingDecision(path, leaf, 'DeepSpeed' if given is not None else 'composer_ds', source)
