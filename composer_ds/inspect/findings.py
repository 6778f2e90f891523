"""What there is to know about a checkpoint, or a folder of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_ds.checkpoint.source import CheckpointSource, StoredTensor
from composer_ds.checkpoint.sources import checkpoints_in, open_source
from composer_ds.errors import CheckpointError
from composer_ds.sharded.manifest import LATEST
from composer_ds.sharded.source import ShardedSource

__all__ = ['Findings', 'Listed', 'bytes_to_verify', 'dtype_name', 'list_folder', 'look', 'verify', 'weights_bytes']


@dataclass
class Findings:
    """About one checkpoint.

    Args:
        source (CheckpointSource): It.
        missing (list[str]): What it lacks.
        damaged (list[str] | None): What is damaged; None when nobody looked.
    """

    source: CheckpointSource
    missing: list[str]
    damaged: list[str] | None = None

    @property
    def is_good(self) -> bool:
        """Whether nothing is known to be missing or damaged."""
        return not self.missing and not self.damaged

    def totals(self) -> dict[str, dict[str, int]]:
        """Add up the tensors.

        Returns:
            dict[str, dict[str, int]]: ``'tensors'``, ``'elements'`` and ``'size_bytes'`` of all ``'weights'``, of each
                kind of them, and of the ``'optimizer state'``.
        """
        totals: dict[str, dict[str, int]] = {}
        for tensor in self.source.tensors.values():
            for group in ('weights', tensor.kind):
                _add(totals, group, tensor.shape.numel(), weights_bytes(tensor))
            for dtype in tensor.state.values():
                _add(totals, 'optimizer state', tensor.shape.numel(), tensor.shape.numel() * dtype.itemsize)
        return totals

    def as_json(self) -> dict[str, Any]:
        """Say the same in plain values.

        Returns:
            dict[str, Any]: For ``json.dump``.
        """
        return {
            'path': str(self.source.path),
            'format': self.source.format,
            'facts': self.source.facts,
            'complete': not self.missing,
            'missing': self.missing,
            'verified': self.damaged is not None,
            'damaged': self.damaged or [],
            'totals': self.totals(),
            'tensors': [
                {
                    'name': tensor.name,
                    'shape': list(tensor.shape),
                    'dtype': dtype_name(tensor.dtype),
                    'kind': tensor.kind,
                    'size_bytes': weights_bytes(tensor),
                    'optimizer_state': {key: dtype_name(dtype) for key, dtype in tensor.state.items()},
                }
                for tensor in self.source.tensors.values()
            ],
            'tied': self.source.tied,
        }


def _add(totals: dict[str, dict[str, int]], group: str, elements: int, size_bytes: int) -> None:
    sums = totals.setdefault(group, {'tensors': 0, 'elements': 0, 'size_bytes': 0})
    sums['tensors'] += 1
    sums['elements'] += elements
    sums['size_bytes'] += size_bytes


def dtype_name(dtype: Any) -> str:
    """Return a dtype as people write it.

    Args:
        dtype (Any): Of torch.

    Returns:
        str: Such as ``'bfloat16'``.
    """
    return str(dtype).removeprefix('torch.')


def weights_bytes(tensor: StoredTensor) -> int:
    """Return how large a tensor is, without its optimizer state.

    Args:
        tensor (StoredTensor): The tensor.

    Returns:
        int: In bytes.
    """
    return tensor.shape.numel() * tensor.dtype.itemsize


def look(path: str | Path, trusted: bool = False) -> Findings:
    """Open a checkpoint and see whether all files are there.

    Args:
        path (str | Path): The checkpoint.
        trusted (bool): Whether to unpickle classes that are not harmless. Default: False.

    Returns:
        Findings: Without a look at the content of the files.

    Raises:
        CheckpointError: When it cannot be opened.
    """
    source = open_source(path, trusted)
    return Findings(source, source.missing())


def bytes_to_verify(source: CheckpointSource) -> int | None:
    """Return how much a verification reads.

    Args:
        source (CheckpointSource): The checkpoint.

    Returns:
        int | None: In bytes; None where its progress cannot be told.
    """
    if not isinstance(source, ShardedSource):
        return None
    return sum(entry.size_bytes for entry in source.manifest.files.values())


def verify(findings: Findings, tell: Callable[[int], None]) -> None:
    """Read everything and compare it with its checksums.

    Args:
        findings (Findings): Learns what is damaged.
        tell (Callable[[int], None]): Called with the number of bytes that were read since, where that is known.
    """
    source: Any = findings.source
    findings.damaged = source.damaged(tell) if isinstance(source, ShardedSource) else source.damaged()


@dataclass
class Listed:
    """One of several checkpoints.

    Args:
        path (Path): The checkpoint.
        is_latest (bool): Whether it is the one that a run resumes from.
        size_bytes (int): Of its files.
        findings (Findings | None): None when it cannot be opened.
        problem (str): Why it cannot be opened, or what it lacks.
        is_unfinished (bool): Whether it has the temporary name of a save: one that goes on, or was killed.
    """

    path: Path
    is_latest: bool
    size_bytes: int
    findings: Findings | None = None
    problem: str = ''
    is_unfinished: bool = field(default=False)

    def as_json(self) -> dict[str, Any]:
        """Say the same in plain values.

        Returns:
            dict[str, Any]: For ``json.dump``.
        """
        source = self.findings.source if self.findings is not None else None
        return {
            'path': str(self.path),
            'latest': self.is_latest,
            'size_bytes': self.size_bytes,
            'format': source.format if source else None,
            'facts': source.facts if source else {},
            'complete': not self.problem,
            'problem': self.problem or None,
            'being_written': self.is_unfinished,
        }


def list_folder(path: str | Path, trusted: bool = False) -> list[Listed]:
    """Look at all checkpoints of a folder, without a look at the content of their files.

    Args:
        path (str | Path): The folder.
        trusted (bool): Whether to unpickle classes that are not harmless. Default: False.

    Returns:
        list[Listed]: In the order of the numbers in their names; none for a path that is a checkpoint itself.
    """
    folder = Path(path)
    latest = _latest(folder)
    found = []
    for one in checkpoints_in(folder):
        files = [one] if one.is_file() else [inner for inner in one.rglob('*') if inner.is_file()]
        entry = Listed(one, one.name in latest, sum(file.stat().st_size for file in files))
        entry.is_unfinished = one.name.startswith('.incomplete-')
        try:
            if entry.is_unfinished:
                entry.problem = 'has the temporary name of a save, which goes on or was killed'
            else:
                entry.findings = look(one, trusted)
                entry.problem = '; '.join(entry.findings.missing)
        except CheckpointError as error:
            entry.problem = re.sub(rf'^{re.escape(str(one))} ', '', str(error))
        found.append(entry)
    return found


def _latest(folder: Path) -> set[str]:
    """Find what the text file ``latest`` names, and where Composer's symlinks ``latest-rank0.pt`` point."""
    names = {one.resolve().name for one in folder.glob('latest*') if one.is_symlink()} if folder.is_dir() else set()
    if (folder / LATEST).is_file():
        names.add((folder / LATEST).read_text(encoding='utf-8').strip())
    return names
