"""Process groups that DeepSpeed remembers longer than they live."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ['forget_destroyed_groups']


def forget_destroyed_groups() -> None:
    """Let DeepSpeed make its process groups anew, when those that it knows have been destroyed.

    Called before DeepSpeed builds anything, on every rank, with torch's process group initialized. So a process can
    train, call ``torch.distributed.destroy_process_group()`` and train again, as in a notebook.
    """
    # DeepSpeed (0.19.8) forgets them in its own destroy_process_group alone, and has no public way to ask for them.
    from deepspeed.utils import groups

    known = groups._WORLD_GROUP
    if known is None:
        return
    try:
        dist.get_process_group_ranks(known)
    except (KeyError, ValueError):  # torch no longer knows it
        groups._release_process_group_references()
