"""What is written: which tensors, under which names, in which dtype."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import torch

from composer_ds.checkpoint.source import CheckpointSource, StoredTensor
from composer_ds.consolidate.huggingface import HuggingFaceFiles
from composer_ds.errors import CheckpointError

__all__ = ['DTYPES', 'Weight', 'Weights', 'choose']

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


@dataclass(frozen=True)
class Weight:
    """A tensor to write.

    Args:
        name (str): To write it under.
        stored (StoredTensor): What to read.
        dtype (torch.dtype): To write it in.
    """

    name: str
    stored: StoredTensor
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """How much is written."""
        return self.stored.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Weights:
    """All tensors to write.

    Args:
        tensors (list[Weight]): Each once, in the order of the model.
        tied (dict[str, str]): Further names, and the one in ``tensors``.
    """

    tensors: list[Weight]
    tied: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """How much is written."""
        return sum(weight.size_bytes for weight in self.tensors)

    @property
    def main_dtype(self) -> torch.dtype | None:
        """The floating-point dtype of most elements, if any."""
        counts: Counter[torch.dtype] = Counter()
        for weight in self.tensors:
            if weight.dtype.is_floating_point:
                counts[weight.dtype] += weight.stored.shape.numel()
        return counts.most_common(1)[0][0] if counts else None


def choose(source: CheckpointSource, dtype: torch.dtype | None, huggingface: HuggingFaceFiles | None) -> Weights:
    """Decide what is written.

    Args:
        source (CheckpointSource): The checkpoint.
        dtype (torch.dtype | None): For parameters of a floating-point dtype; buffers keep theirs where the checkpoint
            tells them apart. None keeps what is stored: fp32 for all that was trained.
        huggingface (HuggingFaceFiles | None): To write under the names of the Hugging Face model; None keeps those of
            Composer's model.

    Returns:
        Weights: All tensors.

    Raises:
        CheckpointError: When there would be none.
    """
    names = [*source.tensors, *source.tied]
    written = huggingface.names(names) if huggingface is not None else {name: name for name in names}
    tensors: dict[str, Weight] = {}
    tied: dict[str, str] = {}
    # In the order of the checkpoint: of the names of a tied tensor, the first that is written at all keeps it.
    for name, original in written.items():
        stored = source.tensors[source.tied.get(original, original)]
        if stored.name in tensors:
            tied[name] = tensors[stored.name].name
            continue
        converts = dtype is not None and stored.dtype.is_floating_point and stored.kind != 'buffer'
        tensors[stored.name] = Weight(name, stored, dtype if converts and dtype is not None else stored.dtype)
    if not tensors:
        raise CheckpointError(f'{source.path} holds no weights of the adapter that its configuration describes')
    return Weights(list(tensors.values()), tied)
