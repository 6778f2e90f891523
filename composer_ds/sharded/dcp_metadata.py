"""DCP's ``.metadata``: which file holds which run of which tensor.

It is a pickle, which DCP reads without looking: whoever can write a checkpoint could run code wherever it is loaded.
Here only the classes of such a file are made.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from composer_ds.errors import CheckpointError

__all__ = ['METADATA', 'read_metadata']

METADATA = '.metadata'

_DCP = 'torch.distributed.checkpoint'
_CLASSES = {
    *((f'{_DCP}.metadata', name) for name in (
        'BytesStorageMetadata', 'ChunkStorageMetadata', 'Metadata', 'MetadataIndex', 'StorageMeta',
        'TensorProperties', 'TensorStorageMetadata', '_MEM_FORMAT_ENCODING',
    )),
    (f'{_DCP}.filesystem', '_StorageInfo'),
    ('torch.serialization', '_get_layout'),
    ('torch', 'Size'),
    ('collections', 'OrderedDict'),
    ('pathlib', 'PosixPath'),
}  # fmt: skip
_DTYPES = {
    'bfloat16', 'bool', 'complex64', 'complex128', 'float16', 'float32', 'float64', 'float8_e4m3fn', 'float8_e5m2',
    'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64',
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES and not (module == 'torch' and name in _DTYPES):
            raise pickle.UnpicklingError(f'it holds {module}.{name}, which no such file does')
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a checkpoint that DCP wrote.

    Args:
        folder (Path): The checkpoint.

    Returns:
        Metadata: As DCP's own reader returns it.

    Raises:
        CheckpointError: When it is missing, damaged, or holds anything else.
    """
    path = folder / METADATA
    try:
        with open(path, 'rb') as file:
            metadata = _Unpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f'{path} is missing: without it nobody knows what is in the other files') from None
    # A flipped bit in a pickle makes almost anything be raised.
    except Exception as error:
        raise CheckpointError(f'{path} is damaged: {type(error).__name__}: {error}') from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f'{path} is damaged: it holds {type(metadata).__name__}')
    return metadata
