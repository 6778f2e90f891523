"""What a sharded checkpoint consists of: names of files and keys, and the manifest that makes it complete.

A checkpoint is a folder::

    ep0-ba100/
        manifest.json       written last: without it the checkpoint is not complete
        .metadata           of torch.distributed.checkpoint (DCP): which file holds which run of which tensor
        __0_0.distcp ...    DCP's files, one for each rank
        state.pt            the rest of Composer's state, from rank 0, with the random numbers of all ranks

Every tensor is stored flattened, under ``weights/NAME`` and ``state/KEY/NAME``, where ``NAME`` is the user's name of
the parameter and ``KEY`` is that of the optimizer (``exp_avg``, ``momentum_buffer``, ...). Shapes are in the manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from composer_ds.errors import CheckpointError

__all__ = [
    'LATEST',
    'MANIFEST',
    'STATE',
    'FileEntry',
    'Manifest',
    'TensorEntry',
    'read_manifest',
    'state_key',
    'weights_key',
]

MANIFEST = 'manifest.json'
STATE = 'state.pt'
LATEST = 'latest'
"""A text file beside the checkpoints with the name of the newest complete one."""


def weights_key(name: str) -> str:
    """Return DCP's key for the weights of a parameter, or for a buffer.

    Args:
        name (str): The user's name.

    Returns:
        str: The key.
    """
    return f'weights/{name}'


def state_key(name: str, key: str) -> str:
    """Return DCP's key for a part of a parameter's optimizer state.

    Args:
        name (str): The user's name of the parameter.
        key (str): The optimizer's name of the part.

    Returns:
        str: The key.
    """
    return f'state/{key}/{name}'


class _Entry(BaseModel):
    model_config = ConfigDict(extra='forbid', frozen=True)


class TensorEntry(_Entry):
    """One tensor of the model.

    Args:
        shape (tuple[int, ...]): Of the whole tensor.
        dtype (str): Of the stored weights: ``'float32'`` for what is trained.
        kind (Literal['trained', 'frozen', 'buffer']): What it is.
        state (dict[str, str]): Its tensors of optimizer state: the dtype of each, by the optimizer's key.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: Literal['trained', 'frozen', 'buffer']
    state: dict[str, str] = {}

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the stored weights."""
        return getattr(torch, self.dtype)


class FileEntry(_Entry):
    """One file of the checkpoint.

    Args:
        size_bytes (int): Its length.
        crc32 (int): zlib's checksum of its content.
    """

    size_bytes: int
    crc32: int


class Manifest(_Entry):
    """What the checkpoint is.

    Args:
        format (Literal['composer_ds sharded checkpoint']): Tells it from other JSON files.
        version (Literal[1]): Of this layout.
        run_name (str): Composer's name of the run.
        time (dict[str, int]): Composer's timestamp: ``'epoch'``, ``'batch'``, ``'sample'``, ``'token'`` and so on.
        optimizer_steps (dict[str, int]): The counts of :class:`~composer_ds.OptimizerSteps`; empty when they are not
            saved.
        world_size (int): Of the run that saved it.
        zero_stage (int): Of the run that saved it.
        offload_optimizer (str): ``'cpu'`` or ``'none'``.
        offload_param (str): ``'cpu'`` or ``'none'``.
        precision (str): Composer's.
        versions (dict[str, str]): Of the packages that saved it.
        weights_only (bool): Whether there is neither optimizer state nor ``state.pt``.
        optimizer (str | None): The class of the optimizer.
        param_groups (list[list[str]]): The names of the parameters in each parameter group.
        tensors (dict[str, TensorEntry]): By the user's name, in the order of the model's ``state_dict``.
        tied (dict[str, str]): Further names of the same tensor, and the one in ``tensors``.
        files (dict[str, FileEntry]): All other files of the folder.
    """

    format: Literal['composer_ds sharded checkpoint'] = 'composer_ds sharded checkpoint'
    version: Literal[1] = 1
    run_name: str
    time: dict[str, int]
    optimizer_steps: dict[str, int]
    world_size: int
    zero_stage: int
    offload_optimizer: str
    offload_param: str
    precision: str
    versions: dict[str, str]
    weights_only: bool
    optimizer: str | None
    param_groups: list[list[str]]
    tensors: dict[str, TensorEntry]
    tied: dict[str, str]
    files: dict[str, FileEntry]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        folder (Path): The checkpoint.

    Returns:
        Manifest: Its content.

    Raises:
        CheckpointError: When there is none, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f'{folder} is not a complete sharded checkpoint: {MANIFEST}, which is written last, is missing. A save was '
            'killed, or a copy broke off; load another one.'
        ) from None
    except (OSError, ValidationError) as error:
        raise CheckpointError(f'{path} cannot be read: {error}') from error
