"""The files of a checkpoint, each mapped when something in it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from composer_ds.deepspeed_format.layout import Keys, Piece
from composer_ds.deepspeed_format.safe_loading import load
from composer_ds.errors import CheckpointError

__all__ = ['Shards']

# Pages of a mapped file count as memory of the process until the mapping goes, although the system may take them back
# at any time. A new mapping costs a few milliseconds.
_NEW_MAPPINGS_AFTER_BYTES = 32 * 2**20
# A process may have only so many mappings (65,530 on Linux), and a run many ranks.
_MOST_OPEN = 256


class Shards:
    """Reads tensors from the files of a folder.

    Args:
        folder (Path): Where they are.
        trusted (bool): Whether their pickles may run code.
    """

    def __init__(self, folder: Path, trusted: bool):
        self.folder = folder
        self.trusted = trusted
        self._check: Callable[[str, Any], None] = lambda shard, content: None
        self._contents: dict[str, Any] = {}
        self._checked: set[str] = set()
        self._touched: set[str] = set()
        self._touched_bytes = 0

    def check_with(self, check: Callable[[str, Any], None]) -> None:
        """Have each file checked when it is opened for the first time; those that are open, now.

        Args:
            check (Callable[[str, Any], None]): Called with the name and the content of the file; may raise.
        """
        self._check = check
        for shard, content in self._contents.items():
            check(shard, content)

    def content(self, shard: str) -> Any:
        """Open a file, or return what is open.

        Args:
            shard (str): Its name.

        Returns:
            Any: Its content. Keep no tensor of it: that would keep the mapping.

        Raises:
            CheckpointError: When it is missing, damaged, refused, or of another run.
        """
        if shard not in self._contents:
            content = load(self.folder / shard, self.trusted)
            if shard not in self._checked:
                try:
                    self._check(shard, content)
                except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                    raise CheckpointError(
                        f'{self.folder / shard} is not laid out as the other files of the checkpoint: '
                        f'{type(error).__name__}: {error}'
                    ) from error
                self._checked.add(shard)
            if len(self._contents) == _MOST_OPEN:
                del self._contents[next(iter(self._contents))]
            self._contents[shard] = content
        return self._contents[shard]

    def tensor(self, shard: str, keys: Keys) -> torch.Tensor:
        """Find a tensor.

        Args:
            shard (str): The file.
            keys (Keys): Where in it.

        Returns:
            torch.Tensor: Mapped; nothing is read yet.

        Raises:
            CheckpointError: When there is none.
        """
        value = self.content(shard)
        try:
            for key in keys:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            value = None
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f'{self.folder / shard} has no tensor under {" > ".join(map(str, keys))}.')
        return value.detach()

    def read(self, pieces: Iterable[Piece], numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Read runs into one tensor.

        Args:
            pieces (Iterable[Piece]): Where they are, in order.
            numel (int): Their lengths together.
            dtype (torch.dtype): Of the result, and of what is stored.

        Returns:
            torch.Tensor: Shape ``(numel,)``, with memory of its own.

        Raises:
            CheckpointError: When a file is missing, or holds less than it should.
        """
        result = torch.empty(numel, dtype=dtype)
        done = 0
        most = _NEW_MAPPINGS_AFTER_BYTES // max(1, result.element_size())
        for piece in pieces:
            for begin in range(0, piece.numel, most):
                length = min(most, piece.numel - begin)
                stored = self.tensor(piece.shard, piece.keys)
                if stored.numel() < piece.start + piece.numel or stored.dtype != dtype:
                    raise CheckpointError(
                        f'{self.folder / piece.shard} holds {stored.numel():,} elements of {stored.dtype} under '
                        f'{" > ".join(map(str, piece.keys))}; {piece.start + piece.numel:,} of {dtype} were expected, '
                        'from the shapes of the parameters.'
                    )
                result[done : done + length] = stored.reshape(-1)[piece.start + begin :][:length]
                del stored
                done += length
                self._touch(piece.shard, length * result.element_size())
        assert done == numel
        return result

    def _touch(self, shard: str, size_bytes: int) -> None:
        self._touched.add(shard)
        self._touched_bytes += size_bytes
        if self._touched_bytes > _NEW_MAPPINGS_AFTER_BYTES:
            for touched in self._touched:
                self._contents.pop(touched, None)
            self._touched.clear()
            self._touched_bytes = 0
