"""The bug report that composer_ds grew from, and tokens that weigh alike. Runs inside rank processes."""

from __future__ import annotations

from typing import Any

import torch
from composer import ComposerModel, DataSpec, Trainer
from composer.algorithms import GradientClipping
from composer.models import HuggingFaceModel
from composer.optim import LinearWithWarmupScheduler
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import MT5Config, MT5ForConditionalGeneration

from composer_ds import DeepSpeed, optimizer_steps
from tests.distributed.clock_cases import RecordsUpdates
from tests.distributed.parity_cases import STRATEGIES, weights_of

ACCUMULATION, UPDATES, LR = 64, 4, 2.0
REPORTED = {'zero_optimization': {'overlap_comm': True, 'contiguous_gradients': True}, 'gradient_clipping': 1.0}
"""The reporter's ds_config, with ZeRO 2 and the optimizer offloaded to CPU."""


class Sentences(Dataset):
    """Pairs of token sequences."""

    def __init__(self, count: int):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randint(2, 20, (count, 6), generator=generator)
        self.labels = torch.randint(2, 20, (count, 4), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {'input_ids': self.inputs[index], 'labels': self.labels[index]}


def _mt5() -> HuggingFaceModel:
    torch.manual_seed(17)
    config = MT5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=2, dropout_rate=0.0
    )
    return HuggingFaceModel(MT5ForConditionalGeneration(config), tokenizer=None)


def accumulate_64(how: str) -> dict[str, Any]:
    """Four updates of 64 samples per rank: ``plain`` Composer, by the engine's ``window``, or by ``microbatches``."""
    model, updates = _mt5(), RecordsUpdates()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dataset = Sentences(ACCUMULATION * UPDATES * dist.get_world_size())
    algorithms: list[Any] = [GradientClipping('norm', 1.0)]
    if how != 'plain':
        window = {'gradient_accumulation_steps': ACCUMULATION, 'train_micro_batch_size_per_gpu': 1}
        algorithms = [DeepSpeed(zero_stage=2, offload_optimizer='cpu', ds_config={**REPORTED, **window})]
    batch = 1 if how == 'window' else ACCUMULATION
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
        schedulers=LinearWithWarmupScheduler(t_warmup='1000ba', t_max='2000ba'),
        train_dataloader=DataLoader(dataset, batch, sampler=dist.get_sampler(dataset, shuffle=False)),
        max_duration='1ep',
        device='cpu',
        device_train_microbatch_size=1,
        algorithms=algorithms,
        callbacks=[updates],
        progress_bar=False,
    )
    trainer.fit()
    found = {
        'weights': weights_of(trainer),
        'before': before,
        'updates': updates.seen,
        'batches': int(trainer.state.timestamp.batch),
        'lr': trainer.state.optimizers[0].param_groups[0]['lr'],
        'counts': {} if how == 'plain' else optimizer_steps(trainer.state).state_dict(),
    }
    trainer.close()
    return found


class Tagger(ComposerModel):
    """Predicts a label for each token; the loss is the mean over the tokens that have one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, batch):
        return self.head(torch.tanh(self.embedding(batch['input_ids'])))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch['labels'].flatten(), ignore_index=-100)


LENGTHS = [1, 7, 2, 5, 3, 9, 4, 1, 8, 2, 6, 3]


def _tagged() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        {
            'input_ids': torch.randint(0, 12, (length,), generator=generator),
            'labels': torch.randint(0, 5, (length,), generator=generator),
        }
        for length in LENGTHS * dist.get_world_size()
    ]


def _pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        'input_ids': pad([sample['input_ids'] for sample in samples], batch_first=True),
        'labels': pad([sample['labels'] for sample in samples], batch_first=True, padding_value=-100),
    }


def _count(batch: dict[str, torch.Tensor]) -> dict[str, int]:
    return {'total': batch['labels'].numel(), 'loss_generating': int((batch['labels'] != -100).sum())}


def tokens(strategy: str, batches: int, on_tokens: bool = True) -> dict[str, float]:
    """Train on batches of 2 sentences in microbatches of 1, several batches in an optimizer step; compare by hand."""
    ranks, size = dist.get_world_size(), 2
    torch.manual_seed(17)
    model = Tagger()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings, samples = dict(STRATEGIES[strategy]), _tagged()
    settings['ds_config'] = {**settings.get('ds_config', {}), 'train_batch_size': size * batches * ranks}
    sampler: Any = dist.get_sampler(samples, shuffle=False)  # pyright: ignore[reportArgumentType]
    loader = DataLoader(samples, size, sampler=sampler, collate_fn=_pad)  # pyright: ignore[reportArgumentType]
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        train_dataloader=DataSpec(loader, get_num_tokens_in_batch=_count),
        max_duration='1ep',
        device='cpu',
        device_train_microbatch_size=1,
        accumulate_train_batch_on_tokens=on_tokens,
        algorithms=[DeepSpeed(**settings)],
        progress_bar=False,
    )
    trainer.fit()
    ours = weights_of(trainer)
    trainer.close()

    torch.manual_seed(17)
    reference = Tagger()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    # The samples are dealt out to the ranks in turn, so the batches of all ranks are consecutive ones.
    together = size * batches * ranks
    for first in range(0, len(samples), together):
        optimizer.zero_grad()
        whole = _pad(samples[first : first + together])
        reference.loss(reference(whole), whole).backward()  # every token of the optimizer step weighs alike
        optimizer.step()
    expected = reference.state_dict()
    return {
        'difference': max(float((ours[name] - expected[name]).abs().max()) for name in expected),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in expected),
    }
