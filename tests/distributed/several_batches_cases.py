"""Several batches in one optimizer step. Runs inside rank processes."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
from typing import Any

import torch
from composer import Callback, Trainer
from composer.algorithms import GradientClipping
from composer.optim import LinearWithWarmupScheduler
from composer.utils import checkpoint, dist
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed, optimizer_steps
from tests.distributed.bf16_cases import Network
from tests.distributed.clock_cases import RecordsUpdates, Watches
from tests.distributed.fp16_cases import fp16_on_this_cpu
from tests.distributed.parity_cases import STRATEGIES, Regression, _vectors, weights_of


def windows(strategy: str | None, batches: int, clipping: float | None = None) -> dict[str, Any]:
    """Train two epochs of batches of 2, several in one optimizer step, across the epochs and with a short last one.

    The oracle (no strategy) is given batches as large, out of both epochs in a row.
    """
    torch.manual_seed(17)
    model = Regression()
    model.net[2].p = 0.0  # pyright: ignore  # every iterator of a dataloader draws a random number, and there are not as many
    dataset = _vectors(count=10 * dist.get_world_size())
    updates = RecordsUpdates()
    algorithms: list[Any] = [] if clipping is None else [GradientClipping('norm', clipping)]
    if strategy is None:
        dataset = TensorDataset(*(torch.cat([tensor, tensor]) for tensor in dataset.tensors))
    else:
        settings = dict(STRATEGIES[strategy])
        total = {'train_batch_size': 2 * batches * dist.get_world_size()}
        settings['ds_config'] = {**settings.get('ds_config', {}), **total}
        algorithms += [Watches(updates.order), DeepSpeed(**settings)]
    size = 2 if strategy is not None else 2 * batches
    evaluated = _vectors(count=8, seed=2)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01),
        schedulers=LinearWithWarmupScheduler(t_warmup='2ba', alpha_f=0.1),
        train_dataloader=DataLoader(dataset, batch_size=size, sampler=dist.get_sampler(dataset, shuffle=False)),
        # In the middle of the windows.
        eval_dataloader=None if strategy is None else DataLoader(evaluated, 4, sampler=dist.get_sampler(evaluated)),
        eval_interval='1ba',
        max_duration='1ep' if strategy is None else '2ep',
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=algorithms,
        callbacks=[updates],
        seed=5,
        progress_bar=False,
    )
    before = {name: value.clone() for name, value in model.state_dict().items()} if strategy is None else {}
    trainer.fit()
    weights, time = weights_of(trainer), int(trainer.state.timestamp.batch)
    trainer.close()
    return {'weights': weights, 'before': before, 'updates': updates.seen, 'order': updates.order, 'batches': time}


class StopsAfter(Callback):
    """Ends training in the middle of a window."""

    def __init__(self, batches: int):
        self.batches = batches

    def batch_end(self, state, logger):
        if int(state.timestamp.batch) == self.batches:
            state.stop_training()


class SavesByHand(Callback):
    """Saves a checkpoint in the middle of a window."""

    def __init__(self, path: str):
        self.path = path

    def batch_end(self, state, logger):
        if int(state.timestamp.batch) == 6:
            checkpoint.save_checkpoint(state, self.path)


def saved_windows(
    folder: str, strategy: str, load: str | None = None, stop: int | None = None, by_hand: str | None = None
) -> dict[str, Any]:
    """Train 10 batches, 4 in one optimizer step, with a checkpoint after every batch; tell which there are."""
    torch.manual_seed(17)
    model = Regression()
    model.net[2].p = 0.0  # pyright: ignore
    dataset = _vectors(count=20 * dist.get_world_size())
    settings = dict(STRATEGIES[strategy])
    settings['ds_config'] = {**settings.get('ds_config', {}), 'gradient_accumulation_steps': 4}
    algorithm = DeepSpeed(**settings)
    callbacks: list[Callback] = [] if stop is None else [StopsAfter(stop)]
    if by_hand is not None:
        callbacks.append(SavesByHand(by_hand))
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.02),
            schedulers=LinearWithWarmupScheduler(t_warmup='1ba', alpha_f=0.1),
            train_dataloader=DataLoader(dataset, 2, sampler=dist.get_sampler(dataset, shuffle=False)),
            max_duration='1ep',
            device='cpu',
            algorithms=[algorithm],
            callbacks=callbacks,
            seed=5,
            progress_bar=False,
            save_folder=folder,
            save_interval='1ba',
            save_overwrite=True,
            load_path=load,
        )
        trainer.fit()
    found = {
        'weights': weights_of(trainer),
        'applied': algorithm.optimizer_steps.applied,
        'saved': sorted(int(re.findall(r'ba(\d+)', path.name)[0]) for path in pathlib.Path(folder).glob('ep*.pt')),
        'told': stream.getvalue(),
    }
    trainer.close()
    return found


def windows_in_16_bits(dtype: str, strategy: str) -> dict[str, float]:
    """Train 2 x 4 samples in one optimizer step, and 8: both are the same, down to the rounding of each microbatch."""
    weights = []
    section: dict[str, Any] = {dtype: {'enabled': True}}  # without clipping, which would hide the weight of a batch
    if dtype == 'fp16':
        section['fp16'] |= {'initial_scale_power': 8, 'loss_scale_window': 1, 'hysteresis': 1}
    for batch, batches in ((4, 2), (8, 1)):
        torch.manual_seed(17)
        model, dataset = Network(), _vectors(count=20 * dist.get_world_size())
        settings = dict(STRATEGIES[strategy])
        window = {'train_batch_size': batch * batches * dist.get_world_size()}
        settings['ds_config'] = {**settings.get('ds_config', {}), **section, **window}
        with fp16_on_this_cpu() if dtype == 'fp16' else contextlib.nullcontext():
            trainer = Trainer(
                model=model,
                optimizers=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
                # The last optimizer step has half the samples.
                train_dataloader=DataLoader(dataset, batch, sampler=dist.get_sampler(dataset, shuffle=False)),
                max_duration='1ep',
                device='cpu',
                device_train_microbatch_size=2,
                algorithms=[DeepSpeed(**settings)],
                progress_bar=False,
            )
            trainer.fit()
        assert optimizer_steps(trainer.state).applied == 3
        weights.append(weights_of(trainer))
        trainer.close()
    torch.manual_seed(17)
    before = Network().state_dict()
    windows, whole = weights
    return {
        'difference': max(float((windows[name] - whole[name]).abs().max()) for name in whole),
        'least_move': min(float((whole[name] - before[name]).abs().max()) for name in whole),
    }
