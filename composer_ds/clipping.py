"""Gradient clipping: DeepSpeed is the owner, since only it has the gradients whole when they are whole.

Composer's ``GradientClipping('norm', x)`` becomes ``gradient_clipping: x`` of the ds_config, and does not run itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer.algorithms import GradientClipping

from composer_ds.facts import Settings, TrainerFacts

__all__ = ['clipping_of', 'problems_of_clipping', 'problems_of_clipping_value']


def clipping_of(settings: Settings, facts: TrainerFacts) -> tuple[float, str]:
    """Return the norm that gradients are clipped to, and who asked.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        tuple[float, str]: 0.0 when nobody asked, since DeepSpeed (0.19.3 and later) would clip at 1.0 then.
    """
    for part in _clippings(facts):
        return float(part.clipping_threshold), f"GradientClipping('norm', {part.clipping_threshold})"
    given = settings.ds_config.get('gradient_clipping', 'auto')
    return (0.0, 'nobody asked') if given in ('auto', None) else (float(given), 'ds_config.gradient_clipping')


def _clippings(facts: TrainerFacts) -> list[GradientClipping]:
    return [part for part in facts.parts if isinstance(part, GradientClipping)]


def problems_of_clipping(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    """Compare Composer's clipping algorithm with the ds_config.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One problem each.
    """
    given, clippings = settings.ds_config.get('gradient_clipping', 'auto'), _clippings(facts)
    if len(clippings) > 1:
        yield f'algorithms holds {len(clippings)} GradientClipping instances; give one'
    for part in clippings:
        threshold, written = (
            part.clipping_threshold,
            f'GradientClipping({part.clipping_type!r}, {part.clipping_threshold})',
        )
        if part.clipping_type == 'value':
            yield (
                f"{written}: clipping each element needs the whole batch's gradient before it is partitioned, which "
                f"DeepSpeed does not offer; write GradientClipping('norm', ...)"
            )
        elif part.clipping_type == 'adaptive':
            yield (
                f'{written}: adaptive clipping compares the norm of each row of a gradient with that of the weight, '
                "and ZeRO cuts the rows over the ranks; write GradientClipping('norm', ...)"
            )
        elif isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold > 0:
            yield f'{written}: a norm greater than 0 is needed; leave the algorithm out for no clipping'
        elif given not in ('auto', None) and given != threshold:
            yield (
                f"{written} and ds_config.gradient_clipping={given!r} disagree; give one of them, or write 'auto' in "
                'the ds_config'
            )


def problems_of_clipping_value(given: Any) -> Iterator[str]:
    """Check the value of the ds_config by itself.

    Args:
        given (Any): ``ds_config['gradient_clipping']``.

    Yields:
        str: At most one problem.
    """
    if given in ('auto', None):
        return
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < float('inf'):
        yield f'ds_config.gradient_clipping={given!r}: a norm of 0 (no clipping) or more is needed'
