"""One run that is cut in two: saved by one strategy, gone on with by another. Runs inside rank processes.

The global batch is 8 samples at every world size, and an epoch has 3 batches. The checkpoint is written after batch 4,
one batch into the second epoch; the run ends after batch 7, one batch into the third.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import cpuinfo
import torch
from composer import Callback, ComposerModel, DataSpec, Trainer
from composer.core import Event
from composer.optim import DecoupledAdamW, LinearWithWarmupScheduler
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from composer_ds import DeepSpeed, optimizer_steps
from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver
from tests.distributed.parity_cases import STRATEGIES

GLOBAL_BATCH, BATCHES_PER_EPOCH, SAVED_AFTER, LAST = 8, 3, 4, 7
SAMPLES = GLOBAL_BATCH * BATCHES_PER_EPOCH
POISONED = 8
"""The sample whose target is infinite in the case that skips optimizer steps: those of batches 2 and 6."""


class Network(ComposerModel):
    """Layers whose parameters divide by no number of ranks."""

    def __init__(self, dropout: float = 0.0, divide_gradient_by: int = 1):
        super().__init__()
        self.divide_gradient_by = divide_gradient_by
        self.net = nn.Sequential(
            nn.Linear(5, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)
        )

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Tell Composer's FSDP which modules to shard."""
        return isinstance(module, nn.Linear)

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        loss = nn.functional.mse_loss(outputs.float(), batch[1])
        part = loss / self.divide_gradient_by
        return part + (loss - part).detach()


class Samples(Dataset):
    """Random vectors, each with its index beside it."""

    def __init__(self, poisoned: bool = False):
        generator = torch.Generator().manual_seed(7)
        self.inputs = 2 * torch.randn(SAMPLES, 5, generator=generator)
        self.targets = torch.randn(SAMPLES, 3, generator=generator)
        if poisoned:
            self.targets[POISONED] = float('inf')

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index], torch.tensor(index)


class OwnPosition(IterableDataset):
    """Shuffles by itself, and goes on where it was: Composer then spins no dataloader."""

    def __init__(self):
        self.samples = Samples()
        self.epoch = 0
        self.position = 0

    def __len__(self):
        return SAMPLES // dist.get_world_size()

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch, position, self.position = self.epoch + 1, self.position, 0
        for index in order[position + dist.get_global_rank() :: dist.get_world_size()]:
            yield self.samples[index]

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        """Composer tells how many samples of the epoch all ranks have trained on."""
        assert from_beginning
        return {'epoch': self.epoch - 1, 'position': num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue in the middle of an epoch."""
        self.epoch, self.position = state['epoch'], state['position']


def _cpu_adam(groups: list[dict[str, Any]], **arguments: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # It asks for the maker of the CPU, which takes a second each time.
    with mock.patch('cpuinfo.get_cpu_info', _cpu_info):
        return DeepSpeedCPUAdam(groups, **arguments)


_cpu_info = functools.cache(cpuinfo.get_cpu_info)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained. Composer's scheduler unless torch's is asked for."""

    optimizer: Callable[..., torch.optim.Optimizer]
    torch_scheduler: bool = False
    dropout: float = 0.0
    poisoned: bool = False
    own_position: bool = False


_SGD = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)
CASES = {
    'sgd': Case(_SGD),
    'adamw': Case(functools.partial(torch.optim.AdamW, lr=0.02), torch_scheduler=True),
    'decoupled_adamw': Case(functools.partial(DecoupledAdamW, lr=0.02)),
    'cpu_adam': Case(functools.partial(_cpu_adam, lr=0.02)),
    'dropout': Case(_SGD, torch_scheduler=True, dropout=0.3),
    'skipped': Case(_SGD, poisoned=True),
    'own_position': Case(_SGD, own_position=True),
}


class _Recorder(Callback):
    """Records every batch, and ends the process or the run after the checkpoint, where asked for."""

    def __init__(self, ending: str):
        self.ending = ending
        self.losses: list[float] = []
        self.learning_rates: list[list[float]] = []
        self.samples: list[list[int]] = []
        self.loss_scales: list[float] = []

    def batch_start(self, state, logger):
        if self.ending == 'killed' and state.timestamp.batch.value == SAVED_AFTER:
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        everyones = dist.all_gather_object(state.batch[2].tolist())
        self.samples.append(sorted(index for indices in everyones for index in indices))
        self.loss_scales.append(0.0 if state.scaler is None else state.scaler.get_scale())
        self.learning_rates.append([group['lr'] for group in state.optimizers[0].param_groups])

    def batch_end(self, state, logger):
        self.losses.append(float(state.total_loss_dict['loss/train/total']))
        if self.ending == 'stopped' and state.timestamp.batch.value == SAVED_AFTER:
            state.stop_training()


def _parallelism(strategy: str, sections: dict[str, Any], load_sharded: str | None) -> dict[str, Any]:
    """The Trainer's arguments for a strategy: 'plain', 'fsdp', or one of ``STRATEGIES`` with more in its ds_config."""
    if strategy == 'plain':
        return {}
    if strategy == 'fsdp':
        # FSDP 1 asks for a GPU (torch.cuda.current_device in Composer's prepare_fsdp_module).
        return {'parallelism_config': {'fsdp': FSDP2Config(state_dict_type='full')}}
    settings = dict(STRATEGIES[strategy])
    settings['ds_config'] = {**settings.get('ds_config', {}), **sections}
    return {'algorithms': [DeepSpeed(**settings, load_sharded=load_sharded)]}


def _savers(strategy: str, folder: str | None) -> list[Callback]:
    """Where there are partitions, sharded checkpoints are written beside the consolidated ones."""
    if folder is None or strategy not in STRATEGIES:
        return []
    return [ShardedCheckpointSaver(folder, _at_checkpoint, 'sharded-ba{batch}', save_on_sigterm=False)]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = dict(model.named_parameters())
    return [
        {'params': [value for name, value in parameters.items() if name.endswith('weight')], 'weight_decay': 0.01},
        {'params': [value for name, value in parameters.items() if name.endswith('bias')], 'lr': 0.05},
    ]


def _at_checkpoint(state, event: Event) -> bool:
    return event == Event.BATCH_CHECKPOINT and state.timestamp.batch.value == SAVED_AFTER


def _tokens(batch: Any) -> int:
    return 3 * len(batch[0])


def run(
    strategy: str,
    case_name: str,
    folder: str | None = None,
    checkpoint: str | None = None,
    ending: str = 'whole',
    sections: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Train, from the beginning or from a checkpoint.

    Args:
        strategy (str): 'plain' (DDP on several ranks), 'fsdp', or one of ``STRATEGIES``.
        case_name (str): One of ``CASES``.
        folder (str | None): Where to save after batch ``SAVED_AFTER``, if anywhere.
        checkpoint (str | None): What to resume from, if anything: a file, or a sharded checkpoint.
        ending (str): 'whole': after batch ``LAST``; 'stopped': after the checkpoint; 'killed': by SIGKILL, when
            the next batch begins.
        sections (dict[str, Any] | None): For the ds_config: 16 bits.

    Returns:
        dict[str, Any] | None: On rank 0, what was seen; None on the others.
    """
    case, world_size = CASES[case_name], dist.get_world_size()
    torch.manual_seed(17 if checkpoint is None else 99)
    # gloo's reduce_scatter of torch 2.7 adds up where FSDP asks for the average, without a word.
    model = Network(case.dropout, divide_gradient_by=world_size if strategy == 'fsdp' else 1)
    optimizer = case.optimizer(_groups(model))
    dataset = OwnPosition() if case.own_position else Samples(case.poisoned)
    sampler = None if case.own_position else dist.get_sampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)
    recorder = _Recorder(ending)
    is_sharded = checkpoint is not None and not checkpoint.endswith('.pt')
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=StepLR(optimizer, 2, 0.7) if case.torch_scheduler else LinearWithWarmupScheduler('3ba', alpha_f=0.1),
        step_schedulers_every_batch=True,
        train_dataloader=DataSpec(loader, get_num_tokens_in_batch=_tokens),
        max_duration=f'{LAST}ba',
        device='cpu',
        device_train_microbatch_size=3,
        callbacks=[recorder, *_savers(strategy, folder)],
        seed=5,
        progress_bar=False,
        save_folder=folder,
        save_filename='ba{batch}.pt',
        save_latest_filename=None,
        save_interval=_at_checkpoint,
        load_path=None if is_sharded else checkpoint,
        **_parallelism(strategy, sections or {}, checkpoint if is_sharded else None),
    )
    found: dict[str, Any] = {}
    if checkpoint is not None:
        found['loaded'] = whole_state(trainer)
    trainer.fit()
    state = trainer.state
    found |= {
        'losses': recorder.losses,
        'learning_rates': recorder.learning_rates,
        'samples': recorder.samples,
        'loss_scales': recorder.loss_scales,
        'timestamp': time_of(state.timestamp.state_dict()),
        **whole_state(trainer),
    }
    if strategy in STRATEGIES:
        steps = optimizer_steps(state)
        found['counts'] = (steps.attempted, steps.applied, steps.skipped, steps.in_schedule)
    trainer.close()
    return found if dist.get_global_rank() == 0 else None


def skipped_by_hand(learning_rates: list[list[float]], samples: list[list[int]]) -> dict[str, torch.Tensor]:
    """Train the case 'skipped' in a loop of torch's: a batch with the poisoned sample changes nothing.

    Args:
        learning_rates (list[list[float]]): For each optimizer step that is applied, of both parameter groups.
        samples (list[list[int]]): The samples of each batch.

    Returns:
        dict[str, torch.Tensor]: The weights at the end.
    """
    torch.manual_seed(17)
    model, dataset = Network(), Samples()
    optimizer = CASES['skipped'].optimizer(_groups(model))
    rates = iter(learning_rates)
    for indices in samples:
        if POISONED in indices:
            continue
        for group, rate in zip(optimizer.param_groups, next(rates), strict=True):
            group['lr'] = rate
        optimizer.zero_grad()
        batch = [dataset.inputs[indices], dataset.targets[indices]]
        model.loss(model(batch), batch).backward()
        optimizer.step()
    return copied(model.state_dict())


def time_of(timestamp: dict[str, Any]) -> dict[str, int]:
    """Take what is not measured with a clock out of a timestamp's state dict."""
    return {name: int(value) for name, value in timestamp.items() if 'wct' not in name}


def whole_state(trainer: Trainer) -> dict[str, Any]:
    """Return copies of the weights and the optimizer state, by names, and the loss scaler's, as in a checkpoint."""
    (optimizer,) = trainer.state.get_optim_state_dict().values()
    scaler: Any = trainer.state.scaler
    return copied(
        {'weights': trainer.state.get_model_state_dict(), 'optimizer': optimizer, 'scaler': scaler.state_dict()}
    )


def copied(tree: Any) -> Any:
    """Copy nested dicts and lists down to the tensors, which later batches change in place."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value) for value in tree]
    return tree.detach().clone() if torch.is_tensor(tree) else tree


def run_all(strategy: str, jobs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any] | None]:
    """Do several runs in one process, one after the other.

    Args:
        strategy (str): Of all of them.
        jobs (list[tuple[str, dict[str, Any]]]): For each the name of its case, and the other arguments of :func:`run`.

    Returns:
        list[dict[str, Any] | None]: What each has seen.

    Raises:
        RuntimeError: When one fails; says which.
    """
    found = []
    for case_name, arguments in jobs:
        try:
            found.append(run(strategy, case_name, **arguments))
        except Exception as error:
            raise RuntimeError(f'{case_name} under {strategy}, {arguments}') from error
    return found


def sharded_checkpoint_in(folder: str | pathlib.Path) -> str:
    """Return the path of the sharded checkpoint that :func:`run` writes into a folder."""
    return str(pathlib.Path(folder) / f'sharded-ba{SAVED_AFTER}')


def checkpoint_in(folder: str | pathlib.Path) -> str:
    """Return the path of the checkpoint that :func:`run` writes into a folder."""
    return str(pathlib.Path(folder) / f'ba{SAVED_AFTER}.pt')
