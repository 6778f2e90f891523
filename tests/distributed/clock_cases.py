"""Optimizer steps, schedules and windows of several batches. Runs inside rank processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composer import Algorithm, Callback, ComposerModel, DataSpec, Trainer
from composer.loggers import InMemoryLogger
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    StepScheduler,
)
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from composer_ds import DeepSpeed, Event, TrainingError, optimizer_steps
from tests.distributed.fp16_cases import fp16_on_this_cpu
from tests.distributed.parity_cases import STRATEGIES, Regression, _vectors, weights_of

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    'warmup in ba': lambda _: LinearWithWarmupScheduler(t_warmup='3ba', alpha_f=0.1),
    'warmup in dur': lambda _: CosineAnnealingWithWarmupScheduler(t_warmup='0.3dur', alpha_f=0.2),
    'steps in ep': lambda _: StepScheduler('1ep', 0.5),
    'steps in sp': lambda _: MultiStepScheduler(['20sp', '40sp'], 0.5),
    'steps in tok': lambda _: MultiStepScheduler(['60tok', '130tok'], 0.5),
    'two of them': lambda _: [LinearWithWarmupScheduler(t_warmup='3ba'), StepScheduler('2ba', 0.5)],
    'a function': lambda _: lambda state: 0.9 ** int(state.timestamp.batch),
    'torch per batch': lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    'torch per epoch': lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    'torch sequence': lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        ],
        milestones=[3],
    ),
}


class RecordsUpdates(Callback):
    """What can be seen at each optimizer step, and the learning rate that can be told from the update itself."""

    def __init__(self):
        self.seen: list[dict[str, Any]] = []
        self.order: list[str] = []

    def optimizer_step(self, state, logger):
        steps = optimizer_steps(state)
        self.order.append('callback')
        self.seen.append(
            {
                'applied': steps.applied,
                'attempted': steps.attempted,
                'microbatches': steps.microbatches,
                'norm': steps.gradient_norm,
                'lr': steps.learning_rates[0],
                'batch': int(state.timestamp.batch),
                'weight': float(state.model.state_dict()['weight'][0]) if isinstance(state.model, Slope) else None,
            }
        )


class Watches(Algorithm):
    """Sees the event, before callbacks do."""

    def __init__(self, order: list[str]):
        self.order = order

    def match(self, event, state):
        return event == Event.OPTIMIZER_STEP

    def apply(self, event, state, logger):
        self.order.append('algorithm')


class Slope(ComposerModel):
    """One weight whose gradient is 1 whatever happens, so that each update tells its learning rate."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, batch):
        return self.weight.sum() / 4 * 4 + 0.0 * batch[0].sum()

    def loss(self, outputs, batch):
        # An infinite target makes this batch's gradient infinite.
        return outputs * (1.0 + 0.0 * batch[1].mean())


def slope_data(count: int, infinite: tuple[int, ...] = ()) -> TensorDataset:
    """Samples that do not matter, but for the infinite ones."""
    targets = torch.zeros(count, 2)
    targets[list(infinite)] = float('inf')
    return TensorDataset(torch.zeros(count, 6), targets)


class LearningRates(Callback):
    """The learning rate of every update, backed out of the weights: gradient 1, plain SGD."""

    def __init__(self, model: Slope):
        self.model = model
        self.before = 0.0
        self.rates: list[float] = []

    def batch_end(self, state, logger):
        state_dict = state.model.state_dict()
        now = float((state_dict['weight'] if 'weight' in state_dict else state_dict['module.weight'])[0])
        self.rates.append(self.before - now)
        self.before = now


def learning_rates(
    schedule: str,
    deepspeed: dict[str, Any] | None,
    infinite: tuple[int, ...] = (),
    by: str = 'Trainer',
    duration: str = '2ep',
    save: str | None = None,
    load: str | None = None,
    stop_after: int | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train the slope with batches of 2 samples per rank, 6 in an epoch; return the lr of each batch's update."""
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dataset = slope_data(12 * dist.get_world_size(), infinite)
    recorder, updates = LearningRates(model), RecordsUpdates()
    schedulers = SCHEDULES[schedule](optimizer)
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=schedulers if by == 'Trainer' else None,
        train_dataloader=DataSpec(
            DataLoader(dataset, batch_size=2, sampler=dist.get_sampler(dataset, shuffle=False)),
            get_num_tokens_in_batch=lambda batch: 5 * len(batch[0]),
        ),
        max_duration=duration,
        device='cpu',
        callbacks=[recorder, updates],
        algorithms=[] if deepspeed is None else [DeepSpeed(**deepspeed)],
        progress_bar=False,
        save_folder=save,
        save_interval='1ba',
        load_path=load,
        step_schedulers_every_batch=not schedule.endswith('per epoch') if by == 'Trainer' else None,
        **arguments,
    )
    recorder.before = float(weights_of(trainer)['weight'][0])
    if stop_after is not None:
        trainer.state.max_duration = '2ep'  # what the schedule sees
        trainer.fit(duration=f'{stop_after}ba')
    elif by == 'fit':
        trainer.fit(schedulers=SCHEDULES[schedule](trainer.state.optimizers[0]), step_schedulers_every_batch=True)
    else:
        trainer.fit()
    counts = optimizer_steps(trainer.state).state_dict() if deepspeed is not None else {}
    trainer.close()
    return {'rates': recorder.rates, 'counts': counts, 'updates': updates.seen}


def give_up(deepspeed: dict[str, Any], folder: str, infinite: tuple[int, ...]) -> dict[str, Any]:
    """Train the slope where batches without end are infinite, on rank 0 alone; tell how it ends."""
    model = Slope()
    mine = infinite if dist.get_global_rank() == 0 else ()
    dataset = slope_data(12, mine)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        train_dataloader=[[tensor[at : at + 1] for tensor in dataset.tensors] for at in range(12)],
        max_duration='1ep',
        device='cpu',
        device_train_microbatch_size=1,
        algorithms=[DeepSpeed(**deepspeed)],
        progress_bar=False,
        save_folder=folder,
        save_interval='1ba',
        loggers=(logger := InMemoryLogger()),
    )
    message = ''
    try:
        trainer.fit()
    except TrainingError as error:
        message = str(error)
    counts = optimizer_steps(trainer.state)
    found = {
        'message': message,
        'counts': counts.state_dict(),
        'scale': counts.loss_scale,
        'weights': weights_of(trainer)['weight'],
        'metric': [value for _, value in logger.data.get('optimizer_steps/skipped', [])],
    }
    trainer.close()
    dist.barrier()  # rank 0 writes
    found['checkpoint'] = torch.load(f'{folder}/latest-rank0.pt', weights_only=False)['state']['model']['weight']
    return found


def give_up_in_fp16(deepspeed: dict[str, Any], folder: str, infinite: tuple[int, ...]) -> dict[str, Any]:
    """The same, in fp16 on any CPU."""
    with fp16_on_this_cpu():
        return give_up(deepspeed, folder, infinite)


class TwoLosses(Regression):
    """A tuple of losses, metrics on train batches, and an evaluation of its own."""

    def forward(self, batch):
        values = self.net(batch[0])
        return {'values': values, 'size': values.square().mean()}

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs['values'], batch[1]), 0.1 * outputs['size']

    def eval_forward(self, batch, outputs=None):
        return 2.0 * (outputs or self(batch))['values']

    def get_metrics(self, is_train: bool):
        return {'MeanSquaredError': MeanSquaredError()}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


def losses_and_metrics(strategy: str | None) -> dict[str, list[float]]:
    """Train and evaluate; return everything that is logged about losses and metrics."""
    torch.manual_seed(17)
    model, dataset, evaluated = TwoLosses(), _vectors(count=20 * dist.get_world_size()), _vectors(count=10, seed=2)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.02),
        train_dataloader=DataLoader(dataset, 5, sampler=dist.get_sampler(dataset, shuffle=False)),
        eval_dataloader=DataLoader(evaluated, 4, sampler=dist.get_sampler(evaluated)),
        eval_interval='2ba',
        max_duration='1ep',
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=[] if strategy is None else [DeepSpeed(**STRATEGIES[strategy])],
        loggers=(logger := InMemoryLogger()),
        seed=5,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    names = [name for name in logger.data if name.startswith(('loss/', 'metrics/'))]
    return {name: [float(value) for _, value in logger.data[name]] for name in sorted(names)}
