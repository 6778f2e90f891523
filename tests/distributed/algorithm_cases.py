"""Training with Composer's algorithms and callbacks, plain and under DeepSpeed. Runs inside rank processes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Algorithm, ComposerModel, Trainer, algorithms, callbacks
from composer import functional as cf
from composer.algorithms.low_precision_groupnorm.low_precision_groupnorm import LPGroupNorm
from composer.algorithms.low_precision_layernorm.low_precision_layernorm import LPLayerNorm
from composer.core import Event, Precision
from composer.loss import soft_cross_entropy
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchvision.datasets import FakeData
from torchvision.models.resnet import Bottleneck
from torchvision.transforms import ToTensor

from composer_ds import ConfigError, DeepSpeed
from tests.distributed.parity_cases import weights_of

STRATEGIES: dict[str, dict[str, Any]] = {
    'zero1-cpu': {'zero_stage': 1, 'offload_optimizer': 'cpu'},
    'zero2': {'zero_stage': 2},
    # Every weight is cut; fewer pieces than in parity_cases, for there are many cases.
    'zero3-cut': {
        'zero_stage': 3,
        'ds_config': {
            'zero_optimization': {
                'stage3_param_persistence_threshold': 0,
                'sub_group_size': 2000,
                'reduce_bucket_size': 1000,
            }
        },
    },
}


class Images(ComposerModel):
    """Small, with a layer for each algorithm that replaces layers."""

    num_classes = 4

    def __init__(self, with_metrics: bool = False):
        super().__init__()
        self.with_metrics = with_metrics
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), Bottleneck(8, 2),
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch, reduction: str = 'mean'):
        return soft_cross_entropy(outputs.float(), batch[1], reduction=reduction)

    def get_metrics(self, is_train: bool):
        return {'Accuracy': MulticlassAccuracy(4, average='micro')} if self.with_metrics else {}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


class Small(Images):
    """Without batch norm, whose statistics differ between the ranks."""

    def __init__(self, with_metrics: bool = False):
        super().__init__(with_metrics)
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4),
        )  # fmt: skip


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator))


def _pictures() -> FakeData:
    """Images that a transform makes tensors of."""
    return FakeData(16, (3, 8, 8), 4, ToTensor())


def _zeros_and_ones() -> TensorDataset:
    return TensorDataset(torch.zeros(16, 3), torch.arange(16).remainder(2).float()[:, None])


def tokens() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [dict.fromkeys(('input_ids', 'labels'), torch.randint(4, 20, (6,), generator=generator)) for _ in range(16)]


def _bert() -> HuggingFaceModel:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    return HuggingFaceModel(BertForMaskedLM(config), use_logits=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """An algorithm, and what it works on."""

    algorithm: Callable[[], Algorithm]
    dataset: Callable[[], Any] = images
    model: Callable[[], ComposerModel] = Images


CASES: dict[str, Case] = {
    'AugMix': Case(lambda: algorithms.AugMix(width=2), _pictures),
    'BlurPool': Case(lambda: algorithms.BlurPool(min_channels=0)),
    'ColOut': Case(lambda: algorithms.ColOut(p_row=0.3, p_col=0.3, batch=True)),
    'CutMix': Case(lambda: algorithms.CutMix(alpha=1.0)),
    'CutMix of losses': Case(lambda: algorithms.CutMix(alpha=1.0, interpolate_loss=True)),
    'CutOut': Case(lambda: algorithms.CutOut(length=0.5)),
    'Factorize': Case(lambda: algorithms.Factorize(min_channels=8, latent_channels=0.5, min_features=8)),
    'GatedLinearUnits': Case(algorithms.GatedLinearUnits, tokens, _bert),
    'GhostBatchNorm': Case(lambda: algorithms.GhostBatchNorm(ghost_batch_size=2)),
    'GyroDropout': Case(lambda: algorithms.GyroDropout(p=0.5, sigma=4, tau=2)),
    'LabelSmoothing': Case(lambda: algorithms.LabelSmoothing(0.2)),
    'LayerFreezing': Case(lambda: algorithms.LayerFreezing(0.0, 0.9)),
    'MixUp': Case(lambda: algorithms.MixUp(alpha=1.0)),
    'MixUp of losses': Case(lambda: algorithms.MixUp(alpha=1.0, interpolate_loss=True)),
    'NoOpModel': Case(algorithms.NoOpModel, _zeros_and_ones),
    'ProgressiveResizing': Case(
        lambda: algorithms.ProgressiveResizing(delay_fraction=0.2, finetune_fraction=0.2, size_increment=2)
    ),
    'RandAugment': Case(lambda: algorithms.RandAugment(depth=2), _pictures),
    'SelectiveBackprop': Case(lambda: algorithms.SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=2)),
    'SqueezeExcite': Case(lambda: algorithms.SqueezeExcite(latent_channels=0.5, min_channels=8)),
    'StochasticDepth': Case(
        lambda: algorithms.StochasticDepth('ResNetBottleneck', stochastic_method='sample', drop_rate=0.5)
    ),
    'StochasticDepth of blocks': Case(
        lambda: algorithms.StochasticDepth(
            'ResNetBottleneck', stochastic_method='block', drop_rate=0.5, drop_distribution='uniform'
        )
    ),
    'WeightStandardization': Case(algorithms.WeightStandardization),
}
ONE_RANK = {'GyroDropout'}  # plain Composer refuses to replace layers inside of DistributedDataParallel
STRATEGIES_OF = {
    'StochasticDepth of blocks': ['zero1-cpu'],
    # They touch nothing but the data.
    'AugMix': ['zero3-cut'],
    'ColOut': ['zero3-cut'],
    'CutOut': ['zero3-cut'],
    'RandAugment': ['zero3-cut'],
}


def trainer_of(
    strategy: str | None,
    parts: Sequence[Algorithm] = (),
    model: ComposerModel | None = None,
    dataset: Any = None,
    ds_config: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    warnings.simplefilter('ignore')
    if model is None:
        torch.manual_seed(17)
        model = Small()
    chosen = list(parts)
    if strategy is not None:
        settings = copy.deepcopy(STRATEGIES[strategy])
        settings['ds_config'] = {**settings.get('ds_config', {}), **(ds_config or {})}
        chosen.append(DeepSpeed(**settings))
    dataset = images() if dataset is None else dataset
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
        train_dataloader=loader(dataset),
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=chosen,
        seed=5,
        progress_bar=False,
        **{'max_duration': '2ep', **arguments},
    )


def loader(dataset: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False))


def fit(trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.fit()
    weights = weights_of(trainer)
    trainer.close()
    return weights


def compare(names: list[str]) -> dict[str, dict[str, Any]]:
    """For each case: how far parameters move, how far from a training without it, and from plain Composer.

    Buffers are compared on rank 0 only, which gives them to the others once per batch (plain: once per microbatch).
    """
    # Each ZeRO 3 engine calls gc.collect(), which looks at everything that the imports have left: most of its time.
    gc.freeze()
    try:
        without = fit(_case_trainer(Case(lambda: algorithms.LabelSmoothing(0.0)), None))
        return {name: _compare(name, without) for name in names}
    finally:
        gc.unfreeze()


def _compare(name: str, without: dict[str, torch.Tensor]) -> dict[str, Any]:
    trainer = _case_trainer(CASES[name], None)
    before = weights_of(trainer)
    parameters = {name.removeprefix('module.') for name, _ in trainer.state.model.named_parameters()}
    expected = fit(trainer)
    result: dict[str, Any] = {
        'moved': max(_distance(expected, before, [parameter]) for parameter in parameters),
        'effect': _distance(expected, without, parameters) if expected.keys() == without.keys() else None,
    }
    for strategy in STRATEGIES_OF.get(name, ['zero2', 'zero3-cut']):
        ours = fit(_case_trainer(CASES[name], strategy))
        assert ours.keys() == expected.keys(), (name, ours.keys() ^ expected.keys())
        result[strategy] = _distance(ours, expected, expected if dist.get_global_rank() == 0 else parameters)
    return result


def _case_trainer(case: Case, strategy: str | None) -> Trainer:
    torch.manual_seed(17)
    return trainer_of(strategy, [case.algorithm()], case.model(), case.dataset())


def _distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor], names: Any) -> float:
    return max(float((weights[name].double() - others[name].double()).abs().max()) for name in names)


def gyro_dropout(strategy: str) -> dict[str, torch.Tensor]:
    """On several ranks, where plain Composer cannot do it."""
    return fit(_case_trainer(CASES['GyroDropout'], strategy))


def low_precision_norms(strategy: str, replaced: bool) -> dict[str, torch.Tensor]:
    """Train in bf16 with the layers of LowPrecisionLayerNorm and LowPrecisionGroupNorm, or without.

    The algorithms look at the Trainer's precision, which is fp32 on any CPU, so what they do at INIT is done here.
    """
    torch.manual_seed(17)
    model = Small()
    if replaced:
        cf.apply_low_precision_layernorm(model, Precision.AMP_BF16)
        cf.apply_low_precision_groupnorm(model, Precision.AMP_BF16)
    kinds = {type(module) for module in model.modules()}
    assert ({LPLayerNorm, LPGroupNorm} <= kinds) is replaced
    return fit(trainer_of(strategy, model=model, ds_config={'bf16': {'enabled': True}}))


def freeze_and_save(strategy: str, folder: str) -> None:
    """A checkpoint with frozen layers can be saved, and its weights be loaded; torch cannot resume it."""
    trainer = trainer_of(strategy, [algorithms.LayerFreezing(0.0, 0.9)], save_folder=folder, save_overwrite=True)
    weights = fit(trainer)
    path = str(Path(folder) / f'ep2-ba{8 // dist.get_world_size()}-rank0.pt')
    trainer = trainer_of(strategy, load_path=path, load_weights_only=True)
    torch.testing.assert_close(weights_of(trainer), weights, rtol=0, atol=0)
    trainer.close()
    try:
        trainer_of(strategy, load_path=path)
    except (KeyError, RuntimeError) as error:  # of torch 2.7, and of newer ones
        assert 'net.0.weight' in str(error)
    else:
        raise AssertionError('resumed with an optimizer state that does not fit')


def surgery_while_loading(strategy: str, folder: str) -> str:
    """A checkpoint trained with BlurPool is loaded without it: Composer adds it, too late to be trained."""
    path = Path(folder) / 'blurred.pt'
    trainer = trainer_of(None, [algorithms.BlurPool(min_channels=0)])
    trainer.save_checkpoint(str(path))
    trainer.close()
    trainer = trainer_of(strategy, load_path=str(path))
    try:
        trainer.fit()
    except ConfigError as error:
        return str(error)
    finally:
        trainer.close()
    raise AssertionError('parameters that nobody trains')


def compiled_parts(strategy: str | None) -> dict[str, torch.Tensor]:
    """Train a model of which a part was compiled before the Trainer was built."""
    torch.manual_seed(17)
    model = Small()
    model.net.compile(backend='eager')
    return fit(trainer_of(strategy, model=model))


def refused() -> dict[str, str]:
    """What the Trainer says to each part that is refused."""
    warnings.simplefilter('ignore')
    parts: list[Any] = [
        algorithms.ChannelsLast(),
        algorithms.LowPrecisionLayerNorm(apply_at=Event.AFTER_LOAD),
        algorithms.SAM(),
        algorithms.StochasticDepth('ResNetBottleneck', stochastic_method='block'),
        algorithms.SWA(),
        callbacks.ExportForInferenceCallback('torchscript', 'model.pt'),
        callbacks.OptimizerMonitor(),
    ]
    found = {}
    for part in parts:
        is_algorithm = isinstance(part, Algorithm)
        try:
            trainer_of('zero2', [part] if is_algorithm else [], Images(), callbacks=[] if is_algorithm else [part])
        except ConfigError as error:
            found[type(part).__name__] = str(error)
    return found
