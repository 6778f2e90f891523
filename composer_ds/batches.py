"""The batch arithmetic: Composer splits batches, so the sizes in a ds_config must come out at what Composer does.

For each rank one batch of the dataloader, cut in microbatches, is one optimizer step::

    accumulation = ceil(batch of the rank / microbatch)
    global batch = sum of the ranks' batches

unless the ds_config asks for k times as much: then k batches are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from composer_ds.facts import TrainerFacts

__all__ = ['accumulation_of', 'batches_per_optimizer_step', 'global_batch_of', 'problems_of_batches']

_KEYS = ('train_batch_size', 'train_micro_batch_size_per_gpu', 'gradient_accumulation_steps')


def accumulation_of(facts: TrainerFacts) -> int | None:
    """Count the microbatches of an optimizer step on the rank with the largest batch.

    Args:
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        int | None: None where a size is not known.
    """
    sizes = [size for size in facts.batch_sizes or () if size is not None]
    microbatch = facts.device_train_microbatch_size
    if not sizes or not isinstance(microbatch, int | float) or microbatch <= 0:
        return None
    return math.ceil(max(sizes) / microbatch)


def global_batch_of(facts: TrainerFacts) -> int | None:
    """Count the samples of an optimizer step over all ranks.

    Args:
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        int | None: None where a rank's dataloader does not say its batch size.
    """
    if not facts.batch_sizes:
        return None
    sizes = [size for size in facts.batch_sizes if size is not None]
    return sum(sizes) if len(sizes) == len(facts.batch_sizes) else None


def problems_of_batches(ds_config: Mapping[str, Any], facts: TrainerFacts) -> Iterator[str]:
    """Compare the sizes of a ds_config with the Trainer's.

    Called when the engine is built, and again at ``FIT_START``, where the dataloader may be a new one. Without a
    dataloader only the values by themselves are checked.

    Args:
        ds_config (Mapping[str, Any]): The ds_config.
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One problem each.
    """
    sound = {}
    for key, value in _given(ds_config).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"ds_config.{key}={value!r}: a whole number of 1 or more is needed, or 'auto'"
        else:
            sound[key] = value
    microbatch = facts.device_train_microbatch_size
    if microbatch == 'auto':
        yield (
            "Trainer(device_train_microbatch_size='auto'): when memory runs out in the middle of a batch, DeepSpeed "
            'has already reduced part of its gradients and cannot start over; give a number'
        )
        return
    asked = sound.get('train_micro_batch_size_per_gpu')
    if asked is not None and microbatch is not None and asked != microbatch:
        yield (
            f'Trainer(device_train_microbatch_size={microbatch!r}) and ds_config.train_micro_batch_size_per_gpu='
            f'{asked!r} disagree. Composer splits the batches (by default a batch is one microbatch); write '
            f"Trainer(device_train_microbatch_size={asked}), or 'auto' in the ds_config"
        )
    if facts.batch_sizes is None:
        return
    yield from _accumulation(sound.get('gradient_accumulation_steps'), facts)
    yield from _global_batch(sound, facts)
    windows = _windows(sound, facts)
    if len(set(windows.values())) > 1:
        both = ' and '.join(f'ds_config.{key}={sound[key]} makes {size}' for key, size in windows.items())
        yield f'Batches for each optimizer step: {both}. {_makes(facts)}{_elsewhere(sound, facts)}'


def batches_per_optimizer_step(ds_config: Mapping[str, Any], facts: TrainerFacts) -> int:
    """Count the batches that make one optimizer step, where the sizes have been found to agree.

    Args:
        ds_config (Mapping[str, Any]): The ds_config.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        int: 1, unless ``train_batch_size`` or ``gradient_accumulation_steps`` ask for more.
    """
    return max(_windows(_given(ds_config), facts).values(), default=1)


def _given(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: ds_config[key] for key in _KEYS if ds_config.get(key, 'auto') not in ('auto', None)}


def _windows(sizes: Mapping[str, int], facts: TrainerFacts) -> dict[str, int]:
    """By key, how many batches it makes one optimizer step; without the keys that do not come out whole."""
    ours = {'gradient_accumulation_steps': accumulation_of(facts), 'train_batch_size': global_batch_of(facts)}
    return {
        key: sizes[key] // one
        for key, one in ours.items()
        if one is not None and key in sizes and sizes[key] % one == 0
    }


def _accumulation(asked: int | None, facts: TrainerFacts) -> Iterator[str]:
    if asked is None:
        return
    accumulation, place = accumulation_of(facts), f'ds_config.gradient_accumulation_steps={asked}'
    if accumulation is None:
        yield f'{place} cannot be checked: {_UNKNOWN}'
    elif asked % accumulation:
        yield (
            f"{place}: {_makes(facts)}. Write {accumulation} or 'auto', a multiple of it for several batches in one "
            f'optimizer step, or change {_WHERE}'
        )


def _global_batch(sound: Mapping[str, int], facts: TrainerFacts) -> Iterator[str]:
    asked, whole = sound.get('train_batch_size'), global_batch_of(facts)
    if asked is None:
        return
    place = f'ds_config.train_batch_size={asked}'
    if whole is None:
        yield f'{place} cannot be checked: {_UNKNOWN}'
    elif asked % whole:
        assert facts.batch_sizes is not None
        arithmetic = (
            f'batch {facts.batch_sizes[0]} of the dataloader x world size {facts.world_size} = {whole}'
            if len(set(facts.batch_sizes)) == 1
            else f'{" + ".join(map(str, facts.batch_sizes))} = {whole}'
        )
        yield (
            f"{place}: {arithmetic}. Write {whole} or 'auto', a multiple of it for several batches in one optimizer "
            f'step, or change {_WHERE}{_elsewhere(sound, facts)}'
        )


def _elsewhere(sound: Mapping[str, int], facts: TrainerFacts) -> str:
    """The world size that all three sizes of the ds_config fit, where it is another one."""
    per_rank = sound.get('train_micro_batch_size_per_gpu', 0) * sound.get('gradient_accumulation_steps', 0)
    whole = sound.get('train_batch_size', 0)
    if not per_rank or not whole or whole % per_rank or whole // per_rank == facts.world_size:
        return ''
    meant = whole // per_rank
    return f'. The three sizes of the ds_config fit world size {meant}: was it started with `composer -n {meant}`?'


def _makes(facts: TrainerFacts) -> str:
    assert facts.batch_sizes is not None
    batch = max((size for size in facts.batch_sizes if size is not None), default=None)
    return (
        f'a batch of {batch} samples in microbatches of {facts.device_train_microbatch_size} makes '
        f'{accumulation_of(facts)} for each optimizer step'
    )


_UNKNOWN = "the dataloader does not say its batch size; leave it out or write 'auto'"
_WHERE = "the dataloader's batch size, Trainer(device_train_microbatch_size=...) or the number of ranks"
