"""Streaming the weights of a checkpoint into files that others read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from composer_ds.checkpoint.safetensors_stream import SafetensorsStream
from composer_ds.checkpoint.source import CheckpointSource
from composer_ds.checkpoint.sources import open_source
from composer_ds.consolidate.huggingface import HuggingFaceFiles
from composer_ds.consolidate.output import Output
from composer_ds.consolidate.torch_file import TorchFile
from composer_ds.consolidate.weights import DTYPES, Weight, Weights, choose
from composer_ds.errors import CheckpointError, ConfigError

__all__ = ['Consolidated', 'consolidate']

_RUN_BYTES = 2**23
"""How much is read at a time. A run is held two or three times: as read, converted, and on its way to the disk."""


@dataclass
class Consolidated:
    """What was written.

    Args:
        source (CheckpointSource): From what.
        files (list[Path]): All files.
        weights (Weights): What is in them.
        remarks (list[str]): Sentences that the user should read.
    """

    source: CheckpointSource
    files: list[Path]
    weights: Weights
    remarks: list[str] = field(default_factory=list)


class Progress(Protocol):
    """Hears how far it is."""

    def begin(self, total_bytes: int) -> None:
        """Called once.

        Args:
            total_bytes (int): How much will be written.
        """
        ...

    def advance(self, size_bytes: int) -> None:
        """Called after every run.

        Args:
            size_bytes (int): How much was written since.
        """
        ...


class _NoProgress:
    def begin(self, total_bytes: int) -> None:
        pass

    def advance(self, size_bytes: int) -> None:
        pass


def consolidate(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str | int = '5GB',
    overwrite: bool = False,
    trusted: bool = False,
    progress: Progress | None = None,
) -> Consolidated:
    """Write the weights of a checkpoint for inference or publishing. On one process, without a GPU.

    Args:
        checkpoint (str | Path): Of any format that :func:`~composer_ds.checkpoint.sources.open_source` knows.
        out (str | Path): A folder, for safetensors files; or a file whose name ends in ``.pt``, which a Trainer loads
            with ``load_weights_only=True``.
        dtype (str | None): ``'fp32'``, ``'bf16'`` or ``'fp16'``. None writes what is stored: the fp32 master weights of
            what was trained. Default: None.
        max_shard_size (str | int): Of a safetensors file: such as ``'500MB'``, or bytes. Default: ``'5GB'``.
        overwrite (bool): Whether to replace weights that are there. Default: False.
        trusted (bool): Whether to unpickle classes that are not harmless, which can run any code. Default: False.
        progress (Progress | None): Hears how far it is. Default: None.

    Returns:
        Consolidated: What was written.

    Raises:
        ConfigError: When something is there already, or an argument is wrong. Nothing is written then.
        CheckpointError: When the checkpoint is incomplete or damaged, or the disk is full. Nothing is left then.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f'dtype={dtype!r}: one of {", ".join(DTYPES)}, or none for what is stored')
    output = Output(Path(out), overwrite)
    source = open_source(checkpoint, trusted)
    output.keep_apart_from(source)
    missing = source.missing()
    if missing:
        raise CheckpointError(f'{source.path} is not complete: {"; ".join(missing)}. Copy it again, or take another.')
    integrations: dict[str, Any] = getattr(source, 'integrations', {})
    # Sources that compare what they read with its checksum say so; of others everything is read twice.
    damaged = [] if getattr(source, 'checks_what_it_reads', False) else source.damaged()
    if damaged:
        raise CheckpointError(f'{source.path} is damaged: {"; ".join(damaged)}. Copy it again, or take another.')
    found = integrations.get('huggingface')
    huggingface = HuggingFaceFiles(found) if found and not output.is_file else None
    weights = choose(source, None if dtype is None else DTYPES[dtype], huggingface)
    output.require_room(weights.size_bytes)
    progress = progress or _NoProgress()
    progress.begin(weights.size_bytes)
    with output.being_written() as folder:
        if output.is_file:
            rest = {'integrations': integrations} if integrations else {}
            target: Any = TorchFile(folder / output.path.name, _listed(weights), tied=weights.tied, rest=rest)
        else:
            target = _safetensors(folder, weights, max_shard_size, huggingface.base_name if huggingface else 'model')
        with target:
            for weight in weights.tensors:
                for run in _runs(source, weight):
                    target.write(run)
                    progress.advance(run.numel() * run.element_size())
        if huggingface is not None:
            huggingface.write(folder, weights.main_dtype)
        names = sorted(path.name for path in folder.iterdir())
    place = output.path.parent if output.is_file else output.path
    return Consolidated(source, [place / name for name in names], weights, _remarks(source, output, huggingface))


def _listed(weights: Weights) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(weight.name, weight.stored.shape, weight.dtype) for weight in weights.tensors]


def _safetensors(folder: Path, weights: Weights, max_shard_size: str | int, base_name: str) -> SafetensorsStream:
    # The names of tied tensors as safetensors.torch.save_model notes them, for its load_model.
    metadata = {'format': 'pt', **weights.tied}
    try:
        return SafetensorsStream(
            folder, _listed(weights), max_shard_size=max_shard_size, metadata=metadata, base_name=base_name
        )
    except ValueError as error:
        raise ConfigError(f'max_shard_size={max_shard_size}: write a size such as 5GB or 500MB ({error})') from error


def _runs(source: CheckpointSource, weight: Weight) -> Iterator[torch.Tensor]:
    stored = weight.stored
    length = _RUN_BYTES // max(stored.dtype.itemsize, weight.dtype.itemsize)
    total = stored.shape.numel()
    for start in range(0, total, length):
        run = source.read(stored.name, start, min(length, total - start))
        converted = run.to(weight.dtype)
        if weight.dtype == torch.float16 and run.dtype != torch.float16:
            _require_finite(weight, run, converted)
        yield converted


def _require_finite(weight: Weight, run: torch.Tensor, converted: torch.Tensor) -> None:
    largest = run.abs().max().item()
    if converted.isinf().any() and largest != float('inf'):
        raise CheckpointError(
            f'{weight.stored.name} has elements up to {largest:.3g}, and fp16 ends at 65504: they would become '
            'infinite. Write bf16 (--dtype bf16) or fp32.'
        )


def _remarks(source: CheckpointSource, output: Output, huggingface: HuggingFaceFiles | None) -> list[str]:
    if output.is_file:
        return []
    if huggingface is None:
        return [
            'The checkpoint describes no Hugging Face model, so there is no config.json: read the weights with '
            'safetensors.torch.load_file or load_model.'
        ]
    if huggingface.peft_config is not None:
        return ['These are the weights of the adapter alone; peft.PeftModel.from_pretrained puts it on the base model.']
    return [] if huggingface.has_tokenizer else ['The checkpoint holds no tokenizer.']
