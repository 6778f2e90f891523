"""Checkpoints for tests, written by torch alone, with numbers of their own in every tensor."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from composer_ds.sharded.manifest import (
    LATEST,
    MANIFEST,
    STATE,
    FileEntry,
    Manifest,
    TensorEntry,
    state_key,
    weights_key,
)


class Cut(torch.Tensor):
    """A flattened tensor in several runs, as several ranks would hold it."""

    runs: list[tuple[int, torch.Tensor]]

    @staticmethod
    def __new__(cls, whole: torch.Tensor, ranks: int):
        self = torch.Tensor._make_wrapper_subclass(cls, (whole.numel(),), dtype=whole.dtype)  # pyright: ignore
        flat = whole.reshape(-1)
        # Uneven, and some ranks may have nothing.
        bounds = [0, *(max(0, flat.numel() * rank // ranks - rank) for rank in range(1, ranks)), flat.numel()]
        self.runs = [(a, flat[a:b]) for a, b in itertools.pairwise(bounds) if b > a]
        return self

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, (start,)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size((start,)), run.shape),
                    properties=TensorProperties.create_from_tensor(run),
                    size=self.shape,
                ),
            )
            for start, run in self.runs
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((start,)), run.shape) for start, run in self.runs]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return dict(self.runs)[index.offset[0]]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # pyright: ignore[reportAttributeAccessIssue]
            return args[0]
        raise NotImplementedError(func)


@dataclass
class Model:
    """Tensors of every kind, by name, with state of the optimizer."""

    tensors: dict[str, torch.Tensor]
    kinds: dict[str, str]
    state: dict[str, dict[str, torch.Tensor]]
    tied: dict[str, str] = field(default_factory=dict)

    def with_tied(self) -> dict[str, torch.Tensor]:
        return self.tensors | {name: self.tensors[original] for name, original in self.tied.items()}


def small_model() -> Model:
    """A trained, a frozen 16-bit and a tied tensor, buffers, one of no elements and a scalar."""
    counter = itertools.count(1)

    def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        return (torch.arange(numel) / 7 + 1000 * next(counter)).to(dtype).reshape(shape)

    tensors = {
        'embed.weight': filled(11, 3),
        'layer.weight': filled(5, 7),
        'layer.scale': filled(),
        'layer.none': filled(0, 4),
        'frozen.weight': filled(4, 4, dtype=torch.bfloat16),
        'norm.running_mean': filled(6, dtype=torch.float64),
        'norm.count': filled(dtype=torch.int64),
        'mask': torch.tensor([True, False, True]),
    }
    kinds = dict.fromkeys(tensors, 'trained') | {'frozen.weight': 'frozen'}
    kinds |= dict.fromkeys(('norm.running_mean', 'norm.count', 'mask'), 'buffer')
    state = {
        name: {'exp_avg': filled(*tensor.shape), 'exp_avg_sq': filled(*tensor.shape)}
        for name, tensor in tensors.items()
        if kinds[name] == 'trained'
    }
    return Model(tensors, kinds, state, {'head.weight': 'embed.weight'})


def write_sharded(
    folder: Path, model: Model, *, ranks: int = 3, batch: int = 4, integrations: dict[str, Any] | None = None
) -> Path:
    """Write a sharded checkpoint with DCP, as if from several ranks, and ``latest`` beside it."""
    cut: dict[str, Any] = {weights_key(name): Cut(tensor, ranks) for name, tensor in model.tensors.items()}
    for name, state in model.state.items():
        cut |= {state_key(name, key): Cut(tensor, ranks) for key, tensor in state.items()}
    save(
        {key: value for key, value in cut.items() if value.runs},
        storage_writer=FileSystemWriter(folder, single_file_per_rank=False, thread_count=1),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    torch.save({'state': {'integrations': integrations or {}}, 'rng': [], 'optimizer': {}}, folder / STATE)
    manifest = Manifest(
        run_name='a-run',
        time={'epoch': 1, 'batch': batch, 'sample': 8 * batch, 'token': 0},
        optimizer_steps={'attempted': batch, 'applied': batch - 1, 'skipped': 1},
        world_size=ranks,
        zero_stage=2,
        offload_optimizer='cpu',
        offload_param='none',
        precision='amp_bf16',
        versions={'composer-ds': '0.1.0', 'torch': torch.__version__},
        weights_only=False,
        optimizer='AdamW',
        param_groups=[list(model.state)],
        tensors={
            name: TensorEntry.model_validate({
                'shape': tuple(tensor.shape),
                'dtype': str(tensor.dtype).removeprefix('torch.'),
                'kind': model.kinds[name],
                'state': dict.fromkeys(model.state.get(name, {}), 'float32'),
            })
            for name, tensor in model.tensors.items()
        },
        tied=model.tied,
        files={
            path.name: FileEntry(size_bytes=path.stat().st_size, crc32=zlib.crc32(path.read_bytes()))
            for path in sorted(folder.iterdir())
        },
    )  # fmt: skip
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    (folder.parent / LATEST).write_text(folder.name + '\n')
    return folder


def write_composer_file(path: Path, model: Model, *, integrations: dict[str, Any] | None = None) -> Path:
    """Write what Composer would, with its kinds of objects that are no plain values."""
    import datetime

    import numpy as np

    weights = model.with_tied()
    optimizer = {
        'state': {name: {'step': torch.ones(()), **state} for name, state in model.state.items()},
        'param_groups': [{'lr': np.float64(0.1), 'params': list(model.state)}],
    }
    state = {
        'model': weights,
        'optimizers': {'AdamW': optimizer},
        'algorithms': [('DeepSpeed', {'repr': '', 'optimizer_steps': {'applied': 3, 'skipped': 1}})],
        'timestamp': {'Timestamp': {'epoch': 1, 'batch': 4, 'total_wct': datetime.timedelta(seconds=5)}},
        'run_name': 'a-run',
        'integrations': integrations or {},
        'metadata': {'world_size': 2, 'precision': 'fp32', 'torch_version': torch.__version__},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({'state': state, 'rng': [{'numpy': np.random.RandomState(1).get_state()}]}, path)
    return path
