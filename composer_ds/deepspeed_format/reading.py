"""A checkpoint of DeepSpeed, open for reading: one interface over all ZeRO stages and all trainers' arrangements."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from composer_ds.checkpoint.damage import damage
from composer_ds.checkpoint.source import StoredTensor
from composer_ds.deepspeed_format.archives import COMPOSER_STATES, is_archive_of_composer, unpack
from composer_ds.deepspeed_format.contents import Contents, module_contents
from composer_ds.deepspeed_format.folders import ShardNames, find_tag_folder, shard_names
from composer_ds.deepspeed_format.origin import facts_of
from composer_ds.deepspeed_format.partitioned import read_stage_1_or_2, read_stage_3
from composer_ds.deepspeed_format.prefixes import wrapper_prefix
from composer_ds.deepspeed_format.shards import Shards
from composer_ds.deepspeed_format.universal import read_universal
from composer_ds.deepspeed_format.unpartitioned import read_stage_0
from composer_ds.errors import CheckpointError

__all__ = ['DeepSpeedSource']


class DeepSpeedSource:
    """A checkpoint that DeepSpeed wrote, at any ZeRO stage. Implements ``CheckpointSource``.

    ``tensors`` has the fp32 master weights of what is trained, and frozen parameters and buffers as they are stored.
    Opening reads no weights, and the file of one rank; the others' are opened and checked when they are needed.

    Args:
        path (str | Path): The folder with DeepSpeed's files, or the one around it with ``latest``; of Composer up to
            0.27 the archive of any rank, or its name with ``{rank}`` in it.
        trusted (bool): Unpickle what ``torch.load(weights_only=True)`` refuses, which can run code of whoever wrote
            the files. Default: False.
        prefix (str | None): What to take off the beginning of names; None takes off what wrappers such as
            DistributedDataParallel or Lightning's add (``'module.'``, ``'_forward_module.'``), where all names begin
            with it. Give ``''`` for a model whose only attribute is called ``module``. Default: None.
        unpack_to (str | Path | None): An empty folder for the content of Composer's archives, kept afterwards; None
            makes a temporary one, which is removed with this object. Default: None.

    Attributes:
        param_groups (list[dict[str, Any]]): The optimizer's, each with the names of its parameters under ``'params'``
            beside its settings; empty where that is not known.
        scalar_state (dict[str, dict[str, Any]]): By parameter, the optimizer state that is one value for all of it,
            such as Adam's ``'step'``. Some optimizers keep it in ``param_groups``.
        state_absent_because (str | None): Why the optimizer state is not there, although it may be in the files.
        prefix (str): What was taken off the names.

    Raises:
        CheckpointError: When there is no such checkpoint, when its first file is missing or damaged, when a file holds
            classes that are not known to be harmless, or when experts, pipelines or tensor parallelism spread it.
    """

    format = 'DeepSpeed checkpoint'

    def __init__(
        self,
        path: str | Path,
        trusted: bool = False,
        prefix: str | None = None,
        unpack_to: str | Path | None = None,
    ):
        self.path = Path(path)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        by_composer = not self.path.is_dir() and is_archive_of_composer(self.path)
        if by_composer:
            if unpack_to is None:
                self._temporary = tempfile.TemporaryDirectory(prefix='deepspeed-checkpoint-')
                unpack_to = self._temporary.name
            folder = unpack(self.path, Path(unpack_to))
        else:
            folder = find_tag_folder(self.path)
        self._names = shard_names(folder)
        self._shards = Shards(folder, trusted)
        try:
            contents, self._world_size, zero_stage = _open(self._shards, self._names)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f'{folder} is not laid out as by the versions of DeepSpeed that are known here: '
                f'{type(error).__name__}: {error}'
            ) from error
        if prefix is None:
            # Composer put no wrapper around its model, and its own ComposerClassifier has an attribute ``module``.
            prefix = '' if by_composer else wrapper_prefix([*contents.tensors, *contents.tied])
        self.prefix = prefix
        self._own_names = {name.removeprefix(prefix): name for name in contents.tensors}
        if len(self._own_names) < len(contents.tensors):
            raise CheckpointError(f'Without {prefix!r}, two tensors of {self.path} have one name; give another prefix.')
        self._contents = contents
        self.tensors = {
            name: StoredTensor(name, stored.shape, stored.dtype, stored.kind, stored.state)
            for name, stored in zip(self._own_names, contents.tensors.values(), strict=True)
        }
        self.tied = {name.removeprefix(prefix): to.removeprefix(prefix) for name, to in contents.tied.items()}
        self.param_groups = [
            {**group, 'params': [name.removeprefix(prefix) for name in group['params']]}
            for group in contents.param_groups
        ]
        self.scalar_state = {name.removeprefix(prefix): values for name, values in contents.scalar_state.items()}
        self.state_absent_because = contents.state_absent_because
        model = self._shards.content(_any_model(self._names))
        composer_states = folder / COMPOSER_STATES if by_composer else None
        self.facts = facts_of(folder, model, self._world_size, zero_stage, composer_states)
        if self._names.universal:
            self.facts['converted by'] = 'ds_to_universal'
        if prefix:
            self.facts['taken off the names'] = prefix

    def read(self, name: str, start: int, numel: int, state: str | None = None) -> torch.Tensor:
        """Read a run of a tensor; holds little more memory than the result.

        Args:
            name (str): A name in ``tensors``.
            start (int): Where the run begins in the flattened tensor.
            numel (int): Its length.
            state (str | None): A key of the tensor's optimizer state; None for the weights. Default: None.

        Returns:
            torch.Tensor: Shape ``(numel,)``, in the stored dtype, in host memory.

        Raises:
            CheckpointError: When a file that has some of it is missing, damaged or of another run.
        """
        stored = self.tensors[name]
        if start < 0 or numel < 0 or start + numel > stored.shape.numel():
            raise ValueError(
                f'{name} has {stored.shape.numel():,} elements; {numel:,} from {start:,} on were asked for.'
            )
        dtype = stored.dtype if state is None else stored.state[state]
        place = self._contents.places[self._own_names[name], state]
        return self._shards.read(place.pieces(start, numel), numel, dtype)

    def missing(self) -> list[str]:
        """Find what the checkpoint lacks.

        Returns:
            list[str]: One sentence for each file that is not there, and for each parameter that is in no file.
        """
        folder = self._shards.folder
        absent = [name for name in self._expected() if not (folder / name).is_file()]
        lost = self._contents.lost
        return [f'{name} is missing: one of {self._world_size} ranks has not written it.' for name in absent] + [
            f'{name.removeprefix(self.prefix)} is in none of the files.' for name in lost
        ]

    def damaged(self) -> list[str]:
        """Compare every file with the checksums in it. Reads everything.

        Returns:
            list[str]: One sentence for each damaged file.
        """
        folder = self._shards.folder
        files = [folder / name for name in self._expected()]
        if self._names.universal:
            files += sorted((folder / 'zero').rglob('*.pt'))
        found = [(file, damage(str(file))) for file in files if file.is_file()]
        return [f'{file.relative_to(folder)} {what}.' for file, what in found if what is not None]

    def _expected(self) -> list[str]:
        names, ranks = self._names, range(self._world_size)
        model = list(names.model.values()) if None in names.model else [names.model_name(rank) for rank in ranks]
        partitioned = (
            names.optimizer or None not in names.model or self._contents.state_absent_because == _NO_PARTITIONS
        )
        if names.universal or not partitioned:
            return model
        return model + [names.optimizer_name(rank) for rank in ranks]


_NO_PARTITIONS = 'the files with the partitions are missing; the weights are those of the module'


def _any_model(names: ShardNames) -> str:
    return (
        names.model[None] if None in names.model else names.model[min(rank for rank in names.model if rank is not None)]
    )


def _open(shards: Shards, names: ShardNames) -> tuple[Contents, int, int]:
    """Read everything but the weights; also return the world size and the ZeRO stage."""
    folder = shards.folder
    if not names.model:
        raise CheckpointError(
            f'{folder} lacks every file with the state of the module, such as mp_rank_00_model_states.pt.'
        )
    model = _any_model(names)
    content = shards.content(model)
    if not isinstance(content, dict):
        raise CheckpointError(
            f'{folder / model} holds {type(content).__name__}, which is not what DeepSpeed stores there.'
        )
    world_size, shapes = content.get('dp_world_size', 1), content.get('param_shapes')
    param_shapes = [shapes] if isinstance(shapes, dict) else list(shapes or ())
    config = content.get('ds_config')
    zero = config.get('zero_optimization') if isinstance(config, dict) else None
    stage = (zero.get('stage') if isinstance(zero, dict) else None) or 0
    if None not in names.model:
        if not param_shapes and not names.universal and names.optimizer:
            raise CheckpointError(f'{folder / model} does not say in which order the parameters are stored.')
        if names.universal:
            return read_universal(shards, names, model, param_shapes), world_size, 3
        if not names.optimizer:
            raise CheckpointError(f'{folder} lacks every file with partitions, {names.optimizer_name(0)} and so on.')
        contents, check = read_stage_3(shards, names, model, param_shapes)
        shards.check_with(check)
        return contents, world_size, 3
    if names.universal:
        return read_universal(shards, names, model, param_shapes), world_size, stage
    if names.optimizer:
        if not param_shapes:
            raise CheckpointError(
                f'{folder / model} does not say in which order the parameters are stored (param_shapes): it is of a '
                'DeepSpeed before 0.4.'
            )
        contents, check = read_stage_1_or_2(shards, names, model, param_shapes)
        shards.check_with(check)
        return contents, world_size, stage or 1
    if param_shapes:
        contents = module_contents(shards, model, partitioned=False)
        contents.state_absent_because = _NO_PARTITIONS
        return contents, world_size, stage or 1
    return read_stage_0(shards, model), world_size, 0
