"""Training with Composer's algorithms and callbacks, plain and under DeepSpeed. Runs inside rank processes."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Algorithm, Callback, ComposerModel, Trainer, algorithms, callbacks
from composer import functional as cf
from composer.algorithms.low_precision_groupnorm.low_precision_groupnorm import LPGroupNorm
from composer.algorithms.low_precision_layernorm.low_precision_layernorm import LPLayerNorm
from composer.core import Event, Precision
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.loss import soft_cross_entropy
from composer.models import HuggingFaceModel
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchvision.datasets import FakeData
from torchvision.models.resnet import Bottleneck
from torchvision.transforms import ToTensor

from composer_ds import ConfigError, DeepSpeed, conflicts
from tests.distributed.parity_cases import weights_of

for _name in ('LayerFreezing', 'EMA'):
    getattr(conflicts, 'REFUSED_PARTS_OF_COMPOSER', {}).pop(_name, None)

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


def _images() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
    )


def _pictures() -> FakeData:
    """Images that a transform makes tensors of."""
    return FakeData(16, (3, 8, 8), 4, ToTensor())


def _zeros_and_ones() -> TensorDataset:
    return TensorDataset(torch.zeros(16, 3), torch.arange(16).remainder(2).float()[:, None])


def _tokens() -> list[dict[str, torch.Tensor]]:
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
    dataset: Callable[[], Any] = _images
    model: Callable[[], ComposerModel] = Images


CASES: dict[str, Case] = {
    'AugMix': Case(lambda: algorithms.AugMix(width=2), _pictures),
    'BlurPool': Case(lambda: algorithms.BlurPool(min_channels=0)),
    'ColOut': Case(lambda: algorithms.ColOut(p_row=0.3, p_col=0.3, batch=True)),
    'CutMix': Case(lambda: algorithms.CutMix(alpha=1.0)),
    'CutMix of losses': Case(lambda: algorithms.CutMix(alpha=1.0, interpolate_loss=True)),
    'CutOut': Case(lambda: algorithms.CutOut(length=0.5)),
    'Factorize': Case(lambda: algorithms.Factorize(min_channels=8, latent_channels=0.5, min_features=8)),
    'GatedLinearUnits': Case(algorithms.GatedLinearUnits, _tokens, _bert),
    'GhostBatchNorm': Case(lambda: algorithms.GhostBatchNorm(ghost_batch_size=2)),
    'GyroDropout': Case(lambda: algorithms.GyroDropout(p=0.5, sigma=8, tau=2)),
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
ZERO_1 = {'StochasticDepth of blocks'}


def _trainer(
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
    dataset = _images() if dataset is None else dataset
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
        train_dataloader=_loader(dataset),
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=chosen,
        seed=5,
        progress_bar=False,
        **{'max_duration': '2ep', **arguments},
    )


def _loader(dataset: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False))


def _fit(trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.fit()
    weights = weights_of(trainer)
    trainer.close()
    return weights


def compare(names: list[str]) -> dict[str, dict[str, Any]]:
    """For each case: how far parameters move, how far from a training without it, and from plain Composer.

    Buffers are compared on rank 0 only, which gives them to the others once per batch (plain: once per microbatch).
    """
    found: dict[str, dict[str, Any]] = {}
    without = _fit(_trainer_of(Case(lambda: algorithms.LabelSmoothing(0.0)), None))
    for name in names:
        case = CASES[name]
        trainer = _trainer_of(case, None)
        before = weights_of(trainer)
        parameters = {name.removeprefix('module.') for name, _ in trainer.state.model.named_parameters()}
        expected = _fit(trainer)
        result: dict[str, Any] = {
            'moved': max(_distance(expected, before, [parameter]) for parameter in parameters),
            'effect': _distance(expected, without, parameters) if expected.keys() == without.keys() else None,
        }
        for strategy in ['zero1-cpu'] if name in ZERO_1 else ['zero2', 'zero3-cut']:
            ours = _fit(_trainer_of(case, strategy))
            assert ours.keys() == expected.keys(), (name, ours.keys() ^ expected.keys())
            result[strategy] = _distance(ours, expected, expected if dist.get_global_rank() == 0 else parameters)
        found[name] = result
    return found


def _trainer_of(case: Case, strategy: str | None) -> Trainer:
    torch.manual_seed(17)
    return _trainer(strategy, [case.algorithm()], case.model(), case.dataset())


def _distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor], names: Any) -> float:
    return max(float((weights[name].double() - others[name].double()).abs().max()) for name in names)


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
    return _fit(_trainer(strategy, model=model, ds_config={'bf16': {'enabled': True}}))


def freeze_and_save(strategy: str, folder: str) -> None:
    """A checkpoint with frozen layers can be saved, and its weights be loaded; torch cannot resume it."""
    trainer = _trainer(strategy, [algorithms.LayerFreezing(0.0, 0.9)], save_folder=folder, save_overwrite=True)
    weights = _fit(trainer)
    path = str(Path(folder) / f'ep2-ba{8 // dist.get_world_size()}-rank0.pt')
    trainer = _trainer(strategy, load_path=path, load_weights_only=True)
    torch.testing.assert_close(weights_of(trainer), weights, rtol=0, atol=0)
    trainer.close()
    try:
        _trainer(strategy, load_path=path)
    except KeyError as error:
        assert 'net.0.weight' in str(error)
    else:
        raise AssertionError('resumed with an optimizer state that does not fit')


class _Probe(Callback):
    """The norm of the gradient, from ``p.grad`` in plain Composer, and from what the docs name instead."""

    def __init__(self):
        self.norms: list[float] = []

    def batch_end(self, state, logger):
        (ds_engine,) = [a.ds_engine for a in state.algorithms if isinstance(a, DeepSpeed)] or [None]
        if ds_engine is not None:
            self.norms.append(float(ds_engine.get_global_grad_norm()))
        else:
            gradients = [p.grad.flatten() for p in state.model.parameters()]
            self.norms.append(float(torch.cat(gradients).norm()))


def monitors(strategy: str | None, folder: str) -> dict[str, Any]:
    """Train with every callback that only reads, and return what they log."""
    log, probe = InMemoryLogger(), _Probe()
    torch.manual_seed(17)
    dataset = _images()
    trainer = _trainer(
        strategy,
        [algorithms.LabelSmoothing(0.1)],
        Small(with_metrics=True),
        dataset,
        eval_dataloader=_loader(dataset),
        loggers=[log],
        callbacks=[
            callbacks.ActivationMonitor(interval='1ba', only_log_wandb=False),
            callbacks.ImageVisualizer(interval='1ba'),
            callbacks.LRMonitor(),
            callbacks.MemoryMonitor(),
            callbacks.MemorySnapshot(),
            callbacks.NaNMonitor(),
            callbacks.OOMObserver(),
            callbacks.RuntimeEstimator(skip_batches=0),
            callbacks.SpeedMonitor(window_size=2),
            callbacks.SystemMetricsMonitor(),
            probe,
        ],
        profiler=Profiler(
            cyclic_schedule(wait=0, warmup=0, active=2, repeat=1),
            [JSONTraceHandler(folder=folder, merged_trace_filename=None, overwrite=True)],
            torch_prof_record_shapes=False,
        ),
        ddp_sync_strategy='forced_sync',
    )
    weights = _fit(trainer)
    trace = Path(folder) / f'ep0-ba2-rank{dist.get_global_rank()}.json'
    return {
        'weights': weights,
        'norms': probe.norms,
        'traced': {event['name'] for event in json.loads(trace.read_text()) if event['name'].startswith('event/')},
        'logged': {
            key.replace('/module.', '/').replace('/module_', '/_'): [_number(value) for _, value in values]
            for key, values in log.data.items()
            if not key.startswith('algorithm_traces')
        },
    }


def _number(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError):
        return type(value).__name__


def stoppers(strategy: str | None) -> dict[str, Any]:
    """After how many batches each callback stops a training of twenty, or what it raises."""
    found: dict[str, Any] = {}
    for name, callback in {
        'early': callbacks.EarlyStopper('Accuracy', 'train', comp='less', min_delta=10.0, patience='2ba'),
        'threshold': callbacks.ThresholdStopper('Accuracy', 'eval', threshold=-1.0, comp='gt'),
        'free': callbacks.FreeOutputs(),
        'nan': callbacks.NaNMonitor(),
    }.items():
        torch.manual_seed(17)
        dataset = _images()
        if name == 'nan':
            dataset.tensors[0][:] = float('nan')
        with_metrics = name in ('early', 'threshold')
        trainer = _trainer(
            strategy,
            model=Small(with_metrics),
            dataset=dataset,
            callbacks=[callback],
            eval_dataloader=_loader(_images()) if with_metrics else None,
        )
        try:
            trainer.fit()
        except RuntimeError as error:
            found[f'{name} raises'] = str(error)
        found[name] = int(trainer.state.timestamp.batch)
        trainer.close()
    return found


def load_checkpoint(strategy: str | None, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train on from a checkpoint of plain Composer that ``LoadCheckpoint`` loads at each event that is allowed."""
    path = Path(folder) / 'saved.pt'
    if not path.exists():
        trainer = _trainer(None, max_duration='1ep')
        trainer.fit()
        trainer.save_checkpoint(str(path))
        trainer.close()
    found = {}
    for event in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START):
        torch.manual_seed(3)
        callback = callbacks.LoadCheckpoint(str(path), load_weights_only=event == Event.INIT, event=event)
        found[event.name] = _fit(_trainer(strategy, model=Small(), callbacks=[callback]))
    return found


def surgery_while_loading(strategy: str, folder: str) -> str:
    """A checkpoint trained with BlurPool is loaded without it: Composer adds it, too late to be trained."""
    path = Path(folder) / 'blurred.pt'
    trainer = _trainer(None, [algorithms.BlurPool(min_channels=0)])
    trainer.save_checkpoint(str(path))
    trainer.close()
    trainer = _trainer(strategy, load_path=str(path))
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
    return _fit(_trainer(strategy, model=model))


class _Tables(LoggerDestination):
    def __init__(self):
        self.rows: list[Any] = []

    def log_table(self, columns, rows, name='Table', step=None):
        self.rows.append(rows)


def generate(strategy: str | None) -> dict[str, Any]:
    """Generate text every few batches with a tiny T5."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    words = {word: index for index, word in enumerate(['<pad>', '</s>', '<unk>', *'abcdefghijklmnopq'])}
    inner = Tokenizer(models.WordLevel(words, unk_token='<unk>'))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token='<pad>', eos_token='</s>', unk_token='<unk>', model_max_length=16
    )
    torch.manual_seed(17)
    config = T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0
    )
    model = HuggingFaceModel(T5ForConditionalGeneration(config), tokenizer=tokenizer, use_logits=True)
    log = _Tables()
    trainer = _trainer(
        strategy,
        model=model,
        dataset=_tokens(),
        loggers=[log],
        callbacks=[
            callbacks.Generate(['a b c', 'd e f g', 'h'], '2ba', batch_size=2, max_new_tokens=5, do_sample=True)
        ],
    )
    weights = _fit(trainer)
    return {'weights': weights, 'tables': log.rows}


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
            _trainer('zero2', [part] if is_algorithm else [], Images(), callbacks=[] if is_algorithm else [part])
        except ConfigError as error:
            found[type(part).__name__] = str(error)
    return found
