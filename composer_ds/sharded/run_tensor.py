"""A rank's part of a tensor, as ``torch.distributed.checkpoint`` (DCP) saves and loads it.

A ZeRO partition is a run of elements of a parameter's flattened tensor. DCP asks a tensor-like object which chunks of
the whole it holds (torch's protocol ``_Checkpointable``); a chunk of a flattened tensor is a run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ['RunTensor']


class RunTensor(torch.Tensor):
    """Stands for a whole flattened tensor, of which this rank has one run.

    Written against torch 2.6 to 2.7; ``tests/distributed/test_sharded.py`` fails when the protocol changes.

    Args:
        run (torch.Tensor): The run, shape ``(numel,)``, contiguous; DCP reads from it and loads into it. Empty where
            other ranks have all.
        start (int): Where the run begins in the whole tensor.
        total (int): Elements of the whole tensor.
    """

    run: torch.Tensor
    start: int

    @staticmethod
    def __new__(cls, run: torch.Tensor, start: int, total: int):
        """Make the wrapper: it has the shape ``(total,)``, and no memory of its own."""
        assert run.dim() == 1 and run.is_contiguous() and start + run.numel() <= total
        self = torch.Tensor._make_wrapper_subclass(cls, (total,), dtype=run.dtype, device=run.device)  # pyright: ignore
        self.run = run
        self.start = start
        return self

    def __init__(self, run: torch.Tensor, start: int, total: int):
        super().__init__()

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size((self.start,)), sizes=self.run.shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Say what to write: the run, unless it is empty. Called by DCP on every rank."""
        if self.run.numel() == 0:
            return []
        data = TensorWriteData(
            chunk=self._chunk(), properties=TensorProperties.create_from_tensor(self.run), size=self.shape
        )
        return [WriteItem(index=MetadataIndex(fqn, (self.start,)), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Say what to load: the run, unless it is empty. Called by DCP on every rank."""
        return [self._chunk()] if self.run.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Hand out the run, to be written or loaded into. Called by DCP."""
        if self.run.is_cuda or self.run.untyped_storage().nbytes() == self.run.nbytes:
            return self.run
        # DCP (torch 2.7) clones a part of a longer storage, and keeps the clones of all runs until the file is written.
        # Through numpy the part gets a storage of its own, in the same memory.
        as_bytes = torch.from_numpy(self.run.detach().view(torch.uint8).numpy())
        return as_bytes.view(self.run.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow ``detach``; refuse everything else, because the other elements are elsewhere."""
        if func is torch.ops.aten.detach.default:  # pyright: ignore[reportAttributeAccessIssue]
            return args[0]
        raise NotImplementedError(f'{func}: this rank has only a part of the tensor')
