"""Training on a GPU. Runs inside rank processes."""

from __future__ import annotations

import torch
from composer import Trainer
from composer.utils import dist
from torch.utils.data import DataLoader

from composer_ds import DeepSpeed
from tests.distributed.bf16_cases import BATCH, LR, MICROBATCH, MOMENTUM, Network, by_hand, network_data
from tests.distributed.parity_cases import STRATEGIES, weights_of


def _train(strategy: str | None, precision: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(17)
    model = Network()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.02),
        train_dataloader=DataLoader(network_data(), batch_size=7, sampler=dist.get_sampler(network_data())),
        max_duration='1ep',
        device='gpu',
        precision=precision,
        device_train_microbatch_size=2,
        algorithms=[] if strategy is None else [DeepSpeed(**STRATEGIES[strategy])],
        progress_bar=False,
    )
    trainer.fit()
    weights = {name: value.cpu() for name, value in weights_of(trainer).items()}
    trainer.close()
    return weights


def fp16_on_gpu(strategy: str) -> dict[str, float]:
    """Train in ``amp_fp16``; return the largest difference to training by hand on a CPU, least move and loss scale."""
    torch.manual_seed(17)
    model = Network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = dict(STRATEGIES[strategy])
    settings['ds_config'] = {**settings.get('ds_config', {}), 'fp16': {'enabled': 'auto', 'initial_scale_power': 8}}
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        train_dataloader=DataLoader(network_data(), BATCH, sampler=dist.get_sampler(network_data(), shuffle=False)),
        max_duration='2ep',
        device='gpu',
        precision='amp_fp16',
        device_train_microbatch_size=MICROBATCH,
        algorithms=[DeepSpeed(**settings)],
        progress_bar=False,
    )
    trainer.fit()
    ours = {name: value.cpu() for name, value in weights_of(trainer).items()}
    assert trainer.state.scaler is not None
    scale = trainer.state.scaler.get_scale()
    trainer.close()
    oracle = by_hand([STRATEGIES[strategy]['zero_stage'] > 1] * 2, torch.float16, 256.0)
    return {
        'difference': max(float((ours[name] - oracle[name]).abs().max()) for name in oracle),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in oracle),
        'scale': scale,
    }


def compare_on_gpu(strategy: str, precision: str) -> dict[str, float]:
    """Return the largest difference to plain Composer in the same precision, and the least move."""
    torch.manual_seed(17)
    before = Network().state_dict()
    oracle, ours = _train(None, precision), _train(strategy, precision)
    return {
        'difference': max(float((ours[name] - oracle[name]).abs().max()) for name in oracle),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in oracle),
    }
