"""Where DeepSpeed puts the elements of a parameter. The oracle is to flatten, pad and cut tensors as it does."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_ds.deepspeed_format.layout import CutSingly, CutTogether, Whole, part_numel

SIZES = st.lists(st.integers(0, 23), min_size=1, max_size=6)


def _parameters(sizes: list[int]) -> list[torch.Tensor]:
    starts = [1000.0 * (index + 1) for index in range(len(sizes))]
    return [start + torch.arange(size) for start, size in zip(starts, sizes, strict=True)]


def _read(place, stored, start: int, numel: int) -> torch.Tensor:
    """``stored`` has the tensors by file and key."""
    pieces = list(place.pieces(start, numel))
    assert all(piece.numel > 0 for piece in pieces)
    runs = [stored[piece.shard, piece.keys][piece.start :][: piece.numel] for piece in pieces]
    assert [run.numel() for run in runs] == [piece.numel for piece in pieces]
    return torch.cat([torch.empty(0), *runs])


def _runs(size: int) -> list[tuple[int, int]]:
    return [(start, end - start) for start in range(size + 1) for end in range(start, size + 1)]


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 5), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_cut_together(sizes, world_size, gaps):
    parameters = _parameters(sizes)
    laid_out = [
        part for value, gap in zip(parameters, gaps, strict=False) for part in (value, torch.full((gap,), -1.0))
    ]
    whole = torch.cat(laid_out)
    partition = math.ceil(max(1, whole.numel()) / (2 * world_size)) * 2  # the alignment of stages 1 and 2
    whole = torch.cat([whole, torch.full((partition * world_size - whole.numel(),), -2.0)])
    files = tuple(f'rank{rank}' for rank in range(world_size))
    stored = {(file, ('a', 0)): part for file, part in zip(files, whole.split(partition), strict=True)}
    offset = 0
    for value, gap in zip(parameters, gaps, strict=False):
        place = CutTogether(files, ('a', 0), offset, partition)
        for start, numel in _runs(value.numel()):
            assert torch.equal(_read(place, stored, start, numel), value[start : start + numel])
        offset += value.numel() + gap


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 5), st.integers(1, 6))
def test_cut_singly(sizes, world_size, per_block):
    parameters = _parameters(sizes)
    files = tuple(f'rank{rank}' for rank in range(world_size))
    parts: list[list[torch.Tensor]] = [[] for _ in files]
    for value in parameters:
        part = math.ceil(value.numel() / world_size)
        padded = torch.cat([value, torch.full((part * world_size - value.numel(),), -1.0)])
        for rank in range(world_size):
            parts[rank].append(padded[rank * part :][:part])
    # Blocks of some parameters each, as DeepSpeed's sub groups.
    blocks = range(math.ceil(len(sizes) / per_block))
    stored = {
        (file, ('a', block)): torch.cat(parts[rank][block * per_block :][:per_block])
        for rank, file in enumerate(files)
        for block in blocks
    }
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + stored[files[0], ('a', block)].numel())
    offset = 0
    for value in parameters:
        part = part_numel(value.numel(), world_size)
        place = CutSingly(files, part, offset, tuple(starts[:-1]), tuple(('a', block) for block in blocks))
        for start, numel in _runs(value.numel()):
            assert torch.equal(_read(place, stored, start, numel), value[start : start + numel])
        offset += part


def test_whole():
    assert list(Whole('file', ('a', 'b')).pieces(3, 0)) == []
    (piece,) = Whole('file', ('a', 'b')).pieces(3, 4)
    assert (piece.shard, piece.keys, piece.start, piece.numel) == ('file', ('a', 'b'), 3, 4)
