"""Jobs that log to W&B, offline, and are resumed. Runs inside rank processes."""

from __future__ import annotations

import pathlib
from typing import Any
from unittest import mock

import torch
import wandb
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger

from composer_ds import DeepSpeed, ShardedCheckpointSaver, WandBLogger
from composer_ds.callbacks import DeepSpeedMonitor, ZeroMemoryMonitor
from composer_ds.sharded import remote
from tests.distributed.parity_cases import CASES, OPTIMIZERS
from tests.distributed.sharded_safety_cases import s3


class Breaks(Callback):
    """Ends a job after a batch, as a fault would."""

    def __init__(self, batch: int):
        self.batch = batch

    def batch_end(self, state, logger):
        if state.timestamp.batch.value == self.batch:
            raise InterruptedError('a fault')


def train_into_object_store(url: str, folder: str, uri: str) -> None:
    """Train a job whose checkpoints are uploaded."""
    with s3(url), mock.patch.object(remote, '_own_folder', return_value=pathlib.Path(folder)):
        train(folder, '4ba', references=True, checkpoints=uri)


def train(
    folder: str | None, duration: str, breaks_after: int = 0, references: bool = False, checkpoints: str | None = None
) -> dict[str, float]:
    """Train a job, or go on with it; without a folder in plain Composer.

    Returns:
        dict[str, float]: The loss of each batch, where it is plain Composer.
    """
    case = CASES['divides']
    torch.manual_seed(17)
    model = case.model()
    memory = InMemoryLogger()
    options: dict[str, Any] = {'loggers': memory}
    if folder is not None:
        init_kwargs = {'mode': 'offline', 'dir': folder, 'settings': wandb.Settings(console='off', silent=True)}
        checkpoints = checkpoints or folder
        saver = ShardedCheckpointSaver(f'{checkpoints}/sharded', '4ba', overwrite=True)
        options = {
            'loggers': WandBLogger('p', init_kwargs=init_kwargs, reference_checkpoints=references),
            'algorithms': DeepSpeed(zero_stage=2, ds_config={'gradient_clipping': 0.5 if references else 0.0}),
            'callbacks': [DeepSpeedMonitor(), ZeroMemoryMonitor(1), *([saver] if references else [])],
            'save_folder': f'{checkpoints}/checkpoints',
            'save_interval': '2ba',
            'autoresume': True,
        }
        if breaks_after:
            options['callbacks'].append(Breaks(breaks_after))
    trainer = Trainer(
        model=model,
        optimizers=OPTIMIZERS['sgd'](model.parameters()),
        train_dataloader=case.loader(case.dataset()),
        max_duration=duration,
        device='cpu',
        device_train_microbatch_size=case.microbatch_size,
        run_name='job',
        seed=5,
        progress_bar=False,
        **options,
    )
    if trainer._checkpoint_saver is not None:  # Composer looks every 30 s whether an upload has ended
        trainer._checkpoint_saver._symlink_upload_wait_before_next_try_in_seconds = 0.2
    try:
        trainer.fit()
    except InterruptedError:
        assert breaks_after
    trainer.close()
    return {str(time.batch.value + 1): value for time, value in memory.data.get('loss/train/total', [])}
