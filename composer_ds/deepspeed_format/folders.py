"""Finding DeepSpeed's files below what a user names, in the arrangements that trainers make.

============================ ==================================================================================
written by                   where the files are
============================ ==================================================================================
DeepSpeed                    ``DIR/global_step5/``, and ``DIR/latest`` with the name of that folder
Hugging Face's Trainer       ``checkpoint-5/global_step5/``, and ``checkpoint-5/latest``
Hugging Face's Accelerate    ``DIR/pytorch_model/``, and ``DIR/latest``
Lightning, Fabric            ``x.ckpt/checkpoint/``, and ``x.ckpt/latest``
MMEngine                     ``epoch_1.pth/`` itself; no ``latest``
Composer up to 0.27          ``deepspeed/`` in ``ep0-ba5-rank0.tar``, ``ep0-ba5-rank1.tar``, ...; see ``archives.py``
``ds_to_universal``          ``DIR/global_step5_universal/``, with ``zero/`` in it, and ``DIR/latest_universal``
============================ ==================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from composer_ds.deepspeed_format.archives import is_archive_of_composer
from composer_ds.errors import CheckpointError

__all__ = ['ShardNames', 'find_tag_folder', 'is_deepspeed_checkpoint', 'shard_names']

LATEST = 'latest'
_MODEL = re.compile(r'(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt')
# DeepSpeed before 0.3.3 wrote no underscore before "optim".
_OPTIMIZER = re.compile(r'(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt')
_EXPERTS = re.compile(r'(layer_\d+_expert_\d+|expert_\d+|expp_rank_\d+)_mp_rank_\d+_.*\.pt')
_PIPELINE = re.compile(r'layer_\d+-model_.*\.pt')


@dataclass(frozen=True)
class ShardNames:
    """The files of a checkpoint.

    Args:
        model (dict[int | None, str]): Names of those with the module's state by rank; under None the only one, of
            stages 0 to 2.
        optimizer (dict[int, str]): Names of those with the optimizer's partitions by rank; none under stage 0.
        universal (bool): Whether the parameters are in files of their own, below ``zero``.
    """

    model: dict[int | None, str]
    optimizer: dict[int, str]
    universal: bool

    def model_name(self, rank: int) -> str:
        """Return the name of a rank's file of stage 3, whether or not it is there.

        Args:
            rank (int): The rank.

        Returns:
            str: Its name.
        """
        return self.model.get(rank, f'zero_pp_rank_{rank}_mp_rank_00_model_states.pt')

    def optimizer_name(self, rank: int) -> str:
        """Return the name of a rank's file of partitions, whether or not it is there.

        Args:
            rank (int): The rank.

        Returns:
            str: Its name.
        """
        if rank in self.optimizer or not self.optimizer:
            return self.optimizer.get(rank, f'zero_pp_rank_{rank}_mp_rank_00_optim_states.pt')
        other, name = next(iter(self.optimizer.items()))
        return name.replace(f'zero_pp_rank_{other}_', f'zero_pp_rank_{rank}_')


def is_deepspeed_checkpoint(path: str | Path) -> bool:
    """Tell whether a path is a checkpoint of DeepSpeed's format. Opens no pickle.

    Args:
        path (str | Path): A file or folder.

    Returns:
        bool: True for a folder with DeepSpeed's files, for one whose ``latest`` names one or has its files beside it,
            and for an archive of Composer up to 0.27 with such files in it.
    """
    path = Path(path)
    if path.is_dir():
        # A ``latest`` that names a lost folder still is one of DeepSpeed's where other tags are beside it.
        return _is_tag_folder(path) or bool(_tag_folders(path)) or _tag_in(path) is not None
    return is_archive_of_composer(path)


def find_tag_folder(path: Path) -> Path:
    """Find the folder with DeepSpeed's files.

    Args:
        path (Path): It, or the folder around it.

    Returns:
        Path: The folder.

    Raises:
        CheckpointError: When there is none, or nothing says which.
    """
    if not path.is_dir():
        raise CheckpointError(
            f'{path} is not there.'
            if not path.exists()
            else f'{path} is neither a folder nor a complete archive of Composer (up to 0.27) with a folder deepspeed.'
        )
    if _is_tag_folder(path):
        return path
    below = _tag_folders(path)
    choice = f' It holds {", ".join(below)}: name one, as in {path / below[-1]}.' if below else ''
    latest = path / LATEST
    if not latest.is_file():
        if below:
            raise CheckpointError(f'{path} has no file {LATEST!r} that names the newest checkpoint.{choice}')
        nested = [folder.name for folder in _by_number(path) if (folder / LATEST).is_file() and _tag_folders(folder)]
        if nested:
            raise CheckpointError(f'{path} holds several checkpoints ({", ".join(nested)}): name one.')
        raise CheckpointError(
            f'{path} holds no checkpoint of DeepSpeed: neither files such as mp_rank_00_model_states.pt nor a file '
            f'{LATEST!r} that names a folder with them.'
        )
    tag = latest.read_text(errors='replace').strip()
    if not tag or '/' in tag or tag in ('.', '..') or not (path / tag).is_dir():
        raise CheckpointError(f'{latest} names {tag!r}, but there is no such folder beside it.{choice}')
    if not _is_tag_folder(path / tag):
        raise CheckpointError(f"{latest} names {tag!r}, but that folder holds none of DeepSpeed's files.{choice}")
    return path / tag


def shard_names(folder: Path) -> ShardNames:
    """List DeepSpeed's files.

    Args:
        folder (Path): The folder with them.

    Returns:
        ShardNames: Their names.

    Raises:
        CheckpointError: When they are of a run that cut its model in other ways than ZeRO does.
    """
    model, optimizer = {}, {}
    for name in sorted(entry.name for entry in folder.iterdir() if entry.is_file()):
        if _EXPERTS.fullmatch(name) or _PIPELINE.fullmatch(name):
            what = 'experts' if _EXPERTS.fullmatch(name) else 'stages of a pipeline'
            raise CheckpointError(
                f'{folder / name} is of a run that spread {what} over ranks; only checkpoints of ZeRO data parallelism '
                'can be read. Export the weights with the program that wrote it.'
            )
        found = _MODEL.fullmatch(name)
        into = model
        if found is None:
            found, into = _OPTIMIZER.fullmatch(name), optimizer
        if found is None:
            continue
        if int(found[2]) > 0:
            raise CheckpointError(
                f'{folder / name} is of a run with tensor parallelism; only checkpoints of ZeRO data parallelism can '
                'be read. Export the weights with the program that wrote it.'
            )
        into[None if found[1] is None else int(found[1])] = name
    return ShardNames(model, optimizer, (folder / 'zero').is_dir())


def _is_tag_folder(folder: Path) -> bool:
    names = (entry.name for entry in folder.iterdir())
    return any(_MODEL.fullmatch(n) or _OPTIMIZER.fullmatch(n) or _PIPELINE.fullmatch(n) for n in names)


def _tag_folders(path: Path) -> list[str]:
    return [folder.name for folder in _by_number(path) if _is_tag_folder(folder)]


def _tag_in(path: Path) -> str | None:
    # The sharded checkpoints of composer_ds have a file of this name, too.
    try:
        tag = (path / LATEST).read_text(errors='replace').strip()
    except OSError:
        return None
    return tag if tag.startswith('global_step') else None


def _by_number(path: Path) -> list[Path]:
    folders = [entry for entry in path.iterdir() if entry.is_dir()]
    return sorted(folders, key=lambda entry: ([int(n) for n in re.findall(r'\d+', entry.name)], entry.name))
