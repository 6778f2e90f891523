"""Settings that meet in a Trainer. Runs inside rank processes."""

from __future__ import annotations

import time
from typing import Any

import torch
from composer import Trainer
from composer.optim import LinearWithWarmupScheduler
from composer.utils import dist

from composer_ds import ConfigError, DeepSpeed
from tests.distributed.parity_cases import STRATEGIES, Regression, _loader, _vectors, weights_of


def _trainer(algorithms: list[Any], **arguments: Any) -> Trainer:
    torch.manual_seed(17)
    return Trainer(
        model=arguments.pop('model', None) or Regression(),
        device='cpu',
        max_duration='2ep',
        algorithms=algorithms,
        seed=5,
        progress_bar=False,
        **{
            'train_dataloader': _loader(_vectors()),
            'device_train_microbatch_size': 2,
            'schedulers': LinearWithWarmupScheduler(t_warmup='3ba', alpha_f=0.1),
            **arguments,
        },
    )


def optimizer_of_section(strategy: str | None) -> dict[str, torch.Tensor]:
    """Train with AdamW as the ds_config describes it; the oracle is given the same AdamW."""
    if strategy is None:
        torch.manual_seed(17)
        model = Regression()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.95), weight_decay=0.1)
        trainer = _trainer([], model=model, optimizers=optimizer)
    else:
        parameters = {'lr': 0.02, 'betas': [0.8, 0.95], 'eps': 'auto', 'weight_decay': 0.1}
        settings = dict(STRATEGIES[strategy])
        section = {'type': 'Adam', 'params': parameters}  # DeepSpeed means AdamW by it
        settings['ds_config'] = {**settings.get('ds_config', {}), 'optimizer': section}
        trainer = _trainer([DeepSpeed(**settings)])
        assert isinstance(trainer.state.optimizers[0], torch.optim.AdamW)
    trainer.fit()
    weights = weights_of(trainer)
    trainer.close()
    return weights


def fused_kernel(fused: bool | None) -> dict[str, Any]:
    """Train an offloaded AdamW; tell which kernel ran it, and what the user's groups and the checkpoint say."""
    torch.manual_seed(17)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    algorithm = DeepSpeed(zero_stage=2, offload_optimizer='cpu')
    trainer = _trainer([algorithm], model=model, optimizers=optimizer)
    trainer.fit()
    ds_engine: Any = algorithm.ds_engine
    found = {
        'run as': ds_engine.optimizer.optimizer.param_groups[0]['fused'],
        'user': optimizer.param_groups[0]['fused'],
        'checkpoint': trainer.state.optimizers[0].state_dict()['param_groups'][0]['fused'],
        'weights': weights_of(trainer),
    }
    trainer.close()
    return found


def _error_and_time(build) -> tuple[list[str], float]:
    started = time.monotonic()
    try:
        build()
    except ConfigError as error:
        return error.problems, time.monotonic() - started
    raise AssertionError('no ConfigError was raised')


def conflict_on_one_rank() -> tuple[list[str], float]:
    """Only rank 1 has a ds_config that disagrees; the other must not go on and wait for it."""
    clipping = {'gradient_clipping': 'auto'} if dist.get_global_rank() == 0 else {'train_batch_size': 99}
    return _error_and_time(lambda: _trainer([DeepSpeed(ds_config=clipping)]))


def conflict_at_fit() -> list[str]:
    """The dataloader is given to ``fit``, where it does not fit the ds_config; one that does, trains."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    whole = 4 * dist.get_world_size()
    algorithm = DeepSpeed(ds_config={'train_batch_size': whole + 1, 'gradient_accumulation_steps': 'auto'})
    trainer = _trainer([algorithm], model=model, optimizers=optimizer, train_dataloader=None, schedulers=None)
    problems, _ = _error_and_time(lambda: trainer.fit(train_dataloader=_loader(_vectors())))
    trainer.close()
    return problems


def every_kind_of_conflict() -> tuple[list[str], float]:
    """Several conflicts of different kinds in one Trainer."""
    torch.manual_seed(17)
    model = Regression()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    ds_config = {
        'gradient_cliping': 1.0,
        'train_batch_size': 77,
        'scheduler': {'type': 'WarmupLR', 'params': {'warmup_num_steps': 10}},
        'zero_optimization': {'stage': 3},
    }
    return _error_and_time(
        lambda: _trainer([DeepSpeed(ds_config=ds_config)], model=model, optimizers=optimizer, precision='fp32')
    )


class Rotary(Regression):
    """With a table in fp32 that bf16 cannot hold, and a running count."""

    inv_freq: torch.Tensor
    total: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer('inv_freq', 1.0 / 10000 ** (torch.arange(0, 6).float() / 6))
        self.register_buffer('total', torch.zeros(()))

    def forward(self, batch):
        self.total += 1.0
        return super().forward([batch[0] * torch.cos(self.inv_freq), batch[1]]).float()


def buffers_in_16_bits(data_types: dict[str, Any]) -> dict[str, Any]:
    """Train in bf16; tell the dtypes of the buffers afterwards, and whether the table is what it was."""
    torch.manual_seed(17)
    model = Rotary()
    table = model.inv_freq.clone()
    ds_config = {'bf16': {'enabled': True}, 'data_types': data_types}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = DeepSpeed(zero_stage=3, ds_config=ds_config)
    trainer = _trainer([algorithm], model=model, optimizers=optimizer)
    trainer.fit()
    assert algorithm.plan is not None
    found = {
        'dtypes': {name: str(buffer.dtype) for name, buffer in model.named_buffers()},
        'same': torch.equal(model.inv_freq, table),
        'notes': ' '.join(algorithm.plan.notes),
    }
    trainer.close()
    return found
