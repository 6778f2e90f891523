"""Training in 16 bits by hand, and by DeepSpeed on the same data. Runs inside rank processes.

Composer offers ``precision='amp_bf16'`` and ``'amp_fp16'`` on GPUs only; on CPU the ds_config asks for them.
"""

from __future__ import annotations

from typing import Any

import torch
from composer import ComposerModel, Trainer
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from tests.distributed.parity_cases import STRATEGIES, weights_of

MICROBATCH, BATCH, LR, MOMENTUM = 2, 7, 0.02, 0.9


class Network(ComposerModel):
    """Fed with fp32 inputs, with a layer norm, which autocast keeps in fp32 on some devices."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 2)
        )

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs.float(), batch[1])


def network_data(poisoned: bool = False) -> TensorDataset:
    """28 samples of fp32 inputs and targets; an infinite one among them, where asked for, spoils one batch."""
    generator = torch.Generator().manual_seed(3)
    inputs, targets = 3 * torch.randn(28, 6, generator=generator), 5 * torch.randn(28, 2, generator=generator)
    if poisoned:
        targets[9] = float('inf')
    return TensorDataset(inputs, targets)


def _model() -> Network:
    torch.manual_seed(17)
    return Network()


def by_hand(
    reduce_each_microbatch: list[bool],
    dtype: torch.dtype = torch.bfloat16,
    loss_scale: float = 1.0,
    scales: list[float] | None = None,
    poisoned: bool = False,
    growth_window: int = 1000,
) -> dict[str, torch.Tensor]:
    """Train with fp32 master weights, 16-bit working weights, gradients added up in fp32; SGD with momentum.

    One epoch for each entry of ``reduce_each_microbatch``. A batch whose gradients overflow is left out and halves the
    loss scale, which doubles whenever ``growth_window`` more batches have passed since, after the first; ``scales``
    takes the scale of each batch.
    On two ranks the average of two 16-bit gradients is taken in 16 bits, as DeepSpeed communicates them: after each
    microbatch (ZeRO 2 and 3, whose gradients are reduced in the backward pass) or once per optimizer step, in fp32
    (ZeRO 1).
    """
    masters = {name: value.clone() for name, value in _model().state_dict().items()}
    momenta = {name: torch.zeros_like(value) for name, value in masters.items()}
    working = _model().to(dtype)
    autocast = torch.autocast('cpu', dtype if dtype != torch.float32 else None, enabled=dtype != torch.float32)
    dataset = network_data(poisoned)
    ranks = dist.get_world_size()
    since_overflow = 0
    for each in reduce_each_microbatch:
        for first in range(0, len(dataset), BATCH * ranks):
            if scales is not None:
                scales.append(loss_scale)
            chunk = [tensor[first : first + BATCH * ranks] for tensor in dataset.tensors]
            per_rank = [[tensor[rank::ranks] for tensor in chunk] for rank in range(ranks)]
            gradients = {name: torch.zeros_like(value) for name, value in masters.items()}
            mean_size = sum(len(batch[0]) for batch in per_rank) / ranks
            for start in range(0, BATCH, MICROBATCH):
                found = []
                for batch in per_rank:
                    microbatch = [tensor[start : start + MICROBATCH] for tensor in batch]
                    working.load_state_dict({name: value.to(dtype) for name, value in masters.items()})
                    working.zero_grad()
                    with autocast:
                        outputs = working(microbatch)
                        loss = working.loss(outputs, microbatch)
                    (loss * loss_scale * (len(microbatch[0]) / mean_size)).backward()
                    found.append({name: p.grad for name, p in working.named_parameters()})
                for name, gradient in gradients.items():
                    if each and ranks > 1:
                        gradient += (found[0][name] / 2 + found[1][name] / 2).float()
                    else:
                        gradient += sum(one[name].float() for one in found) / ranks
            if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
                loss_scale /= 2
                since_overflow = 0
                continue
            for name, master in masters.items():
                momenta[name] = MOMENTUM * momenta[name] + gradients[name] / loss_scale
                master -= LR * momenta[name]
            if since_overflow > 0 and since_overflow % growth_window == 0:
                loss_scale *= 2
            since_overflow += 1
    return masters


def compare_bf16(strategy: str) -> dict[str, float]:
    """Return the largest difference to the training by hand, the least move, and what rounding to bf16 would change."""
    oracle = by_hand([STRATEGIES[strategy]['zero_stage'] > 1] * 2)
    before = _model().state_dict()
    trainer = half_trainer(strategy, {'bf16': {'enabled': True}})
    model = trainer.state.model
    trainer.fit()
    assert trainer.state.precision.value == 'amp_bf16'
    ours = weights_of(trainer)
    assert {value.dtype for value in ours.values()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    trainer.close()
    return {
        'difference': max(float((ours[name] - oracle[name]).abs().max()) for name in oracle),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in oracle),
        'rounding': max(float((ours[name] - ours[name].bfloat16().float()).abs().max()) for name in oracle),
    }


def half_trainer(strategy: str, sections: dict[str, Any], poisoned: bool = False, **arguments: Any) -> Trainer:
    """Make a Trainer whose ds_config asks for 16 bits."""
    model = _model()
    strategy_settings = dict(STRATEGIES[strategy])
    strategy_settings['ds_config'] = {**strategy_settings.get('ds_config', {}), **sections}
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        train_dataloader=DataLoader(
            network_data(poisoned), batch_size=BATCH, sampler=dist.get_sampler(network_data(), shuffle=False)
        ),
        device='cpu',
        device_train_microbatch_size=MICROBATCH,
        algorithms=[DeepSpeed(**strategy_settings)],
        progress_bar=False,
        **{'max_duration': '2ep', **arguments},
    )


def _autocast_by_hand() -> dict[str, torch.Tensor]:
    """Train fp32 weights whose forward pass runs under bf16 autocast; SGD with momentum."""
    model, ranks, dataset = _model(), dist.get_world_size(), network_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for _ in range(2):
        for first in range(0, len(dataset), BATCH * ranks):
            optimizer.zero_grad()
            chunk = [tensor[first : first + BATCH * ranks] for tensor in dataset.tensors]
            for rank in range(ranks):
                for start in range(0, BATCH, MICROBATCH):
                    microbatch = [tensor[rank::ranks][start : start + MICROBATCH] for tensor in chunk]
                    with torch.autocast('cpu', torch.bfloat16):
                        loss = model.loss(model(microbatch), microbatch)
                    (loss * (len(microbatch[0]) / len(chunk[0]))).backward()
            optimizer.step()
    return model.state_dict()


def compare_autocast(strategy: str) -> dict[str, float]:
    """Return the largest difference to fp32 weights trained under autocast by hand, the least move, and to fp32."""
    oracle, before = _autocast_by_hand(), _model().state_dict()
    trainer = half_trainer(strategy, {'torch_autocast': {'enabled': True, 'dtype': 'bfloat16'}})
    trainer.fit()
    assert trainer.state.precision.value == 'amp_bf16'
    assert {parameter.dtype for parameter in trainer.state.model.parameters()} == {torch.float32}
    ours = weights_of(trainer)
    trainer.close()
    trainer = half_trainer(strategy, {})
    trainer.fit()
    fp32 = weights_of(trainer)
    trainer.close()
    return {
        'difference': max(float((ours[name] - oracle[name]).abs().max()) for name in oracle),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in oracle),
        'to_fp32': max(float((ours[name] - fp32[name]).abs().max()) for name in oracle),
    }
