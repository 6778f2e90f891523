"""What several processes of one job must agree on before Composer is imported: who speaks, and who uses which cores."""

from __future__ import annotations

import os
import signal
import sys
import time

__all__ = ['global_rank', 'local_rank', 'share_cores', 'tell_once']

# Longer than ranks on a busy machine drift apart while they import Composer.
GRACE_SEC = 30.0


def local_rank() -> int:
    """Returns the rank on this machine, as the launcher set it; 0 without a launcher.

    Returns:
        int: The local rank.
    """
    return int(os.environ.get('LOCAL_RANK') or 0)


def global_rank() -> int:
    """Returns the rank among all machines, as the launcher set it; 0 without a launcher.

    Returns:
        int: The rank.
    """
    return int(os.environ.get('RANK') or 0)


def share_cores() -> str | None:
    """Gives each rank of this machine its share of the cores.

    Called before torch is imported. By default every process of torch computes with as many threads as there are
    cores, so that several ranks slow each other down. `OMP_NUM_THREADS` set by the user is respected.

    Returns:
        str | None: A sentence for the user when a limit was set.
    """
    ranks = int(os.environ.get('LOCAL_WORLD_SIZE') or 1)
    if ranks == 1 or 'OMP_NUM_THREADS' in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    threads = max(1, cores // ranks)
    os.environ['OMP_NUM_THREADS'] = str(threads)
    return f'{cores} CPU cores / {ranks} ranks = {threads} thread(s) for each rank; set OMP_NUM_THREADS to change it.'


def tell_once(text: str) -> None:
    """Prints an error that all ranks have found, so that the user reads it once.

    Local rank 0 prints at once. The others wait first: when rank 0 ends, the launcher terminates them, silently. If it
    does not, rank 0 did not see this error, and they print it themselves.

    Args:
        text (str): The message.
    """
    if local_rank() > 0:
        # Composer turns SIGTERM into an exit code that the launcher would report as a crash.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE_SEC)
    print(text, file=sys.stderr, flush=True)
