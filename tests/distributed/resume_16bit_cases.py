"""Runs in bf16 and fp16 that are cut in two. Runs inside rank processes."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed import matrix_cases
from tests.distributed.fp16_cases import fp16_on_this_cpu


def run(strategy: str, case_name: str, sections: dict[str, Any], **arguments: Any) -> dict[str, Any] | None:
    """Do what :func:`matrix_cases.run` does, in 16 bits."""
    with fp16_on_this_cpu():
        return matrix_cases.run(strategy, case_name, sections=sections, **arguments)


def cut_in_two(strategy: str, case_name: str, sections: dict[str, Any], folder: str) -> list[dict[str, Any] | None]:
    """Train without interruption, saving on the way; then go on from both checkpoints, in the same processes."""
    whole = run(strategy, case_name, sections, folder=folder)
    checkpoints = matrix_cases.checkpoint_in(folder), matrix_cases.sharded_checkpoint_in(folder)
    return [whole, *(run(strategy, case_name, sections, checkpoint=one) for one in checkpoints)]


def loaded(strategy: str, case_name: str, sections: dict[str, Any], checkpoints: list[str]) -> list[Any]:
    """Return weights and optimizer state right after each checkpoint is loaded; trains on all the same."""
    runs = [run(strategy, case_name, sections, checkpoint=checkpoint) for checkpoint in checkpoints]
    return [None if one is None else one['loaded'] for one in runs]


def written_by_plain_composer(strategy: str, section: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """Go on from a checkpoint with the state of torch's own ``GradScaler``, which plain Composer in fp16 writes.

    Composer's fp16 needs a GPU, so the checkpoint is one in fp32, and the scaler's state is put into it.
    """
    matrix_cases.run('plain', 'sgd', folder=folder, ending='stopped')
    checkpoint = matrix_cases.checkpoint_in(folder)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    contents = torch.load(checkpoint, weights_only=False)
    scaler = torch.amp.grad_scaler.GradScaler('cpu', init_scale=512.0, growth_interval=3)
    scaler.load_state_dict({**scaler.state_dict(), '_growth_tracker': 2})
    contents['state']['scaler'] = {type(scaler).__qualname__: scaler.state_dict()}
    edited = f'{folder}/edited-rank{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}.pt'
    torch.save(contents, edited)
    return run(strategy, 'sgd', section, checkpoint=edited)
