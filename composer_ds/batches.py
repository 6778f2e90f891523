"""The batch arithmetic: Composer splits batches, so the sizes in a ds_config must come out at what Composer does.

For each rank one batch of the dataloader, cut in microbatches, is one optimizer step::

    accumulation = ceil(batch of the rank / microbatch)
    global batch = sum of the ranks' batches
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from composer_ds.facts import TrainerFacts

__all__ = ['accumulation_of', 'global_batch_of', 'problems_of_batches']

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
    given = {key: ds_config[key] for key in _KEYS if ds_config.get(key, 'auto') not in ('auto', None)}
    sound = {}
    for key, value in given.items():
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
    if 'gradient_accumulation_steps' in sound:
        yield from _accumulation(sound['gradient_accumulation_steps'], facts)
    if 'train_batch_size' in sound:
        yield from _global_batch(sound, facts)


def _accumulation(asked: int, facts: TrainerFacts) -> Iterator[str]:
    accumulation, place = accumulation_of(facts), f'ds_config.gradient_accumulation_steps={asked}'
    if accumulation is None:
        yield f'{place} cannot be checked: {_UNKNOWN}'
    elif asked != accumulation:
        if asked % accumulation == 0:
            yield f'{place}: {_makes(facts)}, so this asks for {asked // accumulation} batches {_WINDOW}'
        else:
            yield f"{place}: {_makes(facts)}. Write {accumulation} or 'auto', or change {_WHERE}"


def _global_batch(sound: Mapping[str, int], facts: TrainerFacts) -> Iterator[str]:
    asked, whole = sound['train_batch_size'], global_batch_of(facts)
    place = f'ds_config.train_batch_size={asked}'
    if whole is None:
        yield f'{place} cannot be checked: {_UNKNOWN}'
        return
    if asked == whole:
        return
    assert facts.batch_sizes is not None
    sizes = set(facts.batch_sizes)
    arithmetic = (
        f'batch {facts.batch_sizes[0]} of the dataloader x world size {facts.world_size} = {whole}'
        if len(sizes) == 1
        else f'{" + ".join(map(str, facts.batch_sizes))} = {whole}'
    )
    per_rank = sound.get('train_micro_batch_size_per_gpu', 0) * sound.get('gradient_accumulation_steps', 0)
    meant = asked // per_rank if per_rank and asked % per_rank == 0 else None
    elsewhere = ''
    if meant not in (None, facts.world_size):
        elsewhere = f'. The three sizes of the ds_config fit world size {meant}: was it started with `composer -n {meant}`?'
    if asked % whole == 0 and not elsewhere:
        yield f'{place}: {arithmetic}, so this asks for {asked // whole} batches {_WINDOW}'
    else:
        yield f"{place}: {arithmetic}. Write {whole} or 'auto', or change {_WHERE}{elsewhere}"


def _makes(facts: TrainerFacts) -> str:
    assert facts.batch_sizes is not None
    batch = max(size for size in facts.batch_sizes if size is not None)
    return (
        f'a batch of {batch} samples in microbatches of {facts.device_train_microbatch_size} makes '
        f'{accumulation_of(facts)} for each optimizer step'
    )


_UNKNOWN = "the dataloader does not say its batch size; leave it out or write 'auto'"
_WHERE = "the dataloader's batch size, Trainer(device_train_microbatch_size=...) or the number of ranks"
_WINDOW = (
    'for each optimizer step, which is not supported yet: one batch of the dataloader is one optimizer step. Give the '
    "dataloader a batch that many times as large (device_train_microbatch_size keeps the memory), and write 'auto'"
)
