"""Which format a checkpoint has."""

from __future__ import annotations

import re
from pathlib import Path

from composer_ds.checkpoint.composer_file import ComposerFileSource
from composer_ds.checkpoint.source import CheckpointSource
from composer_ds.deepspeed_format import DeepSpeedSource, is_deepspeed_checkpoint
from composer_ds.deepspeed_format.archives import is_archive_of_composer
from composer_ds.errors import CheckpointError
from composer_ds.sharded.dcp_metadata import METADATA
from composer_ds.sharded.manifest import LATEST, MANIFEST
from composer_ds.sharded.source import ShardedSource

__all__ = ['checkpoints_in', 'open_source']

_COMPRESSED = ('.gz', '.bz2', '.xz', '.lz4', '.zst', '.lzma', '.zip', '.tar', '.tgz')
_ARCHIVES = ('.tar', '.tar.gz', '.tgz', '.tar.bz2', '.tar.lzma')
_LOOKED_FOR = (
    f'a sharded checkpoint ({MANIFEST}), a folder of them ({LATEST}), a checkpoint of DeepSpeed (mp_rank_*_model_'
    f'states.pt, or {LATEST} that names such a folder) or a file of Composer (.pt)'
)


def open_source(path: str | Path, trusted: bool = False) -> CheckpointSource:
    """Open a checkpoint for reading, whatever its format.

    Args:
        path (str | Path): A file, or a folder.
        trusted (bool): Whether to unpickle classes that are not harmless, which can run any code. Default: False.

    Returns:
        CheckpointSource: It.

    Raises:
        CheckpointError: When there is no checkpoint, or it cannot be read.
    """
    if re.match(r'\w+://', str(path)):
        raise CheckpointError(
            f'{path} is in an object store, and this reads files. Download it first: '
            "composer.utils.get_file(URI, 'checkpoint.pt') for one file, or the store's own tool for a folder."
        )
    path = Path(path)
    if (path / MANIFEST).exists():
        return ShardedSource(path, trusted)
    if path.name == MANIFEST and path.exists():
        return ShardedSource(path.parent, trusted)
    if is_deepspeed_checkpoint(path):
        return DeepSpeedSource(path, trusted=trusted)
    if path.is_dir():
        return _open_folder(path, trusted)
    if path.name.endswith(_ARCHIVES) and is_archive_of_composer(path):  # up to 0.27, with DeepSpeed
        return DeepSpeedSource(path, trusted=trusted)
    if not path.exists():
        link = f' It is a symlink to {path.readlink()}, which is not there.' if path.is_symlink() else ''
        raise CheckpointError(f'{path} does not exist.{link} (The working directory is {Path.cwd()}.)')
    if path.name.endswith(_COMPRESSED):
        raise CheckpointError(f'{path} is compressed or packed; unpack it first and give the .pt file.')
    return ComposerFileSource(path, trusted)


def _open_folder(path: Path, trusted: bool) -> CheckpointSource:
    if (path / LATEST).is_file():
        return ShardedSource(path, trusted)
    if (path / METADATA).exists() or any(path.glob('*.distcp')):
        raise CheckpointError(
            f'{path} has files of torch.distributed.checkpoint, but no {MANIFEST}. Either the save was killed, or the '
            "copy broke off, and another checkpoint must be taken; or it is one of Composer's FSDP, which its own "
            'Trainer reads.'
        )
    files = sorted(one.name for one in path.glob('*.pt') if not one.name.startswith('.'))
    if files:
        few = ', '.join(files[:5]) + (f' and {len(files) - 5} more' if len(files) > 5 else '')
        raise CheckpointError(f'{path} holds several checkpoints or files: give one of {few}.')
    inside = sorted(one.parent.name for one in path.glob(f'*/{MANIFEST}'))
    if inside:
        raise CheckpointError(
            f'{path} holds sharded checkpoints, but no file {LATEST} that names the newest: give one of them, such as '
            f'{path / inside[-1]}.'
        )
    content = 'is empty' if not any(path.iterdir()) else 'holds no checkpoint'
    raise CheckpointError(f'{path} {content}; looked for {_LOOKED_FOR}.')


def checkpoints_in(folder: str | Path) -> list[Path]:
    """List the checkpoints of a folder that is none itself, also incomplete ones.

    Args:
        folder (str | Path): The folder.

    Returns:
        list[Path]: In the order of the numbers in their names; symlinks are left out.
    """
    folder = Path(folder)
    if not folder.is_dir() or (folder / MANIFEST).exists() or any(folder.glob('*.distcp')):
        return []
    names = {MANIFEST, METADATA}
    found = [
        one
        for one in folder.iterdir()
        if not one.is_symlink()
        and (
            (one.is_dir() and (any((one / name).exists() for name in names) or any(one.glob('*.distcp'))))
            or (one.is_dir() and any(one.glob('*mp_rank_*_model_states.pt')))
            or (one.suffix == '.pt' and one.is_file() and '_states' not in one.name)
        )
    ]
    # By the numbers of epoch and batch in their names: a copy may have lost its time.
    return sorted(found, key=lambda one: ([int(number) for number in re.findall(r'\d+', one.name)], one.name))
