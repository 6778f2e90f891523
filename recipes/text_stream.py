"""Packed sequences as files of ``mosaicml-streaming``: what does not fit into memory, or lies in an object store.

    python -m recipes.text_stream my_text.txt my_stream --sequence-length 256
    composer -n 2 run.py -f yamls/gpt.yaml data.stream=my_stream

Only what is trained on next is read, and a checkpoint knows the position, at another number of ranks, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from composer.core import DataSpec
from streaming import MDSWriter, StreamingDataset  # pyright: ignore[reportMissingImports]
from torch.utils.data import DataLoader

from composer_ds.errors import ConfigError

__all__ = ['PackedStream', 'build_stream_dataloader', 'open_split', 'write']

# Rows of tokens one after another, and how many each paragraph of them has.
COLUMNS = {'tokens': 'ndarray:uint16', 'lengths': 'ndarray:uint32'}
# Streaming keeps the order of the samples at every number of nodes that divides this.
CANONICAL_NODES = 64


class PackedStream(StreamingDataset):
    """Packed sequences of one split, in streaming's order when iterated over, or one by its index.

    It is made and iterated over on every rank. Arguments are those of ``streaming.StreamingDataset``.
    """

    def __getitem__(self, index: int) -> list[list[int]]:
        """Reads one sequence.

        Args:
            index (int): From 0 to ``num_samples - 1``.

        Returns:
            list[list[int]]: Tokens of each paragraph, as :func:`recipes.packed_text.pack` gave them.
        """
        sample = super().__getitem__(index)
        ends = np.cumsum(sample['lengths'])
        return [piece.tolist() for piece in np.split(sample['tokens'], ends[:-1])]


class _ByIndex(Sequence[list[list[int]]]):
    """The samples of a stream in the order they were written, for a sampler that counts none of them twice."""

    def __init__(self, stream: PackedStream):
        self._stream = stream

    def __len__(self) -> int:
        return self._stream.num_samples

    def __getitem__(self, index: Any) -> Any:
        return self._stream[index]


def write(sequences: Sequence[Sequence[Sequence[int]]], folder: str, *, sequence_length: int) -> None:
    """Writes one split. No rank talks to another; call it in one process.

    Args:
        sequences (Sequence[Sequence[Sequence[int]]]): From :func:`recipes.packed_text.pack`; tokens below 65,536.
        folder (str): A folder that is not there yet, or the URI of an object store that streaming can write to.
        sequence_length (int): To which they were packed; the file ``packed.json`` remembers it.

    Raises:
        ConfigError: There is no sequence.
    """
    if not sequences:
        raise ConfigError(f'No sequence to write to {folder}. Give a longer text, or another validation fraction.')
    longest = max(sum(map(len, sequence)) for sequence in sequences)
    assert longest <= sequence_length, 'packed to another length'
    with MDSWriter(out=folder, columns=COLUMNS, hashes=['xxh64']) as writer:
        for sequence in sequences:
            tokens = np.array([token for piece in sequence for token in piece], dtype=np.uint16)
            writer.write({'tokens': tokens, 'lengths': np.array([len(piece) for piece in sequence], dtype=np.uint32)})


def open_split(stream: str, split: str, cache: str | None, **arguments: Any) -> PackedStream:
    """Opens one split. Collective: streaming lets the ranks of a node share its files and memory.

    Args:
        stream (str): The folder that ``python -m recipes.text_stream`` has written, or its URI.
        split (str): ``train`` or ``validation``.
        cache (str | None): The folder for what is downloaded from a URI.
        **arguments (Any): More arguments of ``streaming.StreamingDataset``.

    Returns:
        PackedStream: The split.

    Raises:
        ConfigError: There is no such folder, or a URI without a cache.
    """
    if '://' in stream:
        if cache is None:
            raise ConfigError(
                f'data.stream is {stream!r}, whose files have to lie somewhere once they are downloaded. '
                'Write data.stream_cache=FOLDER, on a disk of each node.'
            )
        return PackedStream(remote=f'{stream}/{split}', local=f'{cache}/{split}', **arguments)
    if not (Path(stream) / split / 'index.json').exists():
        raise ConfigError(
            f'data.stream is {stream!r}, and there is no {split}/index.json in it. '
            'Write it with: python -m recipes.text_stream my_text.txt ' + stream
        )
    return PackedStream(local=f'{stream}/{split}', **arguments)
