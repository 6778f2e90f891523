"""Errors that all ranks hear of: what goes wrong on one rank is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from composer_ds.errors import CheckpointError

__all__ = ['agreeing', 'cause_of']


@contextmanager
def agreeing(group: dist.ProcessGroup | None, report: Callable[[BaseException], str]) -> Iterator[None]:
    """Raise on every rank what goes wrong inside on one.

    Collective. Inside, a rank that fails alone must not leave others in a collective.

    Args:
        group (dist.ProcessGroup | None): Of all ranks; None for the default one.
        report (Callable[[BaseException], str]): Puts an error into words.

    Raises:
        CheckpointError: On every rank, with the words of the first rank that failed.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as raised:  # DCP's is no Exception (torch 2.7)
        error = raised
    reports: list[Any] = [None] * dist.get_world_size()
    own = error if _is_own(error, group) else None
    dist.all_gather_object(reports, None if own is None else report(own), group=group)
    for rank, found in enumerate(reports):
        if found is not None:
            raise CheckpointError(f'{found} (Found by rank {rank}.)') from error


def _is_own(error: BaseException | None, group: dist.ProcessGroup | None) -> bool:
    if isinstance(error, CheckpointException) and error.failures:
        return dist.get_rank(group) in error.failures  # DCP has raised it on every rank
    return error is not None


def cause_of(error: BaseException) -> BaseException:
    """Find what the operating system said: torch raises an error of its own, and DCP one with those of all ranks.

    Args:
        error (BaseException): What was raised.

    Returns:
        BaseException: An ``OSError`` behind it, if there is one; otherwise the error of a rank, or the error itself.
    """
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop(0)
        if one is None or one in seen:
            continue
        seen.append(one)
        if isinstance(one, OSError):
            return one
        failures = one.failures.values() if isinstance(one, CheckpointException) else ()  # (exception, traceback)
        waiting += [one.__cause__, one.__context__, *(failure[0] for failure in failures)]
    return next(one for one in seen if not isinstance(one, CheckpointException) or len(seen) == 1)
