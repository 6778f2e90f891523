"""A progress bar over bytes, on a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ['BytesBar', 'bytes_bar']


class BytesBar:
    """Shows how far something is.

    Args:
        progress (Progress): Of rich.
        what (str): What is being done.
    """

    def __init__(self, progress: Progress, what: str):
        self._progress = progress
        self._task = progress.add_task(what, total=None)

    def begin(self, total_bytes: int | None) -> None:
        """Tell how much there is to do.

        Args:
            total_bytes (int | None): In all; None where nobody knows.
        """
        self._progress.update(self._task, total=total_bytes)

    def advance(self, size_bytes: int) -> None:
        """Tell that something was done.

        Args:
            size_bytes (int): How much, since the last call.
        """
        self._progress.advance(self._task, size_bytes)


@contextmanager
def bytes_bar(what: str) -> Iterator[BytesBar]:
    """Show a bar on stderr, which vanishes at the end; nothing where stderr is no terminal.

    Args:
        what (str): What is being done.

    Yields:
        BytesBar: To be told how far it is.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn('{task.description}'), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield BytesBar(progress, what)
