"""A small ResNet on handwritten digits: BatchNorm's buffers, a moving average of the weights, smoothed labels.

The accuracy is that of plain Composer, and it is reached with the same algorithms of Composer's own: under DeepSpeed
``EMA`` averages the partitions that each rank owns, and what is evaluated and saved is the average.
"""

from __future__ import annotations

from typing import Annotated

import torch
from composer.algorithms import EMA, LabelSmoothing
from composer.core import Algorithm, Evaluator
from composer.models import ComposerClassifier
from composer.utils import dist
from pydantic import BaseModel, Field, PositiveInt
from torch import nn
from torchvision.models.resnet import BasicBlock

from composer_ds.errors import ConfigError
from composer_ds.launch.schema import Duration
from recipes.dataloaders import batch_size_problems, build_dataloader, split_problems
from recipes.digits_data import read_digits
from recipes.task import Task

__all__ = ['DataConfig', 'ModelConfig', 'build']

_CLASSES = 10


class ModelConfig(BaseModel, extra='forbid'):
    """The section ``model`` of the YAML.

    Args:
        width (int): Channels of the first stage; each later stage has twice as many on half the pixels.
        stages (int): 1 to 3, of one residual block each.
        label_smoothing (float): Probability that is taken from the right class and shared among all; 0 for none.
        ema_half_life (int | str | None): After how long a weight counts half in the moving average, such as ``'20ba'``;
            ``None`` evaluates and saves the weights themselves.
        seed (int): Seed of the random weights, on every rank.
    """

    width: PositiveInt = 16
    stages: Annotated[int, Field(ge=1, le=3)] = 2
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    ema_half_life: Duration | None = '20ba'
    seed: int = 17


class DataConfig(BaseModel, extra='forbid'):
    """The section ``data`` of the YAML.

    Args:
        global_batch_size (int): Images per optimizer step over all ranks.
        eval_batch_size (int): Images per evaluation batch of each rank.
        test_fraction (float): Share of the images in the test split.
        seed (int): Seed of the split.
        shuffle_seed (int): Seed of the order of the images, a new one each epoch.
    """

    global_batch_size: PositiveInt = 64
    eval_batch_size: PositiveInt = 256
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: int = 17
    shuffle_seed: int = 17


def build(model: ModelConfig, data: DataConfig) -> Task:
    """Builds model, data and algorithms on this rank. No rank talks to another.

    Args:
        model (ModelConfig): What to train.
        data (DataConfig): What to train on.

    Returns:
        Task: Weights and data are the same on every rank; each rank's dataloaders give its share.

    Raises:
        ConfigError: On every rank, with all problems of the data at once, or when scikit-learn is not installed.
    """
    splits = read_digits(seed=data.seed, test_fraction=data.test_fraction)
    if problems := [
        *batch_size_problems(data.global_batch_size),
        *split_problems('train', len(splits.train), 'lower data.test_fraction'),
        *split_problems('test', len(splits.test), 'raise data.test_fraction'),
    ]:
        raise ConfigError(problems)
    return Task(
        model=ComposerClassifier(_network(model), num_classes=_CLASSES),
        train_dataloader=build_dataloader(
            splits.train,  # pyright: ignore[reportArgumentType]  (a data set of known length is all that is needed)
            None,
            batch_size=data.global_batch_size // dist.get_world_size(),
            shuffle_seed=data.shuffle_seed,
        ),
        eval_dataloader=[
            Evaluator(
                label='test',
                dataloader=build_dataloader(splits.test, None, batch_size=data.eval_batch_size),  # pyright: ignore[reportArgumentType]
            )
        ],
        algorithms=_algorithms(model),
    )


def _network(model: ModelConfig) -> nn.Module:
    """Draws random weights without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(model.seed)  # the CPU's alone: torch.manual_seed would reset the GPUs', too
        widths = [model.width * 2**stage for stage in range(model.stages)]
        layers = [nn.Conv2d(1, model.width, 3, padding=1, bias=False), nn.BatchNorm2d(model.width), nn.ReLU()]
        for before, width in zip([model.width, *widths], widths, strict=False):
            layers.append(_block(before, width))
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], _CLASSES))


def _block(before: int, width: int) -> BasicBlock:
    if before == width:
        return BasicBlock(width, width)
    shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride=2, bias=False), nn.BatchNorm2d(width))
    return BasicBlock(before, width, stride=2, downsample=shortcut)


def _algorithms(model: ModelConfig) -> list[Algorithm]:
    algorithms: list[Algorithm] = []
    if model.label_smoothing:
        algorithms.append(LabelSmoothing(model.label_smoothing, target_key=1))
    if model.ema_half_life is not None:
        algorithms.append(EMA(half_life=str(model.ema_half_life), update_interval='1ba'))
    return algorithms
