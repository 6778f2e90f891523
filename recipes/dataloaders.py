"""Dataloaders whose optimizer steps see the same samples whatever the world size, and the checks they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer.core import DataSpec
from composer.core.data_spec import default_split_batch
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

__all__ = ['batch_size_problems', 'build_dataloader', 'split_problems']


def batch_size_problems(global_batch_size: int) -> list[str]:
    """Checks that every rank can take the same share of an optimizer step's samples.

    Args:
        global_batch_size (int): ``data.global_batch_size``: samples per optimizer step over all ranks.

    Returns:
        list[str]: No entry, or one problem that names the nearest sizes that divide by the world size. The same on
            every rank.
    """
    world_size = dist.get_world_size()
    remainder = global_batch_size % world_size
    if remainder == 0:
        return []
    nearest = [size for size in (global_batch_size - remainder, global_batch_size - remainder + world_size) if size]
    return [
        f'data.global_batch_size is {global_batch_size}, which does not divide by the world size {world_size}: every '
        f'rank takes the same share of the samples of an optimizer step. '
        f'Write {" or ".join(map(str, nearest))}, or launch another number of ranks.'
    ]


def split_problems(split: str, num_samples: int, remedy: str) -> list[str]:
    """Checks that every rank gets a sample of a split; a rank without any would leave the others waiting.

    Args:
        split (str): Name of the split.
        num_samples (int): Samples in it, over all ranks.
        remedy (str): Which settings make the split larger, as the end of the sentence 'To get more, ...'.

    Returns:
        list[str]: No entry, or one problem. The same on every rank.
    """
    world_size = dist.get_world_size()
    if num_samples == 0:
        return [f'The {split} split is empty. To get samples, {remedy}.']
    if num_samples < world_size:
        return [
            f'The {split} split has fewer samples ({num_samples}) than there are ranks ({world_size}), and every rank '
            f'needs at least one. To get more, {remedy}; or launch at most {num_samples} of them.'
        ]
    return []


def build_dataloader(
    dataset: Sequence[Any] | Dataset[Any],
    collate: Callable[[list[Any]], Any] | None,
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    num_workers: int = 0,
    count_tokens: Callable[[dict[str, Any]], dict[str, int]] | None = None,
) -> DataSpec:
    """Builds the dataloader of this rank. No rank talks to another.

    With the same seed and the same global batch size, the k-th optimizer step of an epoch takes the same set of
    samples at every world size: the sampler deals one permutation out to the ranks in turn, so the k-th batches of all
    ranks together are one run of it. Only the end of an epoch can differ: the last batch may be short, and
    ``DistributedSampler`` repeats up to ``world size - 1`` samples there to give every rank as many as the others.

    Args:
        dataset (Sequence[Any] | Dataset[Any]): Samples, the same on every rank, at least one for each rank. An iterable
            data set deals its samples out to the ranks itself, and shuffles them.
        collate (Callable[[list[Any]], Any] | None): Makes a batch of a list of samples: a mapping or a sequence of
            tensors. ``None`` takes torch's own.
        batch_size (int): Samples per batch of this rank.
        shuffle_seed (int | None): Seed of the order, a new one each epoch; ``None`` keeps the order of the data set.
        num_workers (int): Worker processes of this rank; 0 loads in the training process.
        count_tokens (Callable[[dict[str, Any]], dict[str, int]] | None): Counts the tokens of a batch; ``None`` leaves
            it to Composer.

    Returns:
        DataSpec: The dataloader as Composer takes it. The last batch may be short.
    """
    sampler = None
    if not isinstance(dataset, IterableDataset):
        sampler = dist.get_sampler(
            dataset,  # pyright: ignore[reportArgumentType]  (a sequence is all that torch asks for)
            shuffle=shuffle_seed is not None,
            seed=shuffle_seed or 0,
        )
    dataloader = DataLoader(
        dataset,  # pyright: ignore[reportArgumentType]
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
    )
    return DataSpec(dataloader, split_batch=_split_batch, get_num_tokens_in_batch=count_tokens)


def _split_batch(batch: Any, microbatch_size: int | float) -> Sequence[Any]:
    """Splits as Composer does, without its warning about the short last batch, which is nothing to worry about."""
    num_samples = len(next(iter(batch.values() if isinstance(batch, Mapping) else batch)))
    return default_split_batch(batch, min(microbatch_size, num_samples))
