"""Models, data and runs for the parity table. Runs inside rank processes; the tests that use it say what must hold.

Each case is trained by plain Composer (the oracle) and by DeepSpeed, from the same weights on the same data.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from composer import Algorithm, ComposerModel, Trainer
from composer.algorithms import GradientClipping
from composer.optim import DecoupledAdamW, DecoupledSGDW, LinearWithWarmupScheduler
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from composer_ds import DeepSpeed

warnings.filterwarnings('ignore', message='Cannot split tensor of length')

# Small models are never cut under ZeRO 3 with DeepSpeed's default thresholds, so half of the stage-3 strategies lower
# them, down to several sub-groups and buckets smaller than a parameter.
_CUT = {
    'stage3_param_persistence_threshold': 0,
    'sub_group_size': 70,
    'reduce_bucket_size': 60,
    'stage3_prefetch_bucket_size': 30,
    'stage3_max_live_parameters': 100,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    'zero1': {'zero_stage': 1},
    'zero1-cpu': {'zero_stage': 1, 'offload_optimizer': 'cpu'},
    'zero2': {'zero_stage': 2},
    'zero2-cpu': {'zero_stage': 2, 'offload_optimizer': 'cpu'},
    'zero2-buckets': {
        'zero_stage': 2,
        'ds_config': {
            'zero_optimization': {'reduce_bucket_size': 60, 'allgather_bucket_size': 60, 'overlap_comm': True}
        },
    },
    'zero3': {'zero_stage': 3},
    'zero3-cpu': {'zero_stage': 3, 'offload_optimizer': 'cpu'},
    'zero3-cut': {'zero_stage': 3, 'ds_config': {'zero_optimization': _CUT}},
    'zero3-cut-cpu': {'zero_stage': 3, 'offload_optimizer': 'cpu', 'ds_config': {'zero_optimization': _CUT}},
    'zero3-cut-cpu-params': {
        'zero_stage': 3,
        'offload_optimizer': 'cpu',
        'offload_param': 'cpu',
        'ds_config': {'zero_optimization': _CUT},
    },
    'zero3-cut-params': {'zero_stage': 3, 'offload_param': 'cpu', 'ds_config': {'zero_optimization': _CUT}},
}

SOME_STRATEGIES = ['zero1-cpu', 'zero2', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params']
"""Where not all are worth their time."""
STAGES_AND_OFFLOAD = [name for name in STRATEGIES if name not in ('zero2-buckets', 'zero3', 'zero3-cpu')]
"""Every stage and offload once: what is left out has other buckets, or weights that are not cut."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    'sgd': functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.01),
    'adamw': functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    'decoupled_sgdw': functools.partial(DecoupledSGDW, lr=0.02, momentum=0.9, weight_decay=1e-3),
    'decoupled_adamw': functools.partial(DecoupledAdamW, lr=0.01, weight_decay=1e-3),
}


class Regression(ComposerModel):
    """A small network with dropout, on targets so large that the gradient's norm is far above 1."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 13), nn.Tanh(), nn.Dropout(0.2), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 2)
        )

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


class Tied(ComposerModel):
    """A language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.embedding.weight

    def forward(self, batch):
        return self.head(torch.tanh(self.middle(self.embedding(batch[0]))))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


class Frozen(Regression):
    """The first layer and one bias are frozen."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[3].bias.requires_grad_(False)


class Sometimes(ComposerModel):
    """Branches that only some microbatches, or only some optimizer steps, use; the last input feature says which."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 2)

    def forward(self, batch):
        hidden = torch.tanh(self.trunk(batch[0][:, :6]))
        branch = int(batch[0][0, 6])
        if branch >= 0:
            hidden = hidden + torch.tanh(self.branches[branch](hidden))
        return self.head(hidden)

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


class Convolutions(ComposerModel):
    """BatchNorm: buffers that training changes."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 3, 3, bias=False)
        self.norm2 = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, 2)

    def forward(self, batch):
        images = batch[0].view(-1, 1, 6, 6)
        hidden = torch.relu(self.norm1(self.conv1(images)))
        return self.head(torch.relu(self.norm2(self.conv2(hidden))).flatten(1))

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


@dataclasses.dataclass
class Prediction:
    """An output that DeepSpeed's hooks do not see."""

    values: torch.Tensor
    penalty: torch.Tensor


class DataclassOutput(Regression):
    """Returns a dataclass, and two losses."""

    def forward(self, batch):
        values = self.net(batch[0])
        return Prediction(values, values.square().mean())

    def loss(self, outputs, batch):
        return {'fit': nn.functional.mse_loss(outputs.values, batch[1]), 'penalty': 0.1 * outputs.penalty}


def _vectors(features: int = 6, seed: int = 1, count: int = 28) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        3 * torch.randn(count, features, generator=generator), 5 * torch.randn(count, 2, generator=generator)
    )


def _tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randint(0, 11, (28, 5), generator=generator), torch.randint(0, 11, (28, 5), generator=generator)
    )


def _with_branches() -> TensorDataset:
    """Branch numbers such that branch 0 is missing in first microbatches, branch 1 in whole optimizer steps.

    Microbatches have two samples; the ranks' samples are interleaved, so groups of ``2 x world size`` agree.
    """
    vectors, targets = _vectors(count=28 * dist.get_world_size()).tensors
    group = 2 * dist.get_world_size()
    pattern = [-1, 0, 1, 1, 0, -1, -1, 2, 0, 1, -1, -1, 2, 1]
    branch = torch.tensor([pattern[index // group % len(pattern)] for index in range(len(vectors))])
    return TensorDataset(torch.cat([vectors, branch[:, None].float()], dim=1), targets)


def _loader(dataset: TensorDataset) -> DataLoader:
    # 28 samples: on one rank 4 + 4 + ..., on two ranks 14 each, so the last batch has 2.
    return DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=True))


def _unshuffled_loader(dataset: TensorDataset) -> DataLoader:
    return DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False))


def _shuffled_apart_loader(dataset: TensorDataset) -> DataLoader:
    """The ranks' samples do not go together, so each rank uses other parameters in the same microbatch."""
    sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=dist.get_global_rank(), seed=3)
    return DataLoader(dataset, batch_size=4, sampler=sampler)


def _uneven_batches(dataset: TensorDataset) -> list[list[torch.Tensor]]:
    """Batches of different sizes on the ranks, down to fewer microbatches on one."""
    rank = dist.get_global_rank() % 2
    mine = [tensor[14 * rank : 14 * rank + 14] for tensor in dataset.tensors]
    sizes = [[5, 2, 4, 3], [1, 7, 4, 2]][rank]
    return [list(batch) for batch in zip(*(tensor.split(sizes) for tensor in mine), strict=True)]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and on what."""

    model: type[ComposerModel]
    dataset: Callable[[], TensorDataset] = _vectors
    loader: Callable[[TensorDataset], Iterable] = _loader
    microbatch_size: int = 2
    groups: bool = False
    schedule: bool = False
    clipping: float | None = None
    unused_parameters: bool = False


CASES = {
    'divides': Case(Regression),
    'does-not-divide': Case(Regression, microbatch_size=3),
    'whole-batch': Case(Regression, microbatch_size=4, schedule=True),
    'tied': Case(Tied, _tokens),
    'frozen': Case(Frozen, microbatch_size=3),
    'groups': Case(Frozen, groups=True, schedule=True),
    'sometimes': Case(Sometimes, _with_branches, _unshuffled_loader, unused_parameters=True),
    'uneven': Case(Regression, loader=_uneven_batches),
    'clipped': Case(Regression, microbatch_size=3, clipping=0.7),
    'batchnorm': Case(Convolutions, functools.partial(_vectors, 36)),
    'dataclass': Case(DataclassOutput),
}
RANK_DEPENDENT = Case(Sometimes, _with_branches, _shuffled_apart_loader, unused_parameters=True)
"""Under ZeRO 1 only: with ZeRO 2 and 3 every rank must use the same parameters."""


class FindUnusedParameters(Algorithm):
    """Tells Composer's DDP, the oracle, that some parameters may go unused; does nothing else."""

    @property
    def find_unused_parameters(self) -> bool:
        return True

    def match(self, event, state):
        return False

    def apply(self, event, state, logger):
        pass


def parameter_groups(model: ComposerModel) -> list[dict[str, Any]]:
    """Weights with decay and a higher lr; a group of frozen parameters only, in the middle; biases without decay."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {'params': [p for n, p in trained if n.endswith('weight')], 'lr': 0.03, 'weight_decay': 0.05},
        {'params': [p for p in model.parameters() if not p.requires_grad]},
        {'params': [p for n, p in trained if n.endswith('bias')], 'weight_decay': 0.0},
    ]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copy all weights and buffers, under the user's names."""
    return {name.removeprefix('module.'): value.clone() for name, value in trainer.state.model.state_dict().items()}


def train(case_name: str, optimizer_name: str, strategy: str | None, duration: str = '2ep') -> dict[str, torch.Tensor]:
    """Train a case with plain Composer (no strategy) or DeepSpeed and return its weights and buffers."""
    case = CASES.get(case_name, RANK_DEPENDENT)
    torch.manual_seed(17)
    model = case.model()
    parameters = parameter_groups(model) if case.groups else list(model.parameters())
    algorithms: list[Algorithm] = []
    if strategy is not None:
        algorithms.append(DeepSpeed(**STRATEGIES[strategy]))
    elif case.unused_parameters:
        algorithms.append(FindUnusedParameters())
    if case.clipping is not None:
        algorithms.append(GradientClipping('norm', case.clipping))
    trainer = Trainer(
        model=model,
        optimizers=OPTIMIZERS[optimizer_name](parameters),
        schedulers=LinearWithWarmupScheduler(t_warmup='3ba', alpha_f=0.1) if case.schedule else None,
        train_dataloader=case.loader(case.dataset()),
        max_duration=duration,
        device='cpu',
        device_train_microbatch_size=case.microbatch_size,
        algorithms=algorithms,
        seed=5,
        progress_bar=False,
    )
    trainer.fit()
    weights = weights_of(trainer)
    trainer.close()
    return weights


@functools.lru_cache(maxsize=2)
def _oracle(case_name: str, optimizer_name: str) -> dict[str, torch.Tensor]:
    return train(case_name, optimizer_name, None)


def compare(case_name: str, optimizer_name: str, strategy: str) -> dict[str, float]:
    """Return the largest difference to plain Composer, and for each trained parameter how far it moved at all."""
    torch.manual_seed(17)
    model = CASES.get(case_name, RANK_DEPENDENT).model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    oracle, ours = _oracle(case_name, optimizer_name), train(case_name, optimizer_name, strategy)
    assert ours.keys() == oracle.keys(), (ours.keys(), oracle.keys())
    assert all(ours[name].shape == oracle[name].shape and ours[name].dtype == oracle[name].dtype for name in oracle)
    return {
        'difference': max(float((ours[name].double() - oracle[name].double()).abs().max()) for name in oracle),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in trained),
        'frozen_moved': max(
            [float((ours[n] - before[n]).abs().max()) for n, _ in model.named_parameters() if n not in trained],
            default=0.0,
        ),
    }
