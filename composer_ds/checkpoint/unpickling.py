"""Reading pickled checkpoints without running code that is in them."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

from composer_ds.checkpoint.damage import damage
from composer_ds.errors import CheckpointError

__all__ = ['inert_classes', 'load']

# Written by numpy 1 under other names than by numpy 2.
_ARRAY, _SCALAR = np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]
_NUMBERS = [
    'bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64', 'float16', 'float32', 'float64',
]  # fmt: skip

# What Composer's checkpoints hold beyond tensors and plain values: numpy's random state, which is an array, numbers of
# numpy in metrics and datasets, and times. None of these does anything when it is made.
_INERT: list[Any] = [
    *((_ARRAY, f'numpy.{core}.multiarray._reconstruct') for core in ('core', '_core')),
    *((_SCALAR, f'numpy.{core}.multiarray.scalar') for core in ('core', '_core')),
    np.ndarray,
    np.dtype,
    *(type(np.dtype(name)) for name in _NUMBERS),
    datetime.timedelta,
    datetime.datetime,
    TorchVersion,
]


@contextmanager
def inert_classes() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` read the harmless classes of an ordinary checkpoint of Composer.

    Yields:
        None: They are allowed inside.
    """
    with torch.serialization.safe_globals(_INERT):
        yield


def load(path: Path, trusted: bool = False, data: bool = True) -> Any:
    """Unpickle a file of ``torch.save``, in host memory.

    Args:
        path (Path): The file.
        trusted (bool): Whether to make objects of any class, which can run any code. Default: False.
        data (bool): Whether to read the elements of tensors, too. Without them, each tensor's
            ``untyped_storage()._checkpoint_offset`` says where they are in the file. Default: True.

    Returns:
        Any: What is in it.

    Raises:
        CheckpointError: When the file is damaged, or holds classes that are not harmless.
    """
    try:
        # _checkpoint_offset is what torch (2.7) has for this purpose; tests/unit/test_composer_file.py fails when it
        # goes.
        with inert_classes(), nullcontext() if data else FakeTensorMode():
            return torch.load(path, map_location='cpu', weights_only=not trusted)
    except Exception as error:
        found = None if trusted and isinstance(error, (ImportError, AttributeError)) else damage(str(path))
        if found is not None:
            raise CheckpointError(f'{path} {found}') from error
        if isinstance(error, pickle.UnpicklingError) and not trusted:
            raise CheckpointError(_refusal(path)) from error
        raise CheckpointError(f'{path} cannot be read: {type(error).__name__}: {error}') from error


def _refusal(path: Path) -> str:
    with inert_classes():
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    names = ', '.join(sorted(classes)) or 'objects that are not plain values'
    return (
        f'{path} holds {names}. To read such a file can run any code that its writer put there, so it is only done '
        'with --trusted (trusted=True): give that if you know where the file comes from.'
    )
