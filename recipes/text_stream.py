"""Packed sequences in files of ``mosaicml-streaming``: for texts that do not fit into memory, or lie in object stores.

::

    python -m recipes.text_stream my_text.txt my_stream
    composer -n 2 run.py -f yamls/gpt.yaml data.stream=my_stream

Streaming reads what is trained on next, and a checkpoint knows the position, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from streaming import MDSWriter, StreamingDataset  # pyright: ignore[reportMissingImports]
from transformers import ByT5Tokenizer

from composer_ds.errors import ConfigError
from recipes.packed_text import encode, pack, read_paragraphs, split_paragraphs

__all__ = ['InOrder', 'PackedStream', 'main', 'open_split', 'write']

# The tokens of all paragraphs one after another, how many each paragraph has, and to which length they were packed.
COLUMNS = {'tokens': 'ndarray:uint16', 'lengths': 'ndarray:uint32', 'sequence_length': 'int'}


class PackedStream(StreamingDataset):
    """Packed sequences of one split.

    Iterated over, it gives this rank's share in streaming's order; it also gives any sequence by its index.
    Its arguments are those of ``streaming.StreamingDataset``.
    """

    def __getitem__(self, at: int) -> list[list[int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reads a sequence.

        Args:
            at (int): From 0 to ``num_samples - 1``.

        Returns:
            list[list[int]]: Tokens of each paragraph, as :func:`recipes.packed_text.pack` gave them.
        """
        sample = super().__getitem__(at)
        return [piece.tolist() for piece in np.split(sample['tokens'], np.cumsum(sample['lengths'])[:-1])]

    def sequence_length(self) -> int:
        """Reads to which length the sequences were packed.

        Returns:
            int: Tokens.
        """
        return super().__getitem__(0)['sequence_length']


class InOrder(Sequence[list[list[int]]]):
    """The sequences of a stream in the order in which they were written, for torch's samplers.

    Args:
        stream (PackedStream): The split.
    """

    def __init__(self, stream: PackedStream):
        self._stream = stream

    def __len__(self) -> int:
        return self._stream.num_samples

    def __getitem__(self, at: Any) -> Any:
        return self._stream[at]


def write(sequences: Sequence[Sequence[Sequence[int]]], out: str, sequence_length: int) -> None:
    """Writes a split, in one process.

    Args:
        sequences (Sequence[Sequence[Sequence[int]]]): From :func:`recipes.packed_text.pack`; tokens below 65,536.
        out (str): A folder that is empty or not there yet, or a URI to which streaming can upload.
        sequence_length (int): To which they were packed.
    """
    with MDSWriter(out=out, columns=COLUMNS, hashes=['xxh64']) as writer:
        for sequence in sequences:
            tokens = np.array([token for paragraph in sequence for token in paragraph], dtype=np.uint16)
            lengths = np.array([len(paragraph) for paragraph in sequence], dtype=np.uint32)
            writer.write({'tokens': tokens, 'lengths': lengths, 'sequence_length': sequence_length})


def open_split(stream: str, split: str, *, cache: str | None, sequence_length: int, **arguments: Any) -> PackedStream:
    """Opens a split. Collective: the ranks of a node share what streaming reads.

    Args:
        stream (str): The folder or the URI that ``python -m recipes.text_stream`` has written.
        split (str): ``train`` or ``validation``.
        cache (str | None): The folder for what is downloaded from a URI.
        sequence_length (int): To which the sequences must have been packed.
        **arguments (Any): More arguments of ``streaming.StreamingDataset``.

    Returns:
        PackedStream: The split.

    Raises:
        ConfigError: On every rank: there is no such folder, a URI has no cache, or the length is another.
    """
    if '://' in stream:
        if cache is None:
            raise ConfigError(
                f'data.stream is {stream!r}, and what is downloaded from there has to lie somewhere. Write '
                'data.stream_cache=FOLDER, on a disk of each node.'
            )
        place = {'remote': f'{stream}/{split}', 'local': f'{cache}/{split}'}
    elif not (Path(stream) / split / 'index.json').exists():
        raise ConfigError(
            f'data.stream is {stream!r}, which has no file {split}/index.json. Write the stream with: '
            f'python -m recipes.text_stream my_text.txt {stream}'
        )
    else:
        place = {'local': f'{stream}/{split}'}
    opened = PackedStream(**place, **arguments)
    written = opened.sequence_length()
    if written != sequence_length:
        raise ConfigError(
            f'data.sequence_length is {sequence_length}, and the sequences of {stream} were packed to {written} '
            f'tokens. Write data.sequence_length={written}, or write the stream anew with --sequence-length '
            f'{sequence_length}.'
        )
    return opened


def main(
    text: Annotated[str, typer.Argument(help='a text file in UTF-8; blank lines part its paragraphs')],
    out: Annotated[str, typer.Argument(help='a new folder, or the URI of an object store')],
    sequence_length: Annotated[int, typer.Option(min=2, help='tokens of a sequence')] = 256,
    validation_fraction: Annotated[float, typer.Option(help='share of the paragraphs that is not trained on')] = 0.05,
    seed: Annotated[int, typer.Option(help='seed of the split')] = 17,
) -> None:
    """Write a text as two streams of packed sequences, OUT/train and OUT/validation."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    parts = split_paragraphs(read_paragraphs(text), seed=seed, validation_fraction=validation_fraction)
    for split, part in zip(('train', 'validation'), parts, strict=True):
        sequences = pack((encode(one, tokenizer) for one in part), sequence_length)
        if not sequences:
            raise typer.BadParameter(f'no paragraph is left for {split}; give a longer text or another fraction')
        write(sequences, f'{out}/{split}', sequence_length)
        typer.echo(f'{out}/{split}: {len(sequences):,} sequences of up to {sequence_length} tokens')


if __name__ == '__main__':
    typer.run(main)
