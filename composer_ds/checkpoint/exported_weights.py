"""Which tensors of a running model are exported, under which names, and streaming them to rank 0's files."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel

from composer_ds.arrivals import begin_copy, in_turn
from composer_ds.checkpoint.huggingface_files import HuggingFaceFiles
from composer_ds.checkpoint.safetensors_stream import SafetensorsStream
from composer_ds.consolidation import PendingTensor, consolidating_later
from composer_ds.errors import CheckpointError
from composer_ds.faces import ModelFace

__all__ = ['DTYPES', 'PART_BYTES', 'ExportedWeights', 'LiveTensors']

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}

PART_BYTES = 2**24
"""How much travels at a time. Rank 0 holds two such parts, whatever the size of a tensor; the others send two."""


@dataclass
class ExportedWeights:
    """What is written. Decided on rank 0, and alike on all ranks.

    Args:
        tensors (list[tuple[str, torch.Size, torch.dtype]]): Name, shape and dtype of each, tied ones once.
        sources (list[str]): For each, its name among the :class:`LiveTensors`.
        tied (dict[str, str]): Further names, and the one in ``tensors``.
        left_out (list[str]): Names of what is no tensor, which safetensors cannot hold.
    """

    tensors: list[tuple[str, torch.Size, torch.dtype]]
    sources: list[str]
    tied: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


class LiveTensors:
    """The parameters and persistent buffers of a model, by name: whole, or yet to be put together.

    Collective: made on every rank.

    Args:
        model (Any): Composer's ``state.model``: a face, or any other model whose every rank holds it whole.
    """

    def __init__(self, model: Any):
        self.model = _unwrapped(model)
        self.huggingface = HuggingFaceFiles.of(self.model)
        self._is_first = dist.get_global_rank() == 0
        with consolidating_later():
            self.tensors = self._named()

    def _named(self) -> dict[str, Any]:
        if self.huggingface is None:
            return dict(self.model.state_dict())
        # Not through Composer's model: that leaves out what Composer does not need of a PEFT model.
        inner = self.huggingface.model
        if not isinstance(self.model, ModelFace):
            return dict(inner.state_dict())
        with self.model._empty.shown():
            named = inner.state_dict(keep_vars=True)
        whole = functools.cache(self.model._whole)  # once for each of the names of a tied tensor
        return {name: whole(value) if torch.is_tensor(value) else value for name, value in named.items()}

    def plan(self, dtype: torch.dtype) -> ExportedWeights:
        """Decide what is written. Called on rank 0.

        Args:
            dtype (torch.dtype): For parameters of a floating-point dtype; buffers keep theirs.

        Returns:
            ExportedWeights: To be given to every rank.

        Raises:
            CheckpointError: When a PEFT model's tensors are none of its own.
        """
        hf = self.huggingface
        names = {name: name for name in self.tensors} if hf is None else hf.names_to_write(self.tensors)
        module = self.model if hf is None else hf.model
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        exported = ExportedWeights([], [])
        first: dict[Any, str] = {}
        for name, source in names.items():
            tensor = self.tensors[source]
            if not torch.is_tensor(tensor):
                exported.left_out.append(name)
            elif (key := _identity(tensor)) in first:
                exported.tied[name] = first[key]
            else:
                first[key] = name
                converts = tensor.is_floating_point() and source not in buffers
                exported.tensors.append((name, tensor.shape, dtype if converts else tensor.dtype))
                exported.sources.append(source)
        return exported

    def send(self, exported: ExportedWeights, stream: SafetensorsStream | None) -> Exception | None:
        """Bring every tensor to rank 0, part by part, and write it there.

        Collective. An error with the file is returned and not raised, because the other ranks are in the middle of
        sending: rank 0 takes what they send.

        Args:
            exported (ExportedWeights): Alike on all ranks.
            stream (SafetensorsStream | None): On rank 0.

        Returns:
            Exception | None: What went wrong, on rank 0.
        """
        error: Exception | None = None
        arriving = in_turn(begin for _, begin in self._parts(exported))
        for (number, _), part in zip(self._parts(exported), arriving, strict=True):
            if part is None or stream is None or error is not None:
                continue
            try:
                _require_finite(exported.tensors[number], part)
                stream.write(part)
            except Exception as raised:
                error = raised
        return error

    def _parts(self, exported: ExportedWeights) -> Iterator[tuple[int, Any]]:
        for number, (source, (_, shape, dtype)) in enumerate(zip(exported.sources, exported.tensors, strict=True)):
            tensor = self.tensors[source]
            begin = tensor.begin if isinstance(tensor, PendingTensor) else begin_copy(tensor.detach(), self._is_first)
            length = PART_BYTES // dtype.itemsize
            for start in range(0, shape.numel(), length):
                numel = min(length, shape.numel() - start)
                yield number, functools.partial(begin, start=start, numel=numel, dtype=dtype)


def _identity(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, PendingTensor) or tensor.numel() == 0:
        return id(tensor)
    # Tied tensors of a plain model are objects of their own in its state dict, in the same memory.
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _unwrapped(model: Any) -> Any:
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, '_orig_mod'):  # compiled by torch
            model = model._orig_mod
        else:
            return model


def _require_finite(described: tuple[str, torch.Size, torch.dtype], part: torch.Tensor) -> None:
    name, _, dtype = described
    if dtype == torch.float16 and part.isinf().any():
        raise CheckpointError(
            f'{name} has elements that fp16 cannot hold: it ends at 65504, and they would become infinite. '
            "dtype='bf16' and dtype='fp32' reach further"
        )
