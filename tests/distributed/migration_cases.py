"""Runs the blocks of the pages about migration. Runs inside rank processes.

Composer 0.27, Lightning and MMEngine cannot be installed beside the current Composer. Where a block imports one of them
it finds a stand-in, which takes what the block gives, completes the ds_config as the source of the original does, and
trains with a raw DeepSpeed engine. The loop over DeepSpeed and Hugging Face's Trainer are the real ones.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import tarfile
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import composer
import deepspeed
import torch
from composer import ComposerModel
from composer.algorithms import GradientClipping
from composer.utils import dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Weights = dict[str, torch.Tensor]
_SEED = 3
_ENGINES: list[Any] = []  # the raw ones that a block made


class Net(nn.Module):
    """The reader's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 2))

    def forward(self, inputs):
        return self.layers(inputs)


class MyModel(Net, ComposerModel):
    """The reader's."""

    def forward(self, batch):
        return super().forward(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


def _points() -> TensorDataset:
    """Four optimizer steps for two ranks; with gradients whose norm is above 1."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(64, 6, generator=generator), 3 * torch.randn(64, 2, generator=generator))


def _sentences() -> list[dict[str, torch.Tensor]]:
    """One optimizer step, so that it does not matter who deals them out; each has a prompt without a loss."""
    ids = torch.randint(0, 32, (16, 7), generator=torch.Generator().manual_seed(4))
    return [{'input_ids': one, 'labels': one.where(torch.arange(7) > 1, -100)} for one in ids]


def _engine_for(module: nn.Module, optimizer: torch.optim.Optimizer, ds_config: dict[str, Any]) -> Any:
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config, dist_init_required=False)[0]
    _ENGINES.append(engine)
    return engine


def _loader_of(dataset: Any, batch_size: int) -> DataLoader:
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, shuffle=False))


class ComposerTrainer:
    """The Trainer of Composer 0.27 with a ``deepspeed_config``; ``composer/distributed/deepspeed.py`` completes it."""

    def __init__(self, **given: Any):
        self.given = given

    def fit(self) -> None:
        given, loader = self.given, self.given['train_dataloader']
        microbatch, batch = given['device_train_microbatch_size'], loader.batch_size
        ds_config = dict(given['deepspeed_config'])
        assert not {'optimizer', 'scheduler'} & ds_config.keys() and batch % microbatch == 0
        assert ds_config.setdefault('train_batch_size', batch * dist.get_world_size()) == batch * dist.get_world_size()
        ds_config.setdefault('gradient_accumulation_steps', batch // microbatch)
        assert ds_config.setdefault('train_micro_batch_size_per_gpu', microbatch) == microbatch
        ds_config['zero_allow_untested_optimizer'] = True
        for algorithm in given['algorithms']:
            assert isinstance(algorithm, GradientClipping) and algorithm.clipping_type == 'norm'
            ds_config['gradient_clipping'] = algorithm.clipping_threshold
        model, number = given['model'], 0
        engine = _engine_for(model, given['optimizers'], ds_config)
        for epoch in range(int(given['max_duration'].removesuffix('ep'))):
            for inputs, targets in loader:
                for part in zip(inputs.split(microbatch), targets.split(microbatch), strict=True):
                    engine.backward(model.loss(engine(part), part))
                    engine.step()
                number += 1
            self._save(engine, f'ep{epoch + 1}-ba{number}-rank{dist.get_global_rank()}.tar')

    def _save(self, engine: Any, name: str) -> None:
        os.makedirs(self.given['save_folder'], exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            engine.save_checkpoint(temporary, 'deepspeed')
            if dist.get_global_rank() == 0:
                torch.save(
                    {'state': {'run_name': 'a-run', 'timestamp': {}}, 'rng': []}, f'{temporary}/composer_states.pt'
                )
            with tarfile.open(f'{self.given["save_folder"]}/{name}', 'w') as archive:
                archive.add(temporary, arcname='')


class LightningModule(nn.Module):
    """Lightning's engine calls ``training_step`` where its forward is called."""

    def forward(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)  # pyright: ignore[reportCallIssue]


class LightningStrategy:
    """Lightning's ``DeepSpeedStrategy``, whose values are those of its signature; without offload."""

    def __init__(self, stage: int = 2, **given: Any):
        values = {
            'stage': stage, 'sub_group_size': 10**12, 'contiguous_gradients': True, 'overlap_comm': True,
            'allgather_partitions': True, 'reduce_scatter': True, 'allgather_bucket_size': 200_000_000,
            'reduce_bucket_size': 200_000_000,
        }  # fmt: skip
        assert given.keys() <= values.keys()
        self.config: dict[str, Any] = {
            'zero_allow_untested_optimizer': True,
            'zero_optimization': values | given,
        }


class LightningTrainer:
    """Lightning's Trainer with that strategy."""

    def __init__(self, **given: Any):
        self.given = given

    def fit(self, module: Any, loader: DataLoader) -> None:
        given = self.given
        configured = module.configure_optimizers()
        scheduler = configured['lr_scheduler']
        assert given['devices'] == dist.get_world_size() and scheduler['interval'] == 'epoch'
        ds_config = {
            **given['strategy'].config,
            'gradient_accumulation_steps': given['accumulate_grad_batches'],
            'train_micro_batch_size_per_gpu': loader.batch_size,
            'gradient_clipping': given.get('gradient_clip_val') or 0.0,
        }
        engine = _engine_for(module, configured['optimizer'], ds_config)
        # Lightning adds the sampler.
        loader, steps = _loader_of(loader.dataset, loader.batch_size or 1), 0
        for epoch in range(given['max_epochs']):
            for index, batch in enumerate(loader):
                engine.backward(engine(batch, index))
                engine.step()
            scheduler['scheduler'].step()  # before callbacks save
            steps += len(loader) // given['accumulate_grad_batches']
            state = {'epoch': epoch, 'global_step': steps, 'pytorch-lightning_version': '2.6.0', 'loops': {}}
            path = f'{given["default_root_dir"]}/checkpoints/epoch={epoch}-step={steps}.ckpt'
            engine.save_checkpoint(path, client_state=state, tag='checkpoint')


class FlexibleRunner:
    """MMEngine's runner with a ``DeepSpeedStrategy``."""

    def __init__(self, **given: Any):
        self.given = given

    def train(self) -> None:
        given, strategy = self.given, dict(self.given['strategy'])
        assert strategy.pop('type') == 'DeepSpeedStrategy' and given['train_cfg']['by_epoch'] is True
        ds_config = {'steps_per_print': 10**13, 'gradient_accumulation_steps': 1, **strategy.pop('config'), **strategy}
        model, optimizer = given['model'], dict(given['optim_wrapper']['optimizer'])
        optimizer = getattr(torch.optim, optimizer.pop('type'))(model.parameters(), **optimizer)
        engine = _engine_for(model, optimizer, ds_config)
        loader = _loader_of(given['train_dataloader']['dataset'], given['train_dataloader']['batch_size'])
        for epoch in range(given['train_cfg']['max_epochs']):
            for inputs, targets in loader:
                losses = engine(inputs, targets, mode='loss')
                engine.backward(sum(value for name, value in losses.items() if 'loss' in name))
                engine.step()
            extra = {'meta': {'epoch': epoch + 1, 'mmengine': '0.10.7'}, 'message_hub': {}, 'param_schedulers': []}
            name = f'epoch_{epoch + 1}.pth'
            engine.save_checkpoint(given['work_dir'], tag=name, client_state=extra, save_latest=False)


def _stand_ins(text: str) -> dict[str, types.ModuleType]:
    """Modules by the names that a block imports."""
    contained = {
        'lightning.pytorch': {'LightningModule': LightningModule, 'Trainer': LightningTrainer},
        'lightning.pytorch.strategies': {'DeepSpeedStrategy': LightningStrategy},
        'mmengine.model': {'BaseModel': nn.Module},
        'mmengine.runner._flexible_runner': {'FlexibleRunner': FlexibleRunner},
    }
    modules: dict[str, types.ModuleType] = {}
    for name in (name for name in contained if f'from {name} import' in text):
        parts = name.split('.')
        paths = ['.'.join(parts[: end + 1]) for end in range(len(parts))]
        modules = {path: types.ModuleType(path) for path in paths} | modules
        vars(modules[name]).update(contained[name])
    return modules


@contextlib.contextmanager
def _page(folder: str, extra: dict[str, types.ModuleType]) -> Iterator[dict[str, Any]]:
    """What the reader has, in a module of its own, in a folder of its own; weights begin alike."""
    before, module = pathlib.Path.cwd(), types.ModuleType('page')
    os.chdir(folder)
    sys.modules.update(page=module, **extra)
    dist.initialize_dist('cpu')
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed('gloo')
    torch.manual_seed(_SEED)
    dataset = _sentences() if pathlib.Path('my-model').exists() else _points()
    vars(module).update(Net=Net, MyModel=MyModel, dataset=dataset)
    try:
        yield vars(module)
    finally:
        os.chdir(before)
        for name in ('page', *extra):
            del sys.modules[name]


def _run(text: str, names: dict[str, Any]) -> None:
    exec(compile(text, 'a block', 'exec'), names)


def run_before(text: str, folder: str) -> Weights:
    """Train as before; return the weights. Collective."""
    del _ENGINES[:]
    text = text.replace('from composer import Trainer\n', '')
    if 'TrainingArguments(' in text:
        _prepare_accelerate()
        # Otherwise it makes the state anew.
        text = text.replace(
            "    deepspeed='ds_config.json',\n",
            "    deepspeed='ds_config.json',\n    accelerator_config={'use_configured_state': True},\n",
        )
    with _page(folder, _stand_ins(text)) as names:
        if 'deepspeed_config=' in text:
            names['Trainer'] = ComposerTrainer
        _run(text, names)
        engine = names.get('engine') or (_ENGINES[-1] if _ENGINES else names['trainer'].model_wrapped)
        return _weights_in(engine)


def _weights_in(engine: Any) -> Weights:
    """Gather the weights through what DeepSpeed exports, tied ones once."""
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()}
    assert all(value is not None for value in found.values())
    return {name: value.detach().clone() for name, value in found.items() if value is not None}


def _prepare_accelerate() -> None:
    """Let Accelerate (1.15) use DeepSpeed on all ranks, as on GPUs; on CPUs it takes DeepSpeed for a single process."""
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED


def run_after(beginning: str, text: str, folder: str) -> tuple[Weights, Weights]:
    """Run what a page has up to its Trainer, and then a block with a Trainer. Collective.

    Returns:
        tuple[Weights, Weights]: Of the model before there is a Trainer, and of the block's Trainer.
    """
    with _page(folder, {}) as names:
        _run(beginning, names)
        first = {name: value.detach().clone() for name, value in names['model'].state_dict().items()}
        torch.manual_seed(_SEED)
        _run(text, names)
        trainer: composer.Trainer = names['trainer']
        weights = {name: value.detach().clone() for name, value in trainer.state.model.state_dict().items()}
        trainer.close()
        return first, weights


def make_language_model(folder: str) -> None:
    """Write a tiny model without dropout, for ``from_pretrained``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        initializer_range=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    if dist.get_global_rank() == 0:
        GPT2LMHeadModel(config).save_pretrained(f'{folder}/my-model')
    dist.barrier()
