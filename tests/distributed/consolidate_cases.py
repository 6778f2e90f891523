"""A run that saves the same state in every format that a Trainer has. Runs inside rank processes."""

from __future__ import annotations

from typing import Any

import torch
from composer import ComposerModel, Trainer
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver
from tests.distributed.parity_cases import STRATEGIES


class Tied(ComposerModel):
    """Odd sizes; a tied, a frozen and an empty parameter, and buffers of two dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 9)
        self.frozen = nn.Linear(9, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer('count', torch.tensor(12345678901))

    def forward(self, batch):
        hidden = self.frozen(torch.tanh(self.inner(self.embedding(batch[0]))))
        return self.head(self.norm(hidden))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def save(folder: str, strategy: str) -> dict[str, Any] | None:
    """Train two batches; save sharded, and as Composer does; return what was saved, on rank 0."""
    torch.manual_seed(17)
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 7, (16,), generator=generator)
    dataset = TensorDataset(tokens, tokens.roll(1))
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05),
        train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False)),
        max_duration='2ba',
        device='cpu',
        algorithms=[DeepSpeed(**STRATEGIES[strategy])],
        callbacks=[ShardedCheckpointSaver(f'{folder}/sharded', interval='2ba')],
        progress_bar=False,
        run_name='to-consolidate',
        seed=5,
    )
    trainer.fit()
    trainer.save_checkpoint(f'{folder}/composer.pt')
    weights = trainer.state.model.state_dict()
    state = trainer.state.state_dict()['optimizers']['AdamW']['state']
    trainer.close()
    return {'before': before, 'weights': weights, 'state': state} if dist.get_global_rank() == 0 else None
