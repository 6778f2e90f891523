"""Reading ``.wandb`` files, which W&B writes beside every run, online and offline; no account is needed.

wandb has no Python reader for them (0.31 dropped its ``DataStore``). ``wandb leet inspect --json`` is its public one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from composer_ds.errors import EnvironmentProblem

__all__ = ['last_step', 'lives_of_run', 'read_records', 'wait_for_own_folder']


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a run. The file of a run that was killed, or goes on, gives what is there.

    Args:
        path (Path): A ``run-ID.wandb`` file.

    Yields:
        dict[str, Any]: A record, with its ``'type'`` and its content by that name, such as ``'history'``.

    Raises:
        EnvironmentProblem: wandb cannot read it, or is too old to have ``wandb leet inspect``.
    """
    done = _inspect(str(path), '--json')
    if done.returncode != 0 and not done.stdout:
        reason = (done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]
        raise EnvironmentProblem(
            f'{path} cannot be read: `wandb leet inspect` says: {reason}. It takes wandb 0.31 or newer, and a '
            'file that wandb has written.'
        )
    for line in done.stdout.splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the last line of a process that was ended
            return


def last_step(path: Path) -> int | None:
    """Find the last W&B step in a file.

    Args:
        path (Path): A ``run-ID.wandb`` file.

    Returns:
        int | None: None when nothing was logged, or the file cannot be read.
    """
    done = _inspect(str(path), '--summary', '--json')
    try:
        step = json.loads(done.stdout)['summary']['_step']
    except (ValueError, KeyError, TypeError):
        return None
    return int(step)


def lives_of_run(folder: Path, run_id: str) -> list[Path]:
    """Find the files of a run: one for each time that it was started, killed or not.

    Args:
        folder (Path): W&B's folder, ``.../wandb``.
        run_id (str): The run.

    Returns:
        list[Path]: In the order in which they were started.
    """
    # Folders are named (offline-)run-DATE_TIME-ID.
    found = folder.glob(f'*run-*-{run_id}/run-{run_id}.wandb')
    return sorted(found, key=lambda path: path.parent.name.removeprefix('offline-'))


def wait_for_own_folder(parent: Path, run_id: str) -> None:
    """Wait, less than a second, until a run that starts does not write over its own last start.

    W&B names folders by the second, and writes over one that is there: two starts in the same second would be one.

    Args:
        parent (Path): The folder that W&B's folder is in.
        run_id (str): The run.
    """
    while any(parent.glob(f'*wandb/*run-{datetime.now():%Y%m%d_%H%M%S}-{run_id}')):
        time.sleep(0.05)


def _inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Its own reports of usage would go over the network.
    environment = {**os.environ, 'WANDB_ERROR_REPORTING': 'false'}
    command = [sys.executable, '-m', 'wandb', 'leet', 'inspect', *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, encoding='utf-8', errors='replace', env=environment, check=False
    )
