"""Uploading an exported folder through Composer's object stores."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from composer.utils import ObjectStoreTransientError, maybe_create_object_store_from_uri, parse_uri, retry

from composer_ds.errors import CheckpointError

__all__ = ['UploadTarget']

_ATTEMPTS = 5


class UploadTarget:
    """A place in an object store.

    Collective: made on every rank, since some of Composer's stores agree over the ranks on where they are.

    Args:
        uri (str): Such as ``'s3://bucket/path'``.
    """

    def __init__(self, uri: str):
        self.uri = uri.rstrip('/')
        self._store = maybe_create_object_store_from_uri(self.uri)
        self._prefix = parse_uri(self.uri)[2].strip('/')

    def require_fit(self, name: str, weights: Sequence[str], overwrite: bool) -> None:
        """Refuse a place where a reader would find parts of another export. Called on rank 0.

        Args:
            name (str): Of the folder.
            weights (Sequence[str]): The names of the files of weights, and of their index.
            overwrite (bool): Whether files of the same names may be replaced.

        Raises:
            CheckpointError: When they would be.
        """
        assert self._store is not None
        try:
            there = self._store.list_objects(self._object(name, ''))
        except NotImplementedError:  # of Composer's stores, not all can tell
            return
        if there and not overwrite:
            raise CheckpointError(f'{self.uri}/{name} holds {len(there)} objects, and overwrite=False')
        names = [os.path.basename(path) for path in there]
        others = [one for one in names if '.safetensors' in one and one not in weights]
        if others:
            raise CheckpointError(
                f'{self.uri}/{name} holds {", ".join(others)} of another export, which a reader would take for a part '
                'of this one, and nothing is removed from there. Remove them, or change filename'
            )

    def upload(self, folder: Path, name: str, last: Sequence[str]) -> None:
        """Upload a folder. Called on rank 0.

        Args:
            folder (Path): The files.
            name (str): The folder's name below the URI.
            last (Sequence[str]): What is uploaded after everything else, in this order: a reader takes the export for
                complete once the last is there.
        """
        assert self._store is not None
        paths = [path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()]
        for path in (*sorted(set(paths) - set(last)), *last):
            send = functools.partial(self._store.upload_object, self._object(name, path), str(folder / path))
            retry(ObjectStoreTransientError, num_attempts=_ATTEMPTS)(send)()

    def _object(self, name: str, path: str) -> str:
        return f'{self._prefix}/{name}/{path}'.lstrip('/')
