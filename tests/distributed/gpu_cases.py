"""Training on a GPU. Runs inside rank processes."""

from __future__ import annotations

import torch
from composer import Trainer
from composer.utils import dist
from torch.utils.data import DataLoader

from composer_ds import DeepSpeed
from tests.distributed.bf16_cases import Network, network_data
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


def compare_on_gpu(strategy: str, precision: str) -> dict[str, float]:
    """Return the largest difference to plain Composer in the same precision, and the least move."""
    torch.manual_seed(17)
    before = Network().state_dict()
    oracle, ours = _train(None, precision), _train(strategy, precision)
    return {
        'difference': max(float((ours[name] - oracle[name]).abs().max()) for name in oracle),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in oracle),
    }
