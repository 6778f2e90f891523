"""A job for all launchers, whose checkpoints lie in the working directory: ``python -m ... KIND DURATION``.

KIND says which checkpoints it resumes from: ``consolidated``, ``sharded`` or ``plain``, which is plain Composer and
neither saves nor resumes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from composer import Trainer
from composer.utils import dist

from composer_ds import DeepSpeed, ShardedCheckpointSaver
from tests.distributed.parity_cases import CASES, OPTIMIZERS


def train(kind: str, duration: str) -> dict[str, list[float]]:
    """Train, or go on; return the weights."""
    case = CASES['divides']
    torch.manual_seed(17)
    model = case.model()
    options: dict[str, Any] = {}
    if kind != 'plain':
        options = {
            'algorithms': DeepSpeed(zero_stage=3),
            'callbacks': ShardedCheckpointSaver('sharded', '2ba', autoresume=kind == 'sharded', overwrite=True),
            'save_folder': 'consolidated',
            'save_interval': '2ba',
            'save_overwrite': True,
            'autoresume': kind == 'consolidated',
        }
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
    began_at = trainer.state.timestamp.batch.value
    trainer.fit()
    weights = {name: tensor.flatten().tolist() for name, tensor in trainer.state.model.state_dict().items()}
    trainer.close()
    return {'began_at': [float(began_at)], **{name.removeprefix('module.'): one for name, one in weights.items()}}


if __name__ == '__main__':
    # DeepSpeed's launcher puts an argument of its own before those of the script.
    found = train(*(argument for argument in sys.argv[1:] if not argument.startswith('--local_rank=')))
    for rank in range(dist.get_world_size()):  # one after the other: lines would run into each other
        if rank == dist.get_global_rank():
            print('RESULT', rank, json.dumps(found), flush=True)
        dist.barrier()
