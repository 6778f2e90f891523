"""The facts that a Trainer would know, without a Trainer and without ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from composer_ds.auto_values import hidden_size_of
from composer_ds.facts import TrainerFacts
from composer_ds.trainer_facts import parameters_of

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
    number_of_schedulers: int = 0,
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
        number_of_schedulers (int): Of the Trainer.

    Returns:
        TrainerFacts: Of every rank alike.
    """
    parameters = dict(model.named_parameters()) if model is not None else {}
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    held = parameters_of(*([optimizer] if optimizer is not None else []))
    if model is not None:
        trained_elements = sum(parameter.numel() for parameter in trainable.values())
        hidden_size = hidden_size_of(model)
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
        number_of_schedulers=number_of_schedulers,
        hidden_size=hidden_size,
        trained_elements=trained_elements,
        trained_without_optimizer=tuple(name for name, parameter in trainable.items() if parameter not in held),
        scalar_parameters=tuple(name for name, parameter in parameters.items() if parameter.dim() == 0),
        frozen_parameters=tuple(
            name for name, p in parameters.items() if not p.requires_grad and p.is_floating_point()
        ),
        float_buffers=tuple(name for name, one in model.named_buffers() if one.is_floating_point()) if model else (),
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
