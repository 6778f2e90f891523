"""What a checkpoint file or folder is, for reading: one interface over every format.

A source is opened offline, on one process, without ranks and without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

__all__ = ['CheckpointSource', 'StoredTensor']


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a model in a checkpoint.

    Args:
        name (str): The user's name of it, without ``module.`` or other wrappers.
        shape (torch.Size): Of the whole tensor.
        dtype (torch.dtype): As stored: fp32 where there are master weights.
        kind (Literal['trained', 'frozen', 'buffer', 'unknown']): What it is; unknown where the checkpoint does not say.
        state (dict[str, torch.dtype]): Its tensors of optimizer state, by the optimizer's key; each has its shape.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    kind: Literal['trained', 'frozen', 'buffer', 'unknown']
    state: dict[str, torch.dtype] = field(default_factory=dict)


class CheckpointSource(Protocol):
    """A checkpoint that is open for reading.

    Args:
        path (Path): The file or folder.
        format (str): For people: ``'Composer checkpoint'``, ``'DeepSpeed checkpoint'``, ``'sharded checkpoint'``.
        tensors (dict[str, StoredTensor]): By name, each tensor once.
        tied (dict[str, str]): Further names of the same tensor, and the one in ``tensors``.
        facts (dict[str, Any]): What else is known, for people, in the order to show it: run name, epoch, batch,
            optimizer steps, world size, ZeRO stage, precision, versions.
    """

    path: Path
    format: str
    tensors: dict[str, StoredTensor]
    tied: dict[str, str]
    facts: dict[str, Any]

    def read(self, name: str, start: int, numel: int, state: str | None = None) -> torch.Tensor:
        """Read a run of a tensor; holds little more memory than the result.

        Args:
            name (str): A name in ``tensors``.
            start (int): Where the run begins in the flattened tensor.
            numel (int): Its length.
            state (str | None): A key of the tensor's optimizer state; None for the weights. Default: None.

        Returns:
            torch.Tensor: Shape ``(numel,)``, in the stored dtype, in host memory.

        Raises:
            CheckpointError: When the file is damaged.
        """
        ...

    def missing(self) -> list[str]:
        """Find what the checkpoint lacks.

        Returns:
            list[str]: One sentence each, such as the name of a shard that is not there; empty for a complete one.
        """
        ...

    def damaged(self) -> list[str]:
        """Compare every file with its checksum, where the format has checksums. Reads everything.

        Returns:
            list[str]: One sentence for each damaged file; empty where there is no damage to be seen.
        """
        ...
