"""Progress bars over bytes, on a terminal only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ['BytesBar', 'bar_if_long', 'bytes_bar']

_LARGE_BYTES = 2**30
_LONG_SEC = 10.0


class BytesBar:
    """Shows how far something is.

    Args:
        what (str): What is being done.
        at_once (bool): Whether to appear at once, or when there turns out to be much to do. Default: True.
        allowed (bool): Whether to appear at all. Default: True.
    """

    def __init__(self, what: str, at_once: bool = True, allowed: bool = True):
        self._what = what
        self._allowed = allowed
        self._total_bytes: int | None = None
        self._done_bytes = 0
        self._started = time.monotonic()
        self._progress: Progress | None = None
        if at_once:
            self._show()

    def begin(self, total_bytes: int | None) -> None:
        """Tell how much there is to do.

        Args:
            total_bytes (int | None): In all; None where nobody knows.
        """
        self._total_bytes = total_bytes
        if total_bytes is not None and total_bytes >= _LARGE_BYTES:
            self._show()
        if self._progress is not None:
            self._progress.update(self._task, total=total_bytes)

    def advance(self, size_bytes: int) -> None:
        """Tell that something was done.

        Args:
            size_bytes (int): How much, since the last call.
        """
        self._done_bytes += size_bytes
        if self._progress is not None:
            self._progress.advance(self._task, size_bytes)
        elif self._allowed and time.monotonic() - self._started > _LONG_SEC:
            self._show()

    def end(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
        self._allowed, self._progress = False, None

    def _show(self) -> None:
        if not self._allowed or self._progress is not None:
            return
        # Imported and made here: most files are written before anybody would look for a bar.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        if not console.is_terminal:
            self._allowed = False
            return
        columns = (
            TextColumn('{task.description}', markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        progress = Progress(*columns, console=console, transient=True)
        self._task = progress.add_task(self._what, total=self._total_bytes, completed=self._done_bytes)
        progress.start()
        self._progress = progress


@contextmanager
def bytes_bar(what: str) -> Iterator[BytesBar]:
    """Show a bar on stderr, which vanishes at the end; nothing where stderr is no terminal.

    Args:
        what (str): What is being done.

    Yields:
        BytesBar: To be told how far it is.
    """
    bar = BytesBar(what)
    try:
        yield bar
    finally:
        bar.end()


@contextmanager
def bar_if_long(what: str) -> Iterator[BytesBar]:
    """Show such a bar on rank 0 where there is much to do: 1 GiB and more, or what has taken 10 s already.

    Not in a thread beside the main one: what goes on in the background would disturb the bar of the training.

    Args:
        what (str): What is being done.

    Yields:
        BytesBar: To be told how far it is.
    """
    # By the variable of the launcher: commands without ranks use this module, and Composer takes seconds to import.
    first = os.environ.get('RANK', '0') == '0'
    bar = BytesBar(what, at_once=False, allowed=first and threading.current_thread() is threading.main_thread())
    try:
        yield bar
    finally:
        bar.end()
