"""Checkpoints of raw DeepSpeed engines, and what is in these engines. Runs inside rank processes."""

from __future__ import annotations

import copy
import random
import sys
import tarfile
import tempfile
import types
from typing import Any

import deepspeed
import numpy as np
import torch
from composer.utils import dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

_CUT = {
    'stage3_param_persistence_threshold': 0,
    'sub_group_size': 40,
    'stage3_prefetch_bucket_size': 30,
    'stage3_max_live_parameters': 100,
}
_CPU = {'device': 'cpu'}
_BF16, _FP16 = {'bf16': {'enabled': True}}, {'fp16': {'enabled': True, 'initial_scale_power': 4}}
CONFIGS: dict[str, dict[str, Any]] = {
    'zero0': {},
    'zero0-bf16': _BF16,
    'zero1': {'zero_optimization': {'stage': 1}},
    'zero1-bf16': {'zero_optimization': {'stage': 1}, **_BF16},
    # The only one with DeepSpeed's BF16_Optimizer, which stores other things than the ZeRO optimizers.
    'zero1-bf16-fp32': {
        'zero_optimization': {'stage': 1},
        'data_types': {'grad_accum_dtype': 'fp32'},
        **_BF16,
    },
    'zero1-elastic': {'zero_optimization': {'stage': 1, 'elastic_checkpoint': True}},
    'zero1-cpu': {'zero_optimization': {'stage': 1, 'offload_optimizer': _CPU}},
    'zero2': {'zero_optimization': {'stage': 2}},
    'zero2-round': {'zero_optimization': {'stage': 2, 'round_robin_gradients': True}},
    'zero2-bf16': {'zero_optimization': {'stage': 2}, **_BF16},
    'zero2-fp16': {'zero_optimization': {'stage': 2}, **_FP16},
    'zero2-cpu': {'zero_optimization': {'stage': 2, 'offload_optimizer': _CPU}},
    'zero3': {'zero_optimization': {'stage': 3}},
    'zero3-cut': {'zero_optimization': {'stage': 3, **_CUT}},
    'zero3-cut-bf16': {'zero_optimization': {'stage': 3, **_CUT}, **_BF16},
    'zero3-cut-cpu': {'zero_optimization': {'stage': 3, 'offload_optimizer': _CPU, **_CUT}},
    'zero3-cut-cpu-params': {
        'zero_optimization': {'stage': 3, 'offload_optimizer': _CPU, 'offload_param': _CPU, **_CUT}
    },
}


class Odd(nn.Module):
    """Sizes that no number of ranks divides; frozen, tied and frozen tied parameters; buffers of two dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.norm.bias.requires_grad_(False)
        self.second = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.fixed = nn.Linear(5, 3).requires_grad_(False)
        self.twin = nn.Linear(5, 3).requires_grad_(False)
        self.twin.weight = self.fixed.weight
        self.register_buffer('offset', torch.tensor([1.25, 2.5, 3.75]))
        self.register_buffer('count', torch.tensor(12345678901))
        self.register_buffer('forgotten', torch.ones(2), persistent=False)

    def forward(self, tokens):
        hidden = self.second(self.norm(torch.tanh(self.first(self.embedding(tokens)))))
        logits = self.head(hidden * self.scale)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())


class Plain(nn.Module):
    """Nothing frozen: what a checkpoint of stage 0 can be mapped for."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 11)

    def forward(self, tokens):
        logits = self.second(torch.tanh(self.first(self.embedding(tokens))))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())


class Wrapper(nn.Module):
    """As Lightning 1.8 to 2.0 put around a model."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._forward_module = module

    def forward(self, tokens):
        return self._forward_module(tokens)


OPTIMIZERS = {
    'adamw': lambda groups: torch.optim.AdamW(groups, lr=0.02),
    'sgd': lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
}


def engine_of(config: str, optimizer: str, model: nn.Module | None = None) -> Any:
    """A raw DeepSpeed engine after three optimizer steps; every rank has its own data."""
    dist.initialize_dist('cpu')
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed('gloo')
    torch.manual_seed(3)
    if model is None:
        model = Odd()
        model.norm.bias.data.normal_()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {'params': [p for _, p in trained if p.dim() > 1], 'weight_decay': 0.1},
        {'params': [p for name, p in trained if p.dim() == 1 and name != 'scale'], 'weight_decay': 0.0},
        # One element: on most ranks, nothing but padding.
        {'params': [p for name, p in trained if name == 'scale'], 'lr': 0.5},
    ]
    plain = isinstance(model, Plain)
    ds_config = {
        'train_micro_batch_size_per_gpu': 4,
        'zero_force_ds_cpu_optimizer': False,
        'zero_allow_untested_optimizer': True,
        'steps_per_print': 10**9,
        **copy.deepcopy(CONFIGS[config]),
    }
    engine = deepspeed.initialize(
        model=model,
        optimizer=OPTIMIZERS[optimizer](model.parameters() if plain else groups),
        config=ds_config,
        dist_init_required=False,
    )[0]
    generator = torch.Generator().manual_seed(100 + dist.get_global_rank())
    for _ in range(3):
        engine.backward(engine(torch.randint(0, 11, (4, 6), generator=generator)))
        engine.step()
    return engine


def contents(engine: Any, optimizer_name: str = 'adamw') -> dict[str, Any]:
    """What is in the engine, gathered through what DeepSpeed exports. Collective."""
    partitioned = engine.zero_optimization_stage() > 0
    optimizer = engine.optimizer
    # DeepSpeed (0.19.8) links the states of all parameter groups when the first group has made its first step, so that
    # safe_get_full_optimizer_state finds nothing for the others.
    if hasattr(optimizer, '_hp_optimizer_states_linked'):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    found: dict[str, Any] = {'weights': {}, 'state': {}, 'kinds': {}, 'names': []}
    module = engine.module
    duplicates = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters():
        trained = parameter.requires_grad
        found['kinds'][name] = 'trained' if trained else 'frozen'
        if trained and partitioned:
            value = safe_get_full_fp32_param(parameter)
        elif engine.zero_optimization_stage() == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                value = parameter.data.clone()
        else:
            value = parameter.data
        assert value is not None
        found['weights'][name] = value.detach().cpu().clone()
        if not trained:
            continue
        for key in ('exp_avg', 'exp_avg_sq') if optimizer_name == 'adamw' else ('momentum_buffer',):
            if partitioned:
                state = safe_get_full_optimizer_state(parameter, key)
            else:
                inner = getattr(optimizer, 'optimizer', optimizer)
                masters = [p for group in inner.param_groups for p in group['params']]
                at = [id(p) for p in module.parameters() if p.requires_grad].index(id(parameter))
                state = inner.state[masters[at]].get(key) if isinstance(module, Plain) else None
            if state is not None:
                found['state'][name, key] = state.detach().cpu().clone()
        if not partitioned and hasattr(optimizer, 'fp32_groups') and isinstance(module, Plain):
            at = [id(p) for p in module.parameters() if p.requires_grad].index(id(parameter))
            found['weights'][name] = optimizer.fp32_groups[0][at].detach().clone()
    for name, buffer in module.named_buffers():
        if name != 'forgotten':
            found['weights'][name] = buffer.detach().clone()
            found['kinds'][name] = 'buffer'
    first: dict[int, str] = {}
    found['tied'] = {
        name: first[id(parameter)]
        for name, parameter in duplicates.items()
        if first.setdefault(id(parameter), name) != name
    }
    return found


def save(folder: str, config: str, optimizer: str, plain: bool = False) -> dict[str, Any] | None:
    """Train, save, and return on rank 0 what is in the engine, and what DeepSpeed's own tool reads."""
    engine = engine_of(config, optimizer, Plain() if plain else None)
    engine.save_checkpoint(folder)
    found = contents(engine, optimizer)
    if dist.get_global_rank() != 0:
        return None
    # It does not read stage 0, nor what BF16_Optimizer writes.
    if engine.zero_optimization_stage() > 0 and config != 'zero1-bf16-fp32':
        found['zero_to_fp32'] = {
            name: value.clone() for name, value in (get_fp32_state_dict_from_zero_checkpoint(folder) or {}).items()
        }
    return found


def save_universal(folder: str, config: str) -> dict[str, Any] | None:
    """Save, and convert with DeepSpeed's own tool."""
    engine = engine_of(config, 'adamw')
    engine.save_checkpoint(
        folder, tag='a', client_state={'universal_checkpoint_info': {'universal_checkpoint_version': 0.4}}
    )
    found = contents(engine)
    if dist.get_global_rank() == 0:
        from deepspeed.checkpoint.ds_to_universal import main

        arguments = types.SimpleNamespace(
            input_folder=f'{folder}/a',
            output_folder=f'{folder}/a_universal',
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
        main(arguments)
    dist.barrier()
    return found if dist.get_global_rank() == 0 else None


def save_as_lightning(folder: str) -> dict[str, Any]:
    """``DeepSpeedStrategy.save_checkpoint`` of Lightning, as its source has it; Lightning is not needed.

    ``client_state`` is ``dump_checkpoint``'s dictionary without the state dicts.
    """
    model = Wrapper(Odd())
    engine = engine_of('zero2', 'adamw', model)
    checkpoint = {
        'epoch': 2,
        'global_step': 3,
        'pytorch-lightning_version': '2.0.9',
        'loops': {'fit_loop': {'state_dict': {}, 'epoch_progress': {'current': {'completed': 2}}}},
        'callbacks': {
            "ModelCheckpoint{'monitor': None}": {'best_model_score': torch.tensor(0.5), 'kth_best_model': ''}
        },
        'lr_schedulers': [],
        'hparams_name': 'kwargs',
        'hyper_parameters': {'width': 5},
    }
    engine.save_checkpoint(f'{folder}/epoch=2.ckpt', client_state=checkpoint, tag='checkpoint')
    found = contents(engine)
    prefix = '_forward_module.'
    found['weights'] = {
        name.removeprefix(prefix): value
        for name, value in found['weights'].items()
        if name.removeprefix(prefix) != 'forgotten'
    }
    return found


def save_as_mmengine(folder: str) -> dict[str, Any]:
    """``DeepSpeedStrategy.save_checkpoint`` of MMEngine, as its source has it; MMEngine is not needed."""
    # Its log is pickled as objects of this class, with arrays of numpy in them.
    module = types.ModuleType('mmengine.logging.history_buffer')
    buffer = type('HistoryBuffer', (), {'__module__': module.__name__})
    module.HistoryBuffer = buffer  # pyright: ignore[reportAttributeAccessIssue]
    log = buffer()
    vars(log).update(_log_history=np.array([1.0, 2.0]), _count_history=np.array([1, 1]), _max_length=10)
    names = ('mmengine', 'mmengine.logging', module.__name__)
    sys.modules.update({names[0]: types.ModuleType(names[0]), names[1]: types.ModuleType(names[1]), names[2]: module})
    try:
        engine = engine_of('zero3-cut', 'adamw')
        extra = {
            'meta': {'epoch': 1, 'iter': 3, 'seed': 0, 'mmengine': '0.10.7', 'cfg': 'a = 1', 'experiment_name': 'run'},
            'message_hub': {'log_scalars': {'train/loss': log}, 'runtime_info': {'epoch': 0}, 'resumed_keys': {}},
            'param_schedulers': [{'last_step': 3}],
            'optim_wrapper': {'base_param_settings': None},
        }
        engine.save_checkpoint(folder, tag='epoch_1.pth', client_state=extra, save_latest=False)
    finally:
        for name in names:
            del sys.modules[name]
    return contents(engine)


def save_as_composer(folder: str, end: str, config: str) -> dict[str, Any]:
    """``composer.utils.checkpoint.save_checkpoint`` of Composer 0.27, as its source has it.

    Every rank saves into a temporary folder of its own, and packs it; rank 0 adds ``composer_states.pt``.
    """
    engine = engine_of(config, 'adamw')
    rank = dist.get_global_rank()
    timestamp = {'iteration': 0, 'epoch': 1, 'batch': 5, 'sample': 20, 'token': 0, 'batch_in_epoch': 2}
    state = {
        'state': {'run_name': 'a-run', 'timestamp': timestamp, 'schedulers': {}, 'algorithms': []},
        'rng': [{'python': random.getstate(), 'numpy': np.random.get_state(), 'torch': torch.random.get_rng_state()}],
    }
    with tempfile.TemporaryDirectory() as temporary:
        engine.save_checkpoint(temporary, 'deepspeed')
        if rank == 0:
            torch.save(state, f'{temporary}/composer_states.pt')
        mode: Any = 'w:gz' if end.endswith('gz') else 'w'
        with tarfile.open(f'{folder}/ep1-ba5-rank{rank}{end}', mode) as archive:
            archive.add(temporary, arcname='')
    return contents(engine)


def has_fp16() -> bool:
    """Whether the processor can."""
    accelerator = get_accelerator()
    assert accelerator is not None
    return bool(accelerator.is_fp16_supported())


class Language(nn.Module):
    """Takes and gives what Hugging Face's Trainer wants."""

    def __init__(self):
        super().__init__()
        self.model = Plain()

    def forward(self, input_ids, labels=None):
        return {'loss': self.model(input_ids)}


def save_by_trainer(folder: str, stage: int) -> dict[str, Any]:
    """Train and save with Hugging Face's Trainer itself."""
    from transformers import Trainer, TrainingArguments

    # Without the weights in 16 bits, transformers 5.24 removes a file of its own on both ranks at once.
    zero = {'stage': stage, 'stage3_gather_16bit_weights_on_model_save': True, **(_CUT if stage == 3 else {})}
    ds_config = {
        'train_micro_batch_size_per_gpu': 'auto',
        'zero_optimization': zero,
        'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False,
    }
    arguments = TrainingArguments(
        folder,
        deepspeed=ds_config,
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        optim='adamw_torch',
    )
    torch.manual_seed(3)
    data = [{'input_ids': row, 'labels': row} for row in torch.randint(0, 11, (24, 6))]
    model = Language()
    trainer = Trainer(model=model, args=arguments, train_dataset=data)  # pyright: ignore[reportArgumentType]
    trainer.train()
    return contents(trainer.model_wrapped)


def save_by_accelerate(folder: str) -> dict[str, Any]:
    """Train and save with Hugging Face's Accelerate itself."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    # It keeps what the Trainer gave it.
    AcceleratorState._reset_state(reset_partial_state=True)

    ds_config = {
        'train_micro_batch_size_per_gpu': 4,
        'zero_optimization': {'stage': 2},
        'zero_allow_untested_optimizer': True,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config))
    torch.manual_seed(3)
    model = Odd()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.02))
    for _ in range(3):
        accelerator.backward(model(torch.randint(0, 11, (4, 6))))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    return contents(model)
