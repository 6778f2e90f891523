"""Work that rank 0 does alone, such as flushing or uploading files, while the others wait for its success or error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from composer.utils import dist

from composer_ds.errors import CheckpointError

__all__ = ['on_first_rank']

T = TypeVar('T')

# The others hear so often that the work goes on: a collective that lasts as long as an upload would time out.
_NEWS_SEC = 10.0


def on_first_rank(work: Callable[[], T], describe: Callable[[BaseException], str]) -> T:
    """Run a function on rank 0, and give its result or error to every rank.

    Collective.

    Args:
        work (Callable[[], T]): Runs in a thread, without collectives; its result can be pickled.
        describe (Callable[[BaseException], str]): Puts an error into words; called on rank 0.

    Returns:
        T: On every rank.

    Raises:
        CheckpointError: On every rank, with the words of ``describe``.
    """
    error: BaseException | None = None
    news: list[Any] = [None]
    with ThreadPoolExecutor(1, 'composer_ds') as executor:
        future = executor.submit(work) if dist.get_global_rank() == 0 else None
        while news[0] is None:
            if future is not None and wait([future], timeout=_NEWS_SEC).done:
                error = future.exception()
                news = [(describe(error), None) if error is not None else (None, future.result())]
            dist.broadcast_object_list(news, src=0)
    words, result = news[0]
    if words is not None:
        raise CheckpointError(words) from error
    return result
