"""Precision: the Trainer's ``precision`` is the owner; the sections of the ds_config must be absent, 'auto' or agree.

=============  ===============  ==============  ============================================================
precision      weights          master weights  how the forward pass computes
=============  ===============  ==============  ============================================================
``fp32``       fp32             the same        fp32
``amp_bf16``   bf16             fp32            under autocast
``amp_bf16``   fp32             the same        under DeepSpeed's autocast (``torch_autocast`` in ds_config)
``amp_fp16``   fp16             fp32            under autocast, with DeepSpeed's loss scaler
=============  ===============  ==============  ============================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from composer_ds.facts import Settings, TrainerFacts, mapping

__all__ = [
    'SECTIONS', 'autocast_only', 'complete_precision', 'notes_on_precision', 'precision_of', 'problems_of_precision',
    'weights_of',
]  # fmt: skip

SECTIONS = {'fp32': None, 'amp_bf16': 'bf16', 'amp_fp16': 'fp16'}
"""Composer's precisions that are supported, with the section of the ds_config that each switches on."""

_AUTOCAST_DTYPES = ('bf16', 'bfloat16', 'torch.bfloat16')


def precision_of(settings: Settings, facts: TrainerFacts) -> str:
    """Return the Trainer's precision; on a CPU, where Composer has fp32 only, the one that the ds_config switches on.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        str: Composer's name of the precision.
    """
    if facts.on_cpu and facts.precision == 'fp32':
        for precision, section in SECTIONS.items():
            if section is not None and _enabled(settings, section) is True:
                return precision
        if _enabled(settings, 'torch_autocast') is True:
            return 'amp_bf16'
    return facts.precision


def autocast_only(settings: Settings) -> bool:
    """Say whether the weights stay fp32 and DeepSpeed's ``torch_autocast`` lowers the precision of operations.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.

    Returns:
        bool: Whether ``torch_autocast`` is on.
    """
    return _enabled(settings, 'torch_autocast') is True


def weights_of(settings: Settings, facts: TrainerFacts) -> str:
    """Say in which dtype the model computes with its weights.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        str: ``'fp32'``, ``'bf16'`` or ``'fp16'``.
    """
    section = SECTIONS.get(precision_of(settings, facts))
    return 'fp32' if section is None or autocast_only(settings) else section


def _enabled(settings: Settings, section: str) -> Any:
    """What a section says: True, False, or 'auto' where it says nothing."""
    given = settings.ds_config.get(section, 'auto')
    if given in ('auto', None):
        return 'auto'
    if isinstance(given, bool):  # written as a switch
        return given
    # DeepSpeed's default of each section is off.
    return mapping(given).get('enabled', False)


def problems_of_precision(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    """Compare the Trainer's precision with the ds_config and with what the device can do.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One problem each.
    """
    precision, weights = precision_of(settings, facts), weights_of(settings, facts)
    if facts.precision not in SECTIONS:
        yield (
            f"Trainer(precision='{facts.precision}') is not supported: allowed are "
            + ', '.join(f"'{precision}'" for precision in SECTIONS)
            + "; write Trainer(precision='amp_bf16')"
        )
        return
    if weights == 'fp16' and not facts.fp16_supported:
        reason = " (Composer's default on a GPU)" if facts.precision == 'amp_fp16' else ''
        device = 'this CPU has no instructions for it (avx512_fp16)' if facts.on_cpu else 'this device lacks it'
        yield f"fp16, asked for by {_asked_by(facts, precision)}{reason}: {device}; use 'amp_bf16' or 'fp32'"
    for section in ('bf16', 'fp16'):
        enabled = _enabled(settings, section)
        if enabled != 'auto' and enabled is not (weights == section):
            if autocast_only(settings) and enabled is True and SECTIONS[precision] == section:
                yield (
                    f'ds_config.{section}.enabled=True and ds_config.torch_autocast.enabled=True disagree: the first '
                    'computes with 16-bit weights, the second with fp32 weights under autocast; leave one out'
                )
            elif not autocast_only(settings):
                yield _disagreement(facts, precision, section, enabled)
    if autocast_only(settings):
        yield from _autocast(settings, facts, precision)


def _asked_by(facts: TrainerFacts, precision: str) -> str:
    if facts.precision == precision:
        return f"Trainer(precision='{precision}')"
    return f'ds_config.{SECTIONS[precision]}.enabled=True'


def _disagreement(facts: TrainerFacts, precision: str, section: str, enabled: Any) -> str:
    return (
        f"{_asked_by(facts, precision)} and ds_config.{section}.enabled={enabled!r} disagree; the Trainer's precision "
        "decides, leave the section out or write 'auto'"
    )


def _autocast(settings: Settings, facts: TrainerFacts, precision: str) -> Iterator[str]:
    dtype = mapping(settings.ds_config.get('torch_autocast')).get('dtype', 'auto')
    if precision != 'amp_bf16':
        yield _disagreement(facts, precision, 'torch_autocast', True)
    elif dtype != 'auto' and str(dtype) not in _AUTOCAST_DTYPES:
        yield (
            f"ds_config.torch_autocast.dtype={dtype!r} and precision 'amp_bf16' disagree; write 'bfloat16' or leave it "
            "out. (For fp16 use Trainer(precision='amp_fp16') without torch_autocast: its gradients need a loss scale)"
        )


def complete_precision(config: dict[str, Any], settings: Settings, facts: TrainerFacts, stage: int) -> None:
    """Write the sections about precision.

    Args:
        config (dict[str, Any]): The config for DeepSpeed, changed in place.
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.
        stage (int): The ZeRO stage that is run.
    """
    weights = weights_of(settings, facts)
    for section in ('bf16', 'fp16', 'torch_autocast'):
        config.pop(section, None)
    if autocast_only(settings):
        given = mapping(settings.ds_config.get('torch_autocast'))
        config['torch_autocast'] = {
            # DeepSpeed would send the gradients of linear and convolutional layers in 16 bits.
            'lower_precision_safe_modules': [],
            **_without_auto(given),
            'enabled': True,
            'dtype': 'bfloat16',
        }
    if weights == 'fp32':
        return
    config[weights] = {**_without_auto(mapping(settings.ds_config.get(weights))), 'enabled': True}
    # DeepSpeed would add up the microbatches' gradients in 16 bits, where small ones vanish.
    config['data_types'] = {'grad_accum_dtype': 'fp32', **mapping(config.get('data_types'))}
    if stage == 1:
        # Stage 1 reduces once per optimizer step, and would round the sum to 16 bits for it. (Stages 2 and 3 reduce
        # the gradients of each microbatch, which are 16 bits wide anyway.)
        config.setdefault('communication_data_type', 'fp32')


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value != 'auto'}


def notes_on_precision(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    """Say what the user should know about the precision: nothing is rounded in silence.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One sentence each.
    """
    precision, weights = precision_of(settings, facts), weights_of(settings, facts)
    if precision != facts.precision:
        yield (
            f"The ds_config sets the precision '{precision}': on a CPU Composer itself has fp32 only, so its Trainer "
            'cannot be asked for it.'
        )
    if weights == 'fp32':
        return
    if facts.frozen_parameters:
        yield (
            f'{len(facts.frozen_parameters)} frozen parameters are rounded to {weights}, too '
            f'({_some(facts.frozen_parameters)}). What must stay fp32 can be a buffer of the model.'
        )
    data_types = mapping(settings.ds_config.get('data_types'))
    dtype = data_types.get('buffer_dtype')
    if facts.float_buffers and dtype not in (None, 'auto', 'fp32', 'float32'):
        kept = data_types.get('keep_in_fp32_modules')
        yield (
            f'ds_config.data_types.buffer_dtype={dtype!r} rounds {len(facts.float_buffers)} buffers of the model '
            f'({_some(facts.float_buffers)})'
            + (
                f' but for those that match keep_in_fp32_modules={kept!r}.'
                if kept
                else '. To keep some in fp32, name '
                'them in ds_config.data_types.keep_in_fp32_modules; to keep all, leave buffer_dtype out.'
            )
        )


def _some(names: tuple[str, ...]) -> str:
    return ', '.join(names[:3]) + (', ...' if len(names) > 3 else '')
