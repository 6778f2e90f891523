"""Settings that are wrong or disagree: every function yields one sentence for each problem.

Nothing wins silently: two sources that disagree are named with both places and both values. Each subject has a module
of its own (``batches``, ``precision``, ``clipping``, ``optimizers``, ``composer_parts``, ``ds_keys``,
``ds_features``); here they come together, with what remains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from composer_ds.batches import problems_of_batches
from composer_ds.clipping import problems_of_clipping, problems_of_clipping_value
from composer_ds.composer_parts import problems_of_parts
from composer_ds.ds_features import problems_of_features, problems_of_features_with_trainer
from composer_ds.ds_keys import problems_of_keys
from composer_ds.facts import Settings, TrainerFacts, mapping, offload_device
from composer_ds.optimizers import problems_of_optimizer, problems_of_scheduler
from composer_ds.precision import problems_of_precision

__all__ = ['problems_of_settings', 'problems_with_trainer']


def problems_of_settings(settings: Settings) -> Iterator[str]:
    """Find what is wrong with the settings by themselves.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.

    Yields:
        str: One problem each.
    """
    if settings.zero_stage is not None and not _is_stage(settings.zero_stage):
        yield f'zero_stage={settings.zero_stage!r}: allowed are 1, 2 and 3 (0 is run as 1)'
    for place in ('offload_optimizer', 'offload_param'):
        value = getattr(settings, place)
        if value not in (None, 'cpu'):
            yield f"{place}={value!r}: allowed are 'cpu' and None" + (
                '; NVMe offload is not supported yet' if value == 'nvme' else ''
            )
    if settings.offload('offload_param') != 'none' and settings.stage in (0, 1, 2):
        yield (
            f'offload_param={settings.offload("offload_param")!r} with ZeRO stage {settings.stage}: only ZeRO 3 '
            'partitions the weights, so only there can they be offloaded; write zero_stage=3, or offload the optimizer'
        )
    # What DeepSpeed itself would refuse; nothing more is said of the same place.
    of_keys = list(problems_of_keys(settings.ds_config, settings.stage if _is_stage(settings.stage) else 1))
    yield from of_keys
    wrong = {_place(problem) for problem in of_keys}
    zero = settings.ds_config.get('zero_optimization')
    not_a_mapping = [f'ds_config.zero_optimization={zero!r}: a mapping of settings is needed']
    others = (
        *(not_a_mapping if zero is not None and not isinstance(zero, Mapping) else ()),
        *_places_that_disagree(settings),
        *problems_of_clipping_value(settings.ds_config.get('gradient_clipping')),
        *problems_of_features(settings),
    )
    yield from (problem for problem in others if _place(problem) not in wrong)


def _place(problem: str) -> str:
    """The path that a sentence begins with: ``ds_config.a.b`` of ``ds_config.a.b=1: ...``."""
    return re.split('[=: ]', problem, maxsplit=1)[0]


def _is_stage(value: object) -> bool:
    return not isinstance(value, bool) and value in (0, 1, 2, 3)


def _places_that_disagree(settings: Settings) -> Iterator[str]:
    stage = settings.zero.get('stage', 'auto')
    if _is_stage(stage) and settings.zero_stage is not None and stage != settings.zero_stage:
        yield (
            f'DeepSpeed(zero_stage={settings.zero_stage}) and ds_config.zero_optimization.stage={stage!r} '
            f'disagree; write zero_stage={stage!r}, or leave the stage out of the ds_config'
        )
    for place in ('offload_optimizer', 'offload_param'):
        given, device = getattr(settings, place), offload_device(settings.zero.get(place))
        if given is not None and 'device' in mapping(settings.zero.get(place)) and device != given:
            yield (
                f'DeepSpeed({place}={given!r}) and ds_config.zero_optimization.{place}.device={device!r} disagree; '
                'give one of them'
            )
    if settings.zero.get('overlap_comm') is True and settings.stage in (0, 1):
        yield 'ds_config.zero_optimization.overlap_comm=True: works with ZeRO 2 and 3 here; leave it out'


def problems_with_trainer(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    """Find where the settings and the Trainer disagree, and what of the Trainer is not supported.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One problem each.
    """
    if facts.number_of_deepspeed_algorithms > 1:
        yield f'algorithms holds {facts.number_of_deepspeed_algorithms} DeepSpeed instances; a Trainer can have one'
    for name in facts.parallelism:
        yield (
            f'Trainer(parallelism_config=...) asks for {name!r} beside DeepSpeed: both would shard the model; leave '
            'parallelism_config out, or leave DeepSpeed out'
        )
    if facts.trained_without_optimizer:
        some = ', '.join(facts.trained_without_optimizer[:3])
        yield (
            f'{len(facts.trained_without_optimizer)} trainable parameters are not in the optimizer ({some}, ...); give '
            'them to it, or set requires_grad=False on them'
        )
    if facts.strided_parameters:
        yield (
            f'{", ".join(facts.strided_parameters)}: DeepSpeed cannot broadcast parameters in another memory format, '
            'such as channels_last; give the model the ordinary one, .to(memory_format=torch.contiguous_format), and '
            'convert the inputs instead'
        )
    yield from problems_of_parts(facts.parts, settings.stage)
    yield from problems_of_precision(settings, facts)
    yield from problems_of_batches(settings.ds_config, facts)
    yield from problems_of_clipping(settings, facts)
    yield from problems_of_optimizer(settings, facts)
    yield from problems_of_scheduler(settings, facts)
    yield from problems_of_features_with_trainer(settings, facts)
