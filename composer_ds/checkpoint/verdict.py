"""What all ranks found, told through the store of the process group instead of by a collective.

Composer calls the check of a checkpoint on the ranks where nothing went wrong before, and a rank where something did
waits in a barrier: a collective of ours would meet that barrier, and nobody would go on. A check also takes minutes
for a large file, longer than the time limit of a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from composer.utils import dist
from torch.distributed import distributed_c10d

__all__ = ['agree', 'refuse']

# Composer's barrier right before the check keeps the ranks together: who is not here by then has raised.
ARRIVAL_LIMIT_SEC = 30.0


def agree(key: str, check: Callable[[], str | None], identity: Callable[[], str], subject: str) -> str | None:
    """Run a check and return the same finding on every rank: what some rank found, if any did.

    What is no fault on any rank alone is one together: ranks that read different files would go on with a mixture.

    Called by every rank on which nothing has failed before; no collective.

    Args:
        key (str): Names this check, alike on every rank, and no other.
        check (Callable[[], str | None]): This rank's check: what is wrong, or None.
        identity (Callable[[], str]): Of what was checked; must be alike on every rank.
        subject (str): What is checked, for the finding that another rank has raised before.

    Returns:
        str | None: What is wrong, or None when every rank took part and found nothing.
    """
    if dist.get_world_size() == 1:
        return check()
    store = _store(key)
    store.add('arrived', 1)
    complete = _all_ranks(store, 'arrived', ARRIVAL_LIMIT_SEC)
    try:
        if complete:
            finding = check() or _difference(store, identity(), subject)
        else:
            finding = f'{subject} could not be read on another rank, whose own error says why.'
    except Exception as error:  # of the user's own check, say: the other ranks wait for this one
        finding = f'{subject} could not be checked: {error!r}'
    if finding is not None and not store.check(['finding']):
        store.set('finding', finding)
    store.add('checked', 1)
    if complete:
        _all_ranks(store, 'checked', None)
    return store.get('finding').decode() if store.check(['finding']) else None


def refuse(key: str, finding: str) -> None:
    """Tell the ranks that :func:`agree` what is wrong, without waiting for them. No collective.

    Args:
        key (str): As in :func:`agree`.
        finding (str): What is wrong.
    """
    if dist.get_world_size() > 1:
        _store(key).set('finding', finding)


def _store(key: str) -> Any:
    # torch (2.7) has no public way to it; tests/distributed/test_checkpoint_safety.py fails without it.
    return distributed_c10d.PrefixStore(f'composer_ds/{key}', distributed_c10d._get_default_store())


def _difference(store: Any, own: str, subject: str) -> str | None:
    # The first rank to come sets the value; the answer is what is set.
    first = store.compare_set('identity', '', f'{dist.get_global_rank()}/{own}').decode()
    rank, _, other = first.partition('/')
    if other == own:
        return None
    return (
        f'{subject} is not the same file for rank {rank} and rank {dist.get_global_rank()}. Are the disks of the '
        'nodes their own, and one holds an older checkpoint of that name? Remove it there, or copy the right one to '
        'every node.'
    )


def _all_ranks(store: Any, count: str, limit_sec: float | None) -> bool:
    """Wait until every rank has counted; False when a rank refused, or the time is over."""
    started, pause_sec = time.monotonic(), 0.001
    while store.add(count, 0) < dist.get_world_size():
        if limit_sec is not None and (store.check(['finding']) or time.monotonic() - started > limit_sec):
            return False
        time.sleep(pause_sec)
        pause_sec = min(2 * pause_sec, 0.1)
    return True
