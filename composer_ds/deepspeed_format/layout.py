"""Where the elements of a tensor are: pure arithmetic over the ways in which DeepSpeed cuts tensors.

A *place* answers which runs of which stored tensors make up a run of a parameter, or of a part of its optimizer state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

__all__ = ['CutSingly', 'CutTogether', 'Keys', 'Piece', 'Place', 'Whole', 'part_numel']

Keys = tuple['str | int', ...]
"""The path to a stored tensor through the dictionaries and lists of a shard."""


@dataclass(frozen=True)
class Piece:
    """A run of a stored tensor.

    Args:
        shard (str): The name of the file in the folder of the checkpoint.
        keys (Keys): Where in it the tensor is.
        start (int): Where the run begins in that tensor, flattened.
        numel (int): Its length, at least 1.
    """

    shard: str
    keys: Keys
    start: int
    numel: int


class Place(Protocol):
    """Where a tensor is."""

    def pieces(self, start: int, numel: int) -> Iterator[Piece]:
        """List the stored runs that make up a run of the tensor, in order.

        Args:
            start (int): Where the run begins in the flattened tensor.
            numel (int): Its length.

        Returns:
            Iterator[Piece]: Their lengths add up to ``numel``.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """A tensor that is stored whole.

    Args:
        shard (str): The file.
        keys (Keys): Where in it.
    """

    shard: str
    keys: Keys

    def pieces(self, start: int, numel: int) -> Iterator[Piece]:
        """See :class:`Place`.

        Args:
            start (int): Where the run begins.
            numel (int): Its length.

        Yields:
            Piece: One, unless the run is empty.
        """
        if numel:
            yield Piece(self.shard, self.keys, start, numel)


@dataclass(frozen=True)
class CutTogether:
    """Stages 1 and 2: the parameters of a group are laid one behind the other, and the whole is cut in equal parts.

    Args:
        shards (tuple[str, ...]): The file of each rank.
        keys (Keys): Where in each file its part is.
        offset (int): Where this parameter begins in the whole.
        partition_numel (int): Elements of each part, padding included.
    """

    shards: tuple[str, ...]
    keys: Keys
    offset: int
    partition_numel: int

    def pieces(self, start: int, numel: int) -> Iterator[Piece]:
        """See :class:`Place`.

        Args:
            start (int): Where the run begins.
            numel (int): Its length.

        Yields:
            Piece: One for each rank that has some of it.
        """
        position, end = self.offset + start, self.offset + start + numel
        while position < end:
            rank, within = divmod(position, self.partition_numel)
            length = min(end - position, self.partition_numel - within)
            yield Piece(self.shards[rank], self.keys, within, length)
            position += length


@dataclass(frozen=True)
class CutSingly:
    """Stage 3: every parameter is cut in equal parts, the last one padded; a rank's parts lie one behind the other.

    They fill several stored tensors, the blocks, one for each of DeepSpeed's "sub groups".

    Args:
        shards (tuple[str, ...]): The file of each rank.
        part_numel (int): Elements of each part of this parameter, padding included.
        offset (int): Where the parts of this parameter begin in a rank's blocks, laid one behind the other.
        block_starts (tuple[int, ...]): Where each block begins.
        block_keys (tuple[Keys, ...]): Where in each file each block is.
    """

    shards: tuple[str, ...]
    part_numel: int
    offset: int
    block_starts: tuple[int, ...]
    block_keys: tuple[Keys, ...]

    def pieces(self, start: int, numel: int) -> Iterator[Piece]:
        """See :class:`Place`.

        Args:
            start (int): Where the run begins.
            numel (int): Its length.

        Yields:
            Piece: At least one for each rank that has some of it.
        """
        end = start + numel
        while start < end:
            rank, within = divmod(start, self.part_numel)
            place = self.offset + within
            block = bisect_right(self.block_starts, place) - 1
            length = min(end - start, self.part_numel - within)
            if block + 1 < len(self.block_starts):
                length = min(length, self.block_starts[block + 1] - place)
            yield Piece(self.shards[rank], self.block_keys[block], place - self.block_starts[block], length)
            start += length


def part_numel(numel: int, world_size: int) -> int:
    """Return how many elements of a parameter each rank has under stage 3, padding included.

    Args:
        numel (int): Elements of the parameter.
        world_size (int): Number of ranks.

    Returns:
        int: The quotient, rounded up.
    """
    return -(-numel // world_size)
