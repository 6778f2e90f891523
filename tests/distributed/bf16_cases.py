"""bf16 training by hand, and by DeepSpeed on the same data. Runs inside rank processes.

Composer offers ``precision='amp_bf16'`` on GPUs only; on CPU the ds_config asks for it.
"""

from __future__ import annotations

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


def network_data() -> TensorDataset:
    """28 samples of fp32 inputs and targets."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(3 * torch.randn(28, 6, generator=generator), 5 * torch.randn(28, 2, generator=generator))


def _model() -> Network:
    torch.manual_seed(17)
    return Network()


def by_hand(reduce_each_microbatch: bool) -> dict[str, torch.Tensor]:
    """Train with fp32 master weights, bf16 working weights, gradients added up in fp32; SGD with momentum.

    On two ranks the average of two bf16 gradients is taken in bf16, as DeepSpeed communicates them: after each
    microbatch (ZeRO 2 and 3, whose gradients are reduced in the backward pass) or once per optimizer step, in fp32
    (ZeRO 1).
    """
    masters = {name: value.clone() for name, value in _model().state_dict().items()}
    momenta = {name: torch.zeros_like(value) for name, value in masters.items()}
    working = _model().to(torch.bfloat16)
    dataset = network_data()
    ranks = dist.get_world_size()
    for _ in range(2):
        for first in range(0, len(dataset), BATCH * ranks):
            chunk = [tensor[first : first + BATCH * ranks] for tensor in dataset.tensors]
            per_rank = [[tensor[rank::ranks] for tensor in chunk] for rank in range(ranks)]
            gradients = {name: torch.zeros_like(value) for name, value in masters.items()}
            mean_size = sum(len(batch[0]) for batch in per_rank) / ranks
            for start in range(0, BATCH, MICROBATCH):
                found = []
                for batch in per_rank:
                    microbatch = [tensor[start : start + MICROBATCH] for tensor in batch]
                    working.load_state_dict({name: value.bfloat16() for name, value in masters.items()})
                    working.zero_grad()
                    with torch.autocast('cpu', torch.bfloat16):
                        outputs = working(microbatch)
                        loss = working.loss(outputs, microbatch)
                    (loss * (len(microbatch[0]) / mean_size)).backward()
                    found.append({name: p.grad for name, p in working.named_parameters()})
                for name, gradient in gradients.items():
                    if reduce_each_microbatch and ranks > 1:
                        gradient += (found[0][name] / 2 + found[1][name] / 2).float()
                    else:
                        gradient += sum(one[name].float() for one in found) / ranks
            for name, master in masters.items():
                momenta[name] = MOMENTUM * momenta[name] + gradients[name]
                master -= LR * momenta[name]
    return masters


def compare_bf16(strategy: str) -> dict[str, float]:
    """Return the largest difference to the training by hand, the least move, and what rounding to bf16 would change."""
    oracle = by_hand(reduce_each_microbatch=STRATEGIES[strategy]['zero_stage'] > 1)
    before = _model().state_dict()
    model = _model()
    strategy_settings = dict(STRATEGIES[strategy])
    strategy_settings['ds_config'] = {**strategy_settings.get('ds_config', {}), 'bf16': {'enabled': True}}
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        train_dataloader=DataLoader(
            network_data(), batch_size=BATCH, sampler=dist.get_sampler(network_data(), shuffle=False)
        ),
        max_duration='2ep',
        device='cpu',
        device_train_microbatch_size=MICROBATCH,
        algorithms=[DeepSpeed(**strategy_settings)],
        progress_bar=False,
    )
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
