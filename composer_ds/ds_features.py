"""What a ds_config can ask DeepSpeed for beyond ZeRO: each feature is passed on, or refused with the reason.

The features are listed in ``ds_feature_table``; here is what goes beyond a table.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from composer_ds.batches import accumulation_of
from composer_ds.clipping import clipping_of
from composer_ds.ds_feature_table import FEATURES, Feature
from composer_ds.facts import Settings, TrainerFacts, mapping
from composer_ds.precision import weights_of

__all__ = ['passed_on', 'problems_of_features', 'problems_of_features_with_trainer']

_LOG_LEVELS = ('debug', 'info', 'warning', 'error', 'critical')
_DTYPES = {
    name: short
    for short, names in {'fp32': 'fp32 float32 float', 'bf16': 'bf16 bfloat16', 'fp16': 'fp16 float16 half'}.items()
    for name in (*names.split(), *(f'torch.{name}' for name in names.split()))
}


def passed_on(settings: Settings) -> dict[str, Any]:
    """Take out of the ds_config what is handed to DeepSpeed as it is, but for the section ``zero_optimization``.

    A section that is switched off is left out: DeepSpeed takes some as switched on by their presence.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.

    Returns:
        dict[str, Any]: Top-level keys and their values.
    """
    passed = {key: settings.ds_config[key] for key in ('data_types',) if settings.ds_config.get(key)}
    for path, value, feature in _asked(settings):
        if feature.verdict == 'passes' and '.' not in path:
            passed[path] = value
    if 'steps_per_print' in passed:
        # It would print samples per second beside, and count one microbatch for each optimizer step.
        passed['timers'] = {'throughput': {'enabled': False}}
    return passed


def _asked(settings: Settings) -> Iterator[tuple[str, Any, Feature]]:
    """Walk over the features that are asked for, with the key and its value."""
    for feature in FEATURES:
        for path in feature.paths:
            *above, last = path.split('.')
            section: Mapping[str, Any] = settings.ds_config
            for key in above:
                section = mapping(section.get(key))
            if last in section and feature.asked_by(section[last]):
                yield path, section[last], feature


def problems_of_features(settings: Settings) -> Iterator[str]:
    """Find features that do not work here. Called when the plan is made.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.

    Yields:
        str: One problem each.
    """
    stage = max(1, settings.stage) if settings.stage in (0, 1, 2, 3) else None
    for path, value, feature in _asked(settings):
        if feature.verdict == 'refused':
            yield f'{_named(path, value)}: {feature.reason}; {feature.instead}'
        elif stage is not None and stage not in feature.stages:
            stages = ' and '.join(str(one) for one in feature.stages)
            yield f'{_named(path, value)}: works with ZeRO {stages} only, and this is ZeRO {stage}; leave it out'
        else:
            yield from (f'{_named(path, value)}: {problem}' for problem in _conditions(path, value, settings, stage))


def _named(path: str, value: Any) -> str:
    return f'ds_config.{path}' + ('' if isinstance(value, Mapping) else f'={reprlib.repr(value)}')


def _conditions(path: str, value: Any, settings: Settings, stage: int | None) -> Iterator[str]:
    """Say what stands against a feature that passes; ``value`` asks for it."""
    key = path.rpartition('.')[2]
    offloaded = settings.offload('offload_optimizer') == 'cpu'
    if key in ('prescale_gradients', 'gradient_predivide_factor'):
        if stage in (2, 3) and settings.zero.get('reduce_scatter') is not False:
            yield (
                f'with ZeRO {stage} DeepSpeed needs ds_config.zero_optimization.reduce_scatter=False beside it; write '
                'that, or leave this out'
            )
    elif key == 'dump_state':
        if settings.ds_config.get('log_level') not in ('info', 'debug'):
            yield (
                "DeepSpeed prints it at log level 'info', and its logger is kept at 'warning'; add 'log_level': 'info' "
                'beside it, or leave it out'
            )
    elif key == 'log_level' and value not in _LOG_LEVELS:
        yield f'allowed are {", ".join(map(repr, _LOG_LEVELS))}'
    elif key == 'ignore_unused_parameters' and not offloaded:
        yield "DeepSpeed reads it only with offload_optimizer='cpu'; leave it out"
    elif key == 'immediate_grad_update' and offloaded:
        yield 'DeepSpeed does not read it with the optimizer offloaded; leave it out'
    elif key == 'compute_grad_norm' and offloaded:
        yield "DeepSpeed needs the norm with offload_optimizer='cpu'; leave it out"
    elif key in ('memory_efficient_linear', 'flops_profiler') and _linear_is_replaced():
        effect = ', whose operations DeepSpeed counts twice' if key == 'flops_profiler' else ''
        yield (
            f'an earlier ZeRO 3 engine of this process has replaced torch.nn.functional.linear for good{effect}; start '
            'a new process, or leave it out'
        )


def _linear_is_replaced() -> bool:
    return torch.nn.functional.linear.__module__.startswith('deepspeed')


def problems_of_features_with_trainer(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    """Find features that do not go together with the Trainer.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One problem each.
    """
    weights, microbatches = weights_of(settings, facts), accumulation_of(facts)
    for path, value, _ in _asked(settings):
        if path == 'zero_optimization.zero_hpz_partition_size' and not _divides(value, facts.world_size):
            yield (
                f'{_named(path, value)}: {facts.world_size} ranks cannot be divided into groups of that size; write a '
                'number that divides them'
            )
        if path == 'flops_profiler' and microbatches not in (None, 1):
            yield (
                f'ds_config.flops_profiler: a batch has {microbatches} microbatches, and DeepSpeed counts the '
                'operations of the last one but the time of all; to profile, set device_train_microbatch_size to the '
                "batch's size"
            )
        if path == 'zero_optimization.compute_grad_norm':
            clipping, source = clipping_of(settings, facts)
            if clipping > 0:
                yield f'{_named(path, value)} and {source} disagree: clipping needs the norm; leave one of them out'
            if weights == 'bf16' and settings.stage in (0, 1):
                yield f'{_named(path, value)}: DeepSpeed needs the norm with bf16 weights and ZeRO 1; leave it out'
    data_types = mapping(settings.ds_config.get('data_types'))
    parameters, sums = (_DTYPES.get(str(data_types.get(key))) for key in ('param_dtype', 'grad_accum_dtype'))
    if parameters not in (None, weights):
        yield (
            f'ds_config.data_types.param_dtype={data_types["param_dtype"]!r} disagrees with the precision, which makes '
            f'the weights {weights}; leave it out'
        )
    if weights == 'fp32' and sums not in (None, 'fp32'):
        yield (
            f'ds_config.data_types.grad_accum_dtype={data_types["grad_accum_dtype"]!r} would round the gradients of '
            'fp32 weights; leave it out'
        )


def _divides(size: Any, ranks: int) -> bool:
    """Whether DeepSpeed can make groups of that size. It cuts what is larger than there are ranks."""
    return not isinstance(size, int) or size < 1 or ranks % min(size, ranks) == 0
