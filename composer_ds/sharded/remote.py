"""Sharded checkpoints in an object store, through Composer's object stores."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from composer.utils import ObjectStoreTransientError, dist, maybe_create_object_store_from_uri, parse_uri, retry

from composer_ds.errors import CheckpointError
from composer_ds.sharded.manifest import LATEST, MANIFEST, read_manifest

if TYPE_CHECKING:
    from composer_ds.sharded.writing import Save

__all__ = ['RemoteFolder']

_ATTEMPTS = 3


class RemoteFolder:
    """A folder of checkpoints in an object store. Every rank makes one; some stores communicate then.

    Args:
        uri (str): Such as ``'s3://bucket/path'``.
    """

    def __init__(self, uri: str):
        self.uri = uri.rstrip('/')
        self._store = maybe_create_object_store_from_uri(self.uri)
        self._prefix = parse_uri(self.uri)[2].strip('/')

    @staticmethod
    def is_one(folder: str) -> bool:
        """Tell the URI of an object store from the path of a folder.

        Args:
            folder (str): Either.

        Returns:
            bool: True for a URI.
        """
        return '://' in folder

    @staticmethod
    def cache(uri: str) -> Path:
        """Return the folder of this machine where checkpoints lie on their way.

        Args:
            uri (str): As in the constructor.

        Returns:
            Path: Alike on all ranks of a node.
        """
        name = hashlib.sha256(uri.rstrip('/').encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f'composer_ds-{os.getuid()}' / name

    def upload_files(self, save: Save) -> None:
        """Upload what this rank has written. Called on every rank.

        Args:
            save (Save): A complete one.
        """
        for name in save.files:
            self._upload(save.folder / name, f'{save.folder.name}/{name}')

    def publish(self, save: Save) -> None:
        """Upload the manifest and ``latest``, and remove the files here. Called on every rank, after all uploads.

        Args:
            save (Save): A complete one.
        """
        if dist.get_global_rank() == 0:
            self._upload(save.folder / MANIFEST, f'{save.folder.name}/{MANIFEST}')
            self._upload(save.folder.parent / LATEST, LATEST)
        if save.is_first_of_folder:
            shutil.rmtree(save.folder)

    def download_latest(self) -> str | None:
        """Download ``latest``. Called on any rank.

        Returns:
            str | None: The name of the newest checkpoint; None when there is none.
        """
        path = self.cache(self.uri) / LATEST
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._download(LATEST, path)
        except FileNotFoundError:
            return None
        return path.read_text(encoding='utf-8').strip()

    def download_manifest(self, name: str) -> Path:
        """Download the manifest of a checkpoint. Called on one rank of each node.

        Args:
            name (str): The checkpoint.

        Returns:
            Path: Where the checkpoint is to lie.

        Raises:
            CheckpointError: When there is none.
        """
        folder = self.cache(self.uri) / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._download(f'{name}/{MANIFEST}', folder / MANIFEST)
        except FileNotFoundError:
            raise CheckpointError(
                f'{self.uri}/{name} is not a complete sharded checkpoint: {MANIFEST}, uploaded last, is missing.'
            ) from None
        return folder

    def download_files(self, name: str) -> None:
        """Download this rank's share of the files of a checkpoint. Called on every rank, after the manifest is there.

        Args:
            name (str): The checkpoint.

        Raises:
            CheckpointError: When a file is missing.
        """
        folder = self.cache(self.uri) / name
        files = sorted(read_manifest(folder).files)
        for file in files[dist.get_local_rank() :: dist.get_local_world_size()]:
            try:
                self._download(f'{name}/{file}', folder / file)
            except FileNotFoundError:
                raise CheckpointError(f'{self.uri}/{name}/{file} is missing: the checkpoint is not complete.') from None

    def _object_name(self, name: str) -> str:
        return f'{self._prefix}/{name}' if self._prefix else name

    def _upload(self, path: Path, name: str) -> None:
        @retry(ObjectStoreTransientError, num_attempts=_ATTEMPTS)
        def upload() -> None:
            assert self._store is not None
            self._store.upload_object(self._object_name(name), path)

        upload()

    def _download(self, name: str, path: Path) -> None:
        @retry(ObjectStoreTransientError, num_attempts=_ATTEMPTS)
        def download() -> None:
            assert self._store is not None
            self._store.download_object(self._object_name(name), path, overwrite=True)

        download()
