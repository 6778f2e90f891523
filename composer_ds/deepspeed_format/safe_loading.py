"""Opening a shard without running code from it.

``torch.load(weights_only=True)`` builds tensors and plain containers only. DeepSpeed and the trainers around it put a
few classes of their own into their files; each is known here by its name, and gets a stand-in that holds what it is
given and does nothing. Neither DeepSpeed nor the other trainer is imported. Anything else is refused.
"""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from composer_ds.checkpoint.damage import damage
from composer_ds.errors import CheckpointError

__all__ = ['Ignored', 'StoredRun', 'load']


class Ignored:
    """Stands for an object that nothing here asks for; takes and forgets whatever the file says about it."""

    def __new__(cls, *_args: Any, **_kwargs: Any):
        """Accept every argument."""
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        """Forget the state."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forget the item."""

    def append(self, item: Any) -> None:
        """Forget the item.

        Args:
            item (Any): Not kept.
        """

    def extend(self, items: Any) -> None:
        """Forget the items.

        Args:
            items (Any): Not kept.
        """


class StoredRun:
    """Stands for ``fragment_address``: which run of a rank's partition belongs to a parameter."""

    numel: int
    start: int


class _Stage(int):
    """Stands for ``ZeroStageEnum``."""


def _member(owner: Any, name: Any) -> Any:
    """Stand for ``getattr``, by which Python 3.11.0 to 3.11.3 stores the members of an enum."""
    stages = {'disabled': 0, 'optimizer_states': 1, 'gradients': 2, 'weights': 3}
    return _Stage(stages[name]) if owner is _Stage and name in stages else Ignored()


_STAND_INS: list[Any] = [
    (StoredRun, 'deepspeed.utils.tensor_fragment.fragment_address'),
    (_Stage, 'deepspeed.runtime.zero.config.ZeroStageEnum'),
    (_member, 'builtins.getattr'),
    (_member, '__builtin__.getattr'),
    (datetime.timedelta, 'datetime.timedelta'),
] + [
    (Ignored, name)
    for name in (
        'deepspeed.runtime.fp16.loss_scaler.LossScaler',
        'deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler',
        'deepspeed.checkpoint.universal_checkpoint.SubparamShape',
        'lightning.fabric.utilities.data.AttributeDict',
        'lightning_fabric.utilities.data.AttributeDict',
        'pytorch_lightning.utilities.parsing.AttributeDict',
        'mmengine.logging.history_buffer.HistoryBuffer',
        # Arrays and numbers of numpy, in random number states and in logs.
        'numpy.core.multiarray._reconstruct',
        'numpy._core.multiarray._reconstruct',
        'numpy.core.multiarray.scalar',
        'numpy._core.multiarray.scalar',
        'numpy.ndarray',
        'numpy.dtype',
        '_codecs.encode',
        'pathlib.PosixPath',
        'pathlib._local.PosixPath',
    )
]


def load(path: Path, trusted: bool = False, ignore_unknown: bool = False) -> Any:
    """Open a file of ``torch.save``, with its tensors mapped from the file.

    Args:
        path (Path): The file.
        trusted (bool): Unpickle whatever it holds, which may run code. Default: False.
        ignore_unknown (bool): Put :class:`Ignored` for unknown classes instead of refusing the file; for facts that
            are nice to have. Default: False.

    Returns:
        Any: Its content.

    Raises:
        CheckpointError: When the file is missing, damaged, or holds something that is not known to be harmless.
    """
    try:
        if trusted:
            return torch.load(path, map_location='cpu', mmap=True, weights_only=False)
        with safe_globals(_STAND_INS):
            unknown = get_unsafe_globals_in_checkpoint(path) if ignore_unknown else []
        with safe_globals([*_STAND_INS, *((Ignored, name) for name in unknown)]):
            return torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f'{path} is missing.') from None
    except Exception as error:
        found = damage(str(path))
        if found is not None:
            raise CheckpointError(f'{path} {found}.') from error
        if isinstance(error, pickle.UnpicklingError) and not trusted:
            raise CheckpointError(
                f'{path} holds {_unknown_classes(path, error)}, which is not among the classes that are known to be '
                'harmless, so that nothing of the file was loaded: unpickling it could run code. If you trust whoever '
                'wrote the file, give --trusted (trusted=True); the packages of these classes must be installed then.'
            ) from error
        raise CheckpointError(f'{path} cannot be opened: {type(error).__name__}: {error}') from error


def _unknown_classes(path: Path, error: Exception) -> str:
    try:
        with safe_globals(_STAND_INS):
            names = get_unsafe_globals_in_checkpoint(path)
    # The list is read from the opcodes, which need not make sense in a file that wants to do harm.
    except Exception:
        names = []
    return ', '.join(sorted(names)) or f'what torch refuses ({str(error).strip().splitlines()[-1].strip()})'
