"""Every checkpoint is checked before it is loaded, while a Trainer with :class:`~composer_ds.DeepSpeed` is open.

Composer calls the function that the environment variable ``CHECKPOINT_VALIDATION_FUNCTION`` names right before
``torch.load``: through ``load_path``, autoresume and the ``LoadCheckpoint`` callback alike.
"""

from __future__ import annotations

import importlib
import os
import sys
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer.core import State
from composer.utils import checkpoint, dist

from composer_ds.checkpoint.damage import damage, identity, newest_complete
from composer_ds.checkpoint.verdict import agree, refuse
from composer_ds.errors import CheckpointError
from composer_ds.progress import bar_if_long

__all__ = ['take_loaded_path', 'validate', 'verify_loads']

_VARIABLE = 'CHECKPOINT_VALIDATION_FUNCTION'
_OURS = f'{__name__}.validate'


@dataclass(eq=False)
class _OpenTrainer:
    """A Trainer that loads with all ranks.

    Args:
        state (weakref.ref[State]): Composer's; a Trainer that failed to be made is never closed.
        token (str): Alike on every rank, and not used before.
        users_function (str | None): What the variable named before.
        loads (int): How many loads were begun.
        loaded_path (str | None): The last checkpoint that was found complete, as the user knows it.
    """

    state: weakref.ref[State]
    token: str
    users_function: str | None
    loads: int = 0
    loaded_path: str | None = None


_open: list[_OpenTrainer] = []


def verify_loads(state: State) -> Callable[[], None]:
    """Have every checkpoint checked that is loaded from now on.

    Collective: called at ``BEFORE_LOAD``, on every rank.

    Args:
        state (State): Composer's state.

    Returns:
        Callable[[], None]: To be called when the Trainer is closed: gives the variable its former value back.
    """
    token = [uuid.uuid4().hex]
    dist.broadcast_object_list(token)
    users_function = os.environ.get(_VARIABLE)
    if users_function == _OURS:  # another Trainer is open, or was in the process that started this one
        users_function = _open[-1].users_function if _open else None
    trainer = _OpenTrainer(weakref.ref(state), token[0], users_function)
    _open.append(trainer)
    os.environ[_VARIABLE] = _OURS

    def undo() -> None:
        _open.remove(trainer)
        # The user may have named another function since.
        if not _open and os.environ.get(_VARIABLE) == _OURS:
            del os.environ[_VARIABLE]
            if trainer.users_function is not None:
                os.environ[_VARIABLE] = trainer.users_function

    return undo


def take_loaded_path(state: State) -> str | None:
    """Tell once which checkpoint Composer has loaded.

    Args:
        state (State): Composer's state.

    Returns:
        str | None: As the user knows it; None when there was none since the last call, or not on this rank.
    """
    for trainer in _open:
        if trainer.state() is state:
            path, trainer.loaded_path = trainer.loaded_path, None
            return path
    return None


def validate(path: Any, specs: list[tuple[int, int]] | None = None) -> bool:
    """Check a checkpoint. Called by Composer, before it loads one, on every rank that loads.

    Args:
        path (Any): The file, or a temporary link to it.
        specs (list[tuple[int, int]] | None): Offsets and lengths, for Composer's own sharded checkpoints.

    Returns:
        bool: True, or what the user's own function says of a file that is not ours to judge.

    Raises:
        CheckpointError: On every rank, when the file is not complete on some rank.
        FileNotFoundError: When it is not there. Composer has raised the same on this node's first rank.
    """
    users_function = _open[-1].users_function if _open else None
    if specs is not None:
        return users_function is None or bool(_call(users_function, path, specs))
    state, given_path = _load_in_progress()
    trainer = next((trainer for trainer in _open if trainer.state() is state), None)
    name = _name(str(path), given_path)

    def check(reads: bool) -> str | None:
        finding = None
        if reads:
            with bar_if_long(f'Checking {name}') as bar:
                finding = damage(str(path), bar)
        if finding is None and users_function is not None and not _call(users_function, path, None):
            finding = f'was refused by {users_function}, which {_VARIABLE} named'
        return None if finding is None else f'The checkpoint {name} {finding}. {_advice(str(path))}'

    if trainer is None:
        # Somebody else's load, in which not every rank need take part: no rank can wait for another.
        finding = check(True)
    else:
        trainer.loads += 1
        key = f'{trainer.token}/{trainer.loads}'
        if not os.path.exists(path):
            missing = f'The checkpoint {name} is missing, or could not be unpacked or downloaded.'
            refuse(key, missing)
            raise FileNotFoundError(missing)
        finding = agree(
            key, lambda: check(dist.get_local_rank() == 0), lambda: identity(str(path)), f'The checkpoint {name}'
        )
    if finding is not None:
        raise CheckpointError(finding)
    if trainer is not None:
        trainer.loaded_path = name
    return True


def _call(function: str, path: Any, specs: list[tuple[int, int]] | None) -> Any:
    module, _, name = function.rpartition('.')
    return getattr(importlib.import_module(module), name)(path, specs)


def _load_in_progress() -> tuple[State | None, str | None]:
    """Find for whom Composer loads, and what the user asked to load.

    Composer (0.32.1) tells its validation function neither; tests/distributed/test_checkpoint_safety.py fails when it
    loads in another way.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not checkpoint.load_checkpoint.__code__:
        frame = frame.f_back
    return (None, None) if frame is None else (frame.f_locals['state'], frame.f_locals['path'])


def _name(path: str, given_path: str | None) -> str:
    """Name a file as the user knows it: Composer hands out a temporary link, download or extracted file."""
    if given_path is None:
        return os.path.realpath(path)
    if os.path.islink(given_path):
        return f'{os.path.realpath(given_path)} (named by {given_path})'
    return given_path


def _advice(path: str) -> str:
    real_path = os.path.realpath(path)
    other = newest_complete(real_path) if os.path.exists(real_path) else None
    if other is None:
        return 'Load another one, or copy or download it again.'
    return (
        f'The newest complete one beside it is {other}: give it as load_path (without autoresume), or remove the '
        'damaged file and let the symlink of autoresume point to it.'
    )
