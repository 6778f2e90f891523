"""One export of weights: a folder of safetensors that appears complete or not at all, here or in an object store."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from composer.utils import dist

from composer_ds.checkpoint.exported_weights import DTYPES, ExportedWeights, LiveTensors
from composer_ds.checkpoint.first_rank import on_first_rank
from composer_ds.checkpoint.folder import begin_folder, discard_folder, publish_folder
from composer_ds.checkpoint.safetensors_stream import SafetensorsStream
from composer_ds.checkpoint.uploading import UploadTarget
from composer_ds.errors import CheckpointError

__all__ = ['Export']

log = logging.getLogger(__name__)


class Export:
    """An export under way.

    Args:
        folder (str): Where exports are made, or the URI.
        name (str): Of this one.
        target (UploadTarget | None): When it is a URI.
        overwrite (bool): Whether to replace an export of the same name.
    """

    def __init__(self, folder: str, name: str, target: UploadTarget | None, overwrite: bool):
        self.place = os.path.join(folder, name) if target is None else f'{target.uri}/{name}'
        self._name = name
        self._target = target
        self._overwrite = overwrite
        self._path = Path(self.place)
        self._cache: str | None = None

    def write(self, model: Any, dtype: str, max_shard_size: str | int) -> int:
        """Write it.

        Collective.

        Args:
            model (Any): Composer's ``state.model``.
            dtype (str): A key of ``DTYPES``.
            max_shard_size (str | int): Of a file.

        Returns:
            int: How many bytes, alike on all ranks.

        Raises:
            CheckpointError: On every rank, when rank 0 could not write.
        """
        live = LiveTensors(model)
        error: Exception | None = None
        stream: Any = None

        def begin() -> ExportedWeights:
            nonlocal stream
            exported = live.plan(DTYPES[dtype])
            stream = SafetensorsStream(
                self._begin(),
                exported.tensors,
                max_shard_size=max_shard_size,
                # As safetensors.torch.save_model notes tied tensors.
                metadata={'format': 'pt', **exported.tied},
                base_name='model' if live.huggingface is None else live.huggingface.base_name,
            )
            self._require_room(stream)
            if exported.left_out:
                log.warning('%s: no tensors, and so not in %s', ', '.join(exported.left_out), self.place)
            return exported

        def finish() -> int:
            if error is not None:
                raise error
            stream.finish()
            if live.huggingface is not None:
                live.huggingface.write(stream.folder, DTYPES[dtype])
            if self._target is None:
                publish_folder(self._path)
            else:
                self._target.upload(stream.folder, self._name, last=stream.file_names)
            return stream.size_bytes

        try:
            exported = on_first_rank(begin, self._describe)
            error = live.send(exported, stream)
            return on_first_rank(finish, self._describe)
        finally:
            if dist.get_global_rank() == 0:
                self._discard(stream)

    def _begin(self) -> Path:
        """Make the temporary folder. Called on rank 0, as all below."""
        if self._target is not None:
            self._cache = tempfile.mkdtemp(prefix='weights-')
            self._path = Path(self._cache) / self._name
        elif self._path.exists() and not (self._overwrite and self._path.is_dir()):
            raise FileExistsError(errno.EEXIST, 'there is something of this name, and overwrite=False')
        return begin_folder(self._path)

    def _require_room(self, stream: SafetensorsStream) -> None:
        if self._target is not None:
            self._target.require_fit(self._name, stream.file_names, self._overwrite)
        if shutil.disk_usage(stream.folder).free < stream.size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC) + f', {stream.size_bytes:,} bytes are needed')

    def _discard(self, stream: SafetensorsStream | None) -> None:
        """Remove what is left of an export that failed; of one that did not, the local copy of what was uploaded."""
        if stream is not None:
            stream.abort()
        discard_folder(self._path)
        if self._cache is not None:
            shutil.rmtree(self._cache, ignore_errors=True)

    def _describe(self, error: BaseException) -> str:
        beginning = f'The weights {self.place} were not saved: '
        if not isinstance(error, OSError) or error.errno is None:
            reason = str(error) if isinstance(error, CheckpointError) else f'{type(error).__name__}: {error}'
            return f'{beginning}{reason.rstrip(".")}. Older exports are intact.'
        reason = f'{error.strerror} ({errno.errorcode.get(error.errno, error.errno)})'
        with contextlib.suppress(OSError):
            reason += f'; {shutil.disk_usage(self._path.parent).free:,} bytes are free there'
        return (
            f'{beginning}{reason}. Older exports are intact. Make room, keep fewer (num_to_keep) or change folder, and '
            'resume.'
        )
