"""Train with ZeRO 3, go on with plain Composer, export: one checkpoint for all of them.

    composer -n 2 recipes/resume_anywhere.py

What ``save_folder`` writes under DeepSpeed is an ordinary checkpoint of Composer, with whole weights and the whole
state of the optimizer. So the second half of the training needs no DeepSpeed, and ends with the weights of a run that
never had it. The other way round works as well, from any ZeRO stage to any other, on any number of ranks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.models import ComposerClassifier
from composer.utils import dist
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import ConsolidatedWeightsSaver, DeepSpeed

STEPS, HALF = '40ba', '20ba'


def trainer_of(max_duration: str, **arguments: Any) -> Trainer:
    """Everything is the same in all three runs, but for what is given here."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    points = torch.randn(2000, 8)
    quadrants = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    dataset = TensorDataset(points, quadrants)
    return Trainer(
        model=ComposerClassifier(network, num_classes=4),
        optimizers=torch.optim.AdamW(network.parameters(), lr=0.01),
        train_dataloader=DataLoader(dataset, batch_size=16, sampler=dist.get_sampler(dataset)),
        max_duration=max_duration,
        seed=0,
        progress_bar=False,
        **arguments,
    )


def main(folder: Path) -> float:
    """Runs the story, on every rank, and returns how far the exported weights are from those of an undisturbed run."""
    first = trainer_of(HALF, algorithms=[DeepSpeed(zero_stage=3)], save_folder=str(folder), save_interval=HALF)
    first.fit()
    first.close()

    second = trainer_of(
        STEPS,
        load_path=str(folder / 'latest-rank0.pt'),
        callbacks=[ConsolidatedWeightsSaver(folder=str(folder), filename='weights', interval=STEPS)],
    )
    second.fit()
    second.close()

    undisturbed = trainer_of(STEPS)
    undisturbed.fit()
    expected = undisturbed.state.get_model_state_dict()
    undisturbed.close()
    exported = load_file(folder / 'weights' / 'model.safetensors')
    return max(float((exported[name] - weight.cpu()).abs().max()) for name, weight in expected.items())


if __name__ == '__main__':
    dist.initialize_dist()
    paths = [tempfile.mkdtemp(prefix='resume_anywhere-')]
    dist.broadcast_object_list(paths)  # the folder of rank 0; on several machines it has to be a shared one
    difference = main(Path(paths[0]))
    if dist.get_global_rank() == 0:
        print(f'20 optimizer steps with ZeRO 3, 20 with plain Composer, exported to {paths[0]}/weights')
        print(f'Largest difference from 40 with plain Composer: {difference:.1e}')
    torch.distributed.destroy_process_group()
