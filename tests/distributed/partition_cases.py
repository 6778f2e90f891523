"""Reading and writing partitions. Runs inside rank processes."""

from __future__ import annotations

from typing import Any

import torch
from composer import ComposerModel, Trainer
from composer.utils import dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from tests.distributed.parity_cases import STRATEGIES


class Odd(ComposerModel):
    """Sizes that no number of ranks divides; frozen and tied parameters, one of one element, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(5)
        self.norm.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer('offset', torch.zeros(3))
        self.head = nn.Linear(5, 1)

    def forward(self, batch):
        return self.head(self.norm(self.second(torch.tanh(self.first(batch[0]))))) * self.scale

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


def _trainer(strategy: str) -> Trainer:
    torch.manual_seed(17)
    generator = torch.Generator().manual_seed(8)
    dataset = TensorDataset(torch.randn(16, 5, generator=generator), torch.randn(16, 1, generator=generator))
    model = Odd()
    return Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05),
        train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset)),
        max_duration='2ba',
        device='cpu',
        algorithms=[DeepSpeed(**STRATEGIES[strategy])],
        progress_bar=False,
    )


def constants_come_back(strategy: str) -> None:
    """Every tensor is filled with a ramp of its own, so that a swapped, shifted or lost element shows."""
    trainer = _trainer(strategy)
    face = trainer.state.model
    written = {}
    for index, (name, value) in enumerate(Odd().state_dict().items()):
        written[name] = 100.0 * (index + 1) + torch.arange(value.numel()).reshape(value.shape)
    written['second.weight'] = written['first.weight']
    face.load_state_dict(written)
    torch.testing.assert_close(dict(face.state_dict()), written, rtol=0, atol=0)
    # The weights that the forward pass uses follow: the head alone decides the output for a norm of zero weight.
    zeros = {name: torch.zeros_like(value) for name, value in written.items()}
    zeros |= {'norm.bias': torch.ones(5), 'head.weight': torch.full((1, 5), 2.0), 'scale': torch.tensor([3.0])}
    face.load_state_dict(zeros)
    with torch.no_grad():
        assert face([torch.randn(4, 5)]).tolist() == [[30.0]] * 4
    for wrong, word in (
        ({**written, 'extra': torch.zeros(1)}, 'Unexpected key(s) in state_dict: "extra"'),
        ({name: value for name, value in written.items() if name != 'scale'}, 'Missing key(s) in state_dict: "scale"'),
        ({**written, 'head.weight': torch.zeros(2, 5)}, 'size mismatch for head.weight'),
    ):
        try:
            face.load_state_dict(wrong)
        except RuntimeError as error:
            assert word in str(error), error
        else:
            raise AssertionError(word)
    trainer.close()


def as_deepspeed_reads_them(strategy: str) -> dict[str, Any]:
    """Compare master weights and moments with what DeepSpeed's own tools gather, after two optimizer steps."""
    trainer = _trainer(strategy)
    trainer.fit()
    model = trainer.state.model
    weights, optimizer = model.state_dict(), trainer.state.optimizers[0].state_dict()
    state = {
        name: optimizer['state'][index] for index, (name, p) in enumerate(model.named_parameters()) if p.requires_grad
    }
    differences = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            theirs: Any = safe_get_full_fp32_param(parameter)
            theirs = theirs.reshape(weights[name].shape)
            differences[name] = float((weights[name] - theirs).abs().max())
            for key in ('exp_avg', 'exp_avg_sq'):
                theirs = safe_get_full_optimizer_state(parameter, key)
                theirs = theirs.reshape(weights[name].shape)
                assert theirs.abs().sum() > 0
                differences[f'{name} {key}'] = float((state[name][key] - theirs).abs().max())
            assert float(state[name]['step']) == 2.0
    trainer.close()
    return differences
