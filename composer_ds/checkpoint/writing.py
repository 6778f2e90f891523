"""Composer's ``save_checkpoint``, with a file that is complete or absent, and errors that every rank hears of."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

from composer.core import State
from composer.utils import checkpoint, dist, reproducibility

from composer_ds.checkpoint.agreement import cause_of
from composer_ds.checkpoint.atomic import discard, publish, temporary_path
from composer_ds.checkpoint.stream import write_stream
from composer_ds.consolidation import PendingTensor, PendingTensorRead, consolidating_later
from composer_ds.errors import CheckpointError
from composer_ds.faces import ModelFace
from composer_ds.progress import bar_if_long

__all__ = ['save_checkpoint']

log = logging.getLogger(__name__)


def save_checkpoint(
    state: State,
    filename: str = 'ep{epoch}-ba{batch}-rank{rank}',
    *,
    weights_only: bool = False,
    ignore_keys: list[str] | Callable[[dict], None] | None = None,
    latest: str | None = None,
) -> str | None:
    """Save a checkpoint as Composer's function of this name does, but complete or not at all.

    Collective: every rank calls it; rank 0 writes.

    Args:
        state (State): Composer's state: ``trainer.state``.
        filename (str): With Composer's placeholders. Default: that of Composer.
        weights_only (bool): Whether to save only the model. Default: False.
        ignore_keys (list[str] | Callable[[dict], None] | None): As Composer's ``save_ignore_keys``. Default: None.
        latest (str | None): A symlink to let point to the checkpoint once it is complete. Default: None.

    Returns:
        str | None: The file's name on rank 0, None on the others.

    Raises:
        CheckpointError: On every rank, when any rank could not do its part. What stood in the folder before still does.
    """
    path = checkpoint.get_save_filename(state, filename)
    first = dist.get_global_rank() == 0
    collected = _Collected(ignore_keys)
    error: Exception | None = None
    try:
        try:
            collection = _collect(state, path, weights_only, ignore_keys)
            if collection is not None:
                os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
                with bar_if_long(f'Saving {path}') as bar:
                    error = write_stream(*collection, temporary_path(path), bar)
            else:
                checkpoint.save_checkpoint(
                    state, temporary_path(path), weights_only=weights_only, ignore_keys=collected.ignore_keys
                )
        except Exception as raised:
            # While the ranks are still gathering tensors, the others wait in a collective that cannot be joined here.
            if not collected.done:
                raise
            error = raised
            dist.barrier()  # The others wait in Composer's, for the file to be written.
        _raise_together(error, path, latest)
        try:
            if first:
                publish(path, latest)
        except OSError as raised:
            error = raised
        _raise_together(error, path, latest)
    finally:
        if first:
            discard(path, latest)
    return path if first else None


def _collect(
    state: State, path: str, weights_only: bool, ignore_keys: list[str] | Callable[[dict], None] | None
) -> tuple[dict[str, Any], list[PendingTensor]] | None:
    """Collect what Composer's ``save_checkpoint`` does, with tensors that are put together while the file is written.

    Collective.

    Args:
        state (State): Composer's state.
        path (str): The file.
        weights_only (bool): Whether to save only the model.
        ignore_keys (list[str] | Callable[[dict], None] | None): The user's.

    Returns:
        tuple[dict[str, Any], list[PendingTensor]] | None: What to write, and all such tensors. None where somebody has
            to see whole tensors (a function of the user's, an algorithm's ``state_dict``), or where the file is
            compressed or packed, which is Composer's own work.
    """
    if not isinstance(state.model, ModelFace) or callable(ignore_keys) or not path.endswith('.pt'):
        return None
    state_dict: dict[str, Any] = {}
    with consolidating_later() as pending:
        try:
            state_dict['state'] = state.state_dict()
        except PendingTensorRead as error:
            log.debug('Not written in a stream: %s', error)
    if not all(dist.all_gather_object('state' in state_dict)):
        return None
    if weights_only:
        state_dict['state'] = {key: state_dict['state'][key] for key in ('model', 'integrations', 'metadata')}
    else:
        state_dict['rng'] = reproducibility.get_rng_state()
    if ignore_keys:
        checkpoint.glob_filter(ignore_keys)(state_dict)
        state_dict.setdefault('state', {})
    return state_dict, pending


class _Collected:
    """Learns, through Composer's ``ignore_keys``, that this rank has gathered the whole state dict.

    Args:
        ignore_keys (list[str] | Callable[[dict], None] | None): The user's.
    """

    def __init__(self, ignore_keys: list[str] | Callable[[dict], None] | None):
        self.done = False
        self._users = checkpoint.glob_filter(ignore_keys) if isinstance(ignore_keys, list) else ignore_keys

    def ignore_keys(self, state_dict: dict[str, Any]) -> None:
        """Do what the user asked for. Called by Composer on every rank, after the last collective of the state dict.

        Args:
            state_dict (dict[str, Any]): What will be written.
        """
        self.done = True
        if self._users:
            self._users(state_dict)


def _raise_together(error: Exception | None, path: str, latest: str | None) -> None:
    """Raise on every rank when one has failed. Collective."""
    reports = dist.all_gather_object(None if error is None else _report(error, path, latest))
    for rank, report in enumerate(reports):
        if report is not None:
            raise CheckpointError(f'{report} (Found by rank {rank}.)') from error


def _report(error: Exception, path: str, latest: str | None) -> str:
    cause = cause_of(error)
    if isinstance(cause, OSError) and cause.errno is not None:
        reason = f'{os.strerror(cause.errno)} ({errno.errorcode.get(cause.errno, cause.errno)})'
    else:
        reason = f'{type(cause).__name__}: {cause}'
    sentences = [f'The checkpoint {path} was not saved: {reason}{_sizes(path)}.']
    before = next((name for name in (latest, path) if name is not None and os.path.exists(name)), None)
    if before is not None:
        before = os.path.realpath(before)
        sentences.append(f'{before}, saved before ({os.path.getsize(before):,} bytes), is intact.')
    if isinstance(cause, OSError):
        sentences.append('Make room, keep fewer (save_num_checkpoints_to_keep) or change save_folder, and resume.')
    return ' '.join(sentences)


def _sizes(path: str) -> str:
    try:
        free_bytes = shutil.disk_usage(os.path.dirname(path) or '.').free
        written_bytes = os.path.getsize(temporary_path(path))
    except OSError:
        return ''
    return f', after {written_bytes:,} bytes; {free_bytes:,} bytes are free there'
