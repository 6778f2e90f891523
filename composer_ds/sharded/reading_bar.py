"""How far this rank is with the runs that it reads of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from composer.core import State

from composer_ds.frozen import run_of_frozen
from composer_ds.progress import bar_if_long
from composer_ds.sharded.contents import named_tensors

__all__ = ['bytes_to_read', 'reading_bar']


@contextmanager
def reading_bar(source: Any, names: Mapping[str, str], state: State, with_optimizer: bool) -> Iterator[None]:
    """Show a bar on rank 0, when there is much to read, while tensors are read from a source.

    Args:
        source (Any): A ``CheckpointSource``, whose reads are counted.
        names (Mapping[str, str]): By the names of the model's tensors that are read, those in the checkpoint.
        state (State): Composer's state.
        with_optimizer (bool): Whether the optimizer state is read, too.

    Yields:
        None: Reads are counted inside.
    """
    with bar_if_long(f'Loading {source.path}') as bar:
        bar.begin(bytes_to_read(source, names, state, with_optimizer))
        read = source.read

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            run = read(*args, **kwargs)
            bar.advance(run.nbytes)
            return run

        source.read = counted
        try:
            yield
        finally:
            del source.read


def bytes_to_read(source: Any, names: Mapping[str, str], state: State, with_optimizer: bool) -> int:
    """Add up what this rank reads: its runs of what is partitioned, and the whole of everything else.

    Args:
        source (Any): A ``CheckpointSource``.
        names (Mapping[str, str]): As for :func:`reading_bar`.
        state (State): Composer's state.
        with_optimizer (bool): Whether the optimizer state is read, too.

    Returns:
        int: In bytes, as they are stored.
    """
    model: Any = state.model
    partitions = model._partitions
    total_bytes, done = 0, set()
    for name, tensor in named_tensors(model).items():
        if name not in names or id(tensor) in done:
            continue
        done.add(id(tensor))
        stored = source.tensors[names[name]]
        itemsize = stored.dtype.itemsize
        if tensor in partitions.names:
            fragment = partitions.fragment(partitions.names[tensor])
            numel = 0 if fragment is None else fragment.numel
            if with_optimizer:
                itemsize += sum(dtype.itemsize for dtype in stored.state.values())
        elif hasattr(tensor, 'ds_id'):
            numel = run_of_frozen(tensor)[0].numel()
        else:
            numel = tensor.numel()
        total_bytes += numel * itemsize
    return total_bytes
