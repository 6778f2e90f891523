"""Sharded checkpoints in an object store, through Composer's object stores."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from composer.utils import ObjectStoreTransientError, dist, maybe_create_object_store_from_uri, parse_uri, retry

from composer_ds.checkpoint.agreement import agreeing
from composer_ds.errors import CheckpointError
from composer_ds.sharded.manifest import LATEST, MANIFEST, Manifest, read_manifest

if TYPE_CHECKING:
    from composer_ds.sharded.writing import Save

__all__ = ['RemoteFolder', 'discard_download']

_ATTEMPTS = 3


def _own_folder() -> Path:
    """Where this user's files lie while they are on their way."""
    return Path(tempfile.gettempdir()) / f'composer_ds-{os.getuid()}'


def discard_download(path: str) -> None:
    """Remove what was downloaded, if this is it. Called on every rank.

    Args:
        path (str): From :meth:`RemoteFolder.download_manifest`, or any other path, which is left alone.
    """
    with contextlib.suppress(ValueError):
        download = Path(path).relative_to(_own_folder()).parts[0]
        if download.startswith('load-') and dist.get_local_rank() == 0:
            shutil.rmtree(_own_folder() / download, ignore_errors=True)


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
        """Return the folder of this machine where checkpoints lie until they are uploaded.

        Args:
            uri (str): As in the constructor.

        Returns:
            Path: Alike on all ranks of a node.
        """
        return _own_folder() / f'save-{hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:16]}'

    def upload(self, save: Save) -> None:
        """Upload a checkpoint: every rank what it has written, then rank 0 the manifest, then ``latest``.

        Collective, through the group of the save; the files here are removed.

        Args:
            save (Save): A complete one.
        """

        def report(error: BaseException) -> str:
            return f'The checkpoint {self.uri}/{save.folder.name} was not uploaded: {error!r}. Older ones are intact.'

        try:
            with agreeing(save.group, report):
                for name in save.files:
                    self._upload(save.folder / name, f'{save.folder.name}/{name}')
            with agreeing(save.group, report):
                if dist.get_global_rank() == 0:
                    self._upload(save.folder / MANIFEST, f'{save.folder.name}/{MANIFEST}')
                    self._upload(save.folder.parent / LATEST, LATEST)
        finally:
            if save.is_first_of_folder:
                shutil.rmtree(self.cache(self.uri), ignore_errors=True)

    def latest(self) -> str | None:
        """Download ``latest``. Called on any rank.

        Returns:
            str | None: The name of the newest checkpoint; None when there is none.
        """
        with tempfile.TemporaryDirectory(prefix='composer_ds-') as folder:
            path = Path(folder) / LATEST
            try:
                self._download(LATEST, path)
            except FileNotFoundError:
                return None
            return path.read_text(encoding='utf-8').strip()

    def manifest(self, name: str) -> Manifest:
        """Download the manifest of a checkpoint, and read it. Called on any rank.

        Args:
            name (str): The checkpoint.

        Returns:
            Manifest: Its content.
        """
        with tempfile.TemporaryDirectory(prefix='composer_ds-') as folder:
            return read_manifest(self.download_manifest(name, Path(folder)))

    def place_of(self, name: str, token: str) -> Path:
        """Return where a checkpoint is downloaded to.

        Args:
            name (str): The checkpoint.
            token (str): Of this download.

        Returns:
            Path: Its end tells the user which one it is.
        """
        return _own_folder() / f'load-{token}' / self.uri.replace('://', '/') / name

    def download_manifest(self, name: str, folder: Path) -> Path:
        """Download the manifest of a checkpoint. Called on one rank of each node.

        Args:
            name (str): The checkpoint.
            folder (Path): Where to.

        Returns:
            Path: The folder.

        Raises:
            CheckpointError: When there is none.
        """
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._download(f'{name}/{MANIFEST}', folder / MANIFEST)
        except FileNotFoundError:
            raise CheckpointError(
                f'{self.uri}/{name} is not a complete sharded checkpoint: {MANIFEST}, uploaded last, is missing.'
            ) from None
        return folder

    def download_files(self, name: str, folder: Path) -> None:
        """Download this rank's share of the files of a checkpoint. Called on every rank, after the manifest is there.

        Args:
            name (str): The checkpoint.
            folder (Path): As for the manifest.

        Raises:
            CheckpointError: When a file is missing.
        """
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

        try:
            download()
        except FileNotFoundError as error:
            # Composer (0.32) takes S3's "forbidden" for "not found"; a run must not begin anew because of it.
            answer = getattr(error.__cause__, 'response', {})
            if answer.get('Error', {}).get('Code') in ('403', 'AccessDenied'):
                raise CheckpointError(
                    f'{self.uri}/{name}: the object store forbids to read it ({error.__cause__}). Without the right to '
                    'list the bucket (s3:ListBucket) it says so of objects that are not there, too.'
                ) from error
            raise
