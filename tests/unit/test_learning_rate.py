"""The learning rates that are told in advance, against those that plain Composer logs in a real run."""

from __future__ import annotations

import pytest
import torch
from composer import Trainer
from composer.callbacks import LRMonitor
from composer.loggers import InMemoryLogger
from composer.optim import (
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
)
from torch.utils.data import DataLoader

from composer_ds.errors import ConfigError
from composer_ds.learning_rate import RunLength, learning_rates
from tests.recipes.tiny_recipe import Regression, dataset

SAMPLES, BATCH = 18, 4  # 5 batches in an epoch, the last one short

CASES = [
    (CosineAnnealingWithWarmupScheduler('3ba', alpha_f=0.1), {'max_duration': '12ba'}),
    (LinearWithWarmupScheduler('0.2dur', alpha_f=0.5), {'max_duration': '3ep'}),
    (MultiStepScheduler(['1ep', '40sp'], gamma=0.5), {'max_duration': '3ep'}),
    (ExponentialScheduler(0.5, decay_period='2ba'), {'max_duration': '50sp'}),
    (CosineAnnealingWarmRestartsScheduler('4ba'), {'max_duration': '10ba', 'scale_schedule_ratio': 1.5}),
    (ExponentialScheduler(0.5), {'max_duration': '3ep', 'step_schedulers_every_batch': False}),
    (None, {'max_duration': '3ba'}),
]


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{'params': [p for p in model.parameters() if p.ndim > 1]},
         {'params': [p for p in model.parameters() if p.ndim <= 1], 'lr': 0.5}], lr=0.1,
    )  # fmt: skip


@pytest.mark.parametrize(('scheduler', 'length'), CASES)
def test_the_curve_is_what_lr_monitor_logs(scheduler, length):
    model, logger = Regression(3, 1.0), InMemoryLogger()
    trainer = Trainer(
        model=model,
        optimizers=_optimizer(model),
        schedulers=scheduler,
        train_dataloader=DataLoader(dataset(SAMPLES, 3), batch_size=BATCH),
        callbacks=[LRMonitor()],
        loggers=[logger],
        device='cpu',
        progress_bar=False,
        **length,
    )
    trainer.fit()
    trainer.close()
    ours = learning_rates(scheduler, _optimizer(Regression(3, 1.0)), RunLength(**length, batches_per_epoch=5,
        samples_per_batch=BATCH, samples_per_epoch=SAMPLES))  # fmt: skip
    for group in range(2):
        logged = logger.data[f'lr-SGD/group{group}']
        assert [int(time.batch) for time, _ in logged] == ours.optimizer_steps
        assert [float(value) for _, value in logged] == pytest.approx(ours.groups[group], rel=1e-12)
    if scheduler is not None:
        assert len(set(ours.groups[0])) > 1
    assert list(ours.curves) == ['group 0', 'group 1']


def test_groups_with_one_curve_are_named_together():
    optimizer = torch.optim.SGD([{'params': [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=0.1)
    assert list(learning_rates(None, optimizer, RunLength('3ba')).curves) == ['all parameter groups']


def test_long_runs_are_sampled():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    rates = learning_rates(ExponentialScheduler(0.999, '1000ba'), optimizer, RunLength('1000000ba'))
    assert len(rates.optimizer_steps) < 5000
    assert (rates.optimizer_steps[0], rates.optimizer_steps[-1]) == (1, 1_000_000)
    assert rates.groups[0][-1] == pytest.approx(0.1 * 0.999 ** (999_999 / 1000))


@pytest.mark.parametrize('max_duration', ['2ep', '100tok'])
def test_a_length_that_is_not_known_in_advance(max_duration):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigError, match='cannot be turned'):
        learning_rates(None, optimizer, RunLength(max_duration))
