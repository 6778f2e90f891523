"""The facts that a Trainer would know, without a Trainer and without ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from composer_ds.facts import TrainerFacts
from composer_ds.trainer_facts import facts_of_model

__all__ = ['as_rank_0_of', 'expected_facts']


def expected_facts(
    *,
    world_size: int,
    precision: str,
    on_cpu: bool,
    batch_size: int | None,
    microbatch_size: int | None,
    optimizer: torch.optim.Optimizer | None = None,
    model: torch.nn.Module | None = None,
    trained_elements: int = 0,
    hidden_size: int | None = None,
    parts: tuple[Any, ...] = (),
    scheduler_classes: tuple[str, ...] = (),
) -> TrainerFacts:
    """Say what ``composer_ds.trainer_facts.facts_of`` would find on every rank.

    Args:
        world_size (int): Number of ranks.
        precision (str): Composer's precision.
        on_cpu (bool): Whether the model is to be trained on a CPU.
        batch_size (int | None): Samples that each rank draws from its dataloader at a time.
        microbatch_size (int | None): As for the Trainer; None takes the batch.
        optimizer (torch.optim.Optimizer | None): The optimizer.
        model (torch.nn.Module | None): The model, if there is one.
        trained_elements (int): Without a model: elements of all parameters.
        hidden_size (int | None): Without a model: its width.
        parts (tuple[Any, ...]): Algorithms and callbacks.
        scheduler_classes (tuple[str, ...]): The names of the schedulers' classes.

    Returns:
        TrainerFacts: Of every rank alike.
    """
    of_model = facts_of_model(
        torch.nn.Module() if model is None else model, *([] if optimizer is None else [optimizer])
    )
    if model is None:
        of_model |= {'trained_elements': trained_elements, 'hidden_size': hidden_size}
    return TrainerFacts(
        precision=precision,
        on_cpu=on_cpu,
        fp16_supported=not on_cpu,
        world_size=world_size,
        batch_sizes=None if batch_size is None else (batch_size,) * world_size,
        device_train_microbatch_size=microbatch_size or batch_size,
        number_of_deepspeed_algorithms=1,
        parts=parts,
        parallelism=(),
        optimizer=optimizer,
        optimizer_from_section=False,
        scheduler_classes=scheduler_classes,
        **of_model,
    )


@contextlib.contextmanager
def as_rank_0_of(world_size: int) -> Iterator[None]:
    """Let this process look like rank 0 of a job to code that asks Composer for the world size.

    Args:
        world_size (int): Number of ranks, all on one machine.

    Yields:
        None: The variables that a launcher sets are there inside, and as before afterwards.
    """
    pretended = {
        'RANK': 0, 'LOCAL_RANK': 0, 'NODE_RANK': 0, 'WORLD_SIZE': world_size, 'LOCAL_WORLD_SIZE': world_size,
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in pretended}
    os.environ.update({name: str(value) for name, value in pretended.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
