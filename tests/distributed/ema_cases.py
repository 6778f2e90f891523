"""Training with Composer's ``EMA``, plain and under DeepSpeed. Runs inside rank processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from composer import Callback, ComposerModel, Trainer
from composer.algorithms import EMA
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from composer_ds import DeepSpeed, ShardedCheckpointSaver
from tests.distributed.parity_cases import OPTIMIZERS, STRATEGIES, weights_of

SETTINGS: dict[str, dict[str, Any]] = {
    'at once': {'half_life': '2ba'},
    'late and seldom': {'half_life': None, 'smoothing': 0.7, 'ema_start': '2ba', 'update_interval': '2ba'},
    'by epochs': {'half_life': '1ep'},
}
SAVED_AT = 5  # in the middle of the second epoch


class Averaged(ComposerModel):
    """A buffer that training changes, a frozen layer, tied weights, and a metric."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.register_buffer('mean', torch.zeros(13))
        self.frozen = nn.Linear(13, 7).requires_grad_(False)
        self.middle = nn.Linear(7, 6)
        self.head = nn.Linear(6, 2)
        self.again = nn.Linear(6, 2, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.again.weight = self.head.weight

    def forward(self, batch):
        hidden = self.first(batch[0])
        if self.training:
            self.mean.lerp_(hidden.detach().mean(0).to(self.mean.dtype), 0.3)
        hidden = self.middle(torch.tanh(self.frozen(torch.tanh(hidden - self.mean))))
        return self.head(hidden) + self.again(torch.tanh(hidden))

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs.float(), batch[1])

    def get_metrics(self, is_train: bool):
        return {} if is_train else {'MSE': MeanSquaredError()}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs.float(), batch[1])


class Watch(Callback):
    """Keeps what is there at each event, and the average of the weights worked out by itself."""

    def __init__(self, smoothing: float):
        self.smoothing = smoothing
        self.metrics: list[float] = []
        self.evaluated: list[dict[str, torch.Tensor]] = []
        self.restored: list[bool] = []
        self.by_hand: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def _weights(self, state) -> dict[str, torch.Tensor]:
        weights = state.model.state_dict()
        return {name.removeprefix('module.'): value.clone() for name, value in weights.items()}

    def batch_end(self, state, logger):
        self.weights = self._weights(state)
        if not self.by_hand:
            self.by_hand = {name: value.clone() for name, value in self.weights.items()}
        for name, average in self.by_hand.items():
            average.copy_(average * self.smoothing + self.weights[name] * (1.0 - self.smoothing))

    def eval_start(self, state, logger):
        self.evaluated.append(self._weights(state))

    def eval_end(self, state, logger):
        self.metrics.append(float(state.eval_metrics['eval']['MSE'].compute()))
        restored = self._weights(state)
        self.restored.append(all(torch.equal(restored[name], value) for name, value in self.weights.items()))


def _data(count: int, seed: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    dataset = TensorDataset(
        3 * torch.randn(count, 6, generator=generator), 5 * torch.randn(count, 2, generator=generator)
    )
    return DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False))


def _model(seed: int = 17) -> Averaged:
    torch.manual_seed(seed)
    return Averaged()


def _trainer(strategy: str | None, ema: EMA, model: Averaged, bf16: bool = False, **arguments: Any) -> Trainer:
    algorithms: list[Any] = [ema]
    load_sharded = arguments.pop('load_sharded', None)
    resumes = load_sharded is not None or 'save_folder' in arguments or 'load_path' in arguments
    if strategy is not None:
        settings = copy.deepcopy(STRATEGIES[strategy])
        if bf16:
            settings['ds_config'] = {**settings.get('ds_config', {}), 'bf16': {'enabled': True}}
        algorithms.append(DeepSpeed(**settings, load_sharded=load_sharded))
    return Trainer(
        model=model,
        optimizers=OPTIMIZERS['adamw' if resumes else 'sgd'](list(model.parameters())),
        train_dataloader=_data(16 * dist.get_world_size(), 1),
        eval_dataloader=_data(10, 2),
        eval_interval='2ba',
        max_duration='2ep',
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=algorithms,
        seed=5,
        progress_bar=False,
        **arguments,
    )


def _average(trainer: Trainer) -> dict[str, torch.Tensor]:
    (ema,) = (algorithm for algorithm in trainer.state.algorithms if isinstance(algorithm, EMA))
    average = ema.state_dict()['ema_model']
    return {
        name.removeprefix('module.'): value.clone()
        for kind in ('named_parameters_dict', 'named_buffers_dict')
        for name, value in average[kind].items()
    }


def train(strategy: str | None, settings: str, bf16: bool = False) -> dict[str, Any]:
    """Train two epochs of four batches and return all that must not depend on the strategy."""
    model, ema = _model(), EMA(**SETTINGS[settings])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert ema.smoothing is not None
    watch = Watch(ema.smoothing)
    trainer = _trainer(strategy, ema, model, bf16, callbacks=[watch])
    trainer.fit()
    found = {
        'before': before,
        'weights': weights_of(trainer),
        'average': _average(trainer),
        'evaluated': watch.evaluated,
        'metrics': watch.metrics,
        'restored': watch.restored,
        'by hand': watch.by_hand,
    }
    trainer.close()
    return found


def users_own_object(strategy: str) -> None:
    """What the user gets from the own ``EMA`` object: before and after the Trainer is closed."""
    model, ema = _model(), EMA(half_life='2ba')
    trainer = _trainer(strategy, ema, model)
    assert isinstance(trainer.state.algorithms[0], EMA) and type(ema) is EMA
    trainer.fit()
    average, weights = _average(trainer), weights_of(trainer)
    assert ema.ema_started and not ema.ema_weights_active

    def assert_average(found: dict[str, torch.Tensor]) -> None:
        for name, value in average.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)

    assert_average(ema.get_ema_model(_model(3)).state_dict())
    torch.testing.assert_close(weights_of(trainer), weights, rtol=0, atol=0)
    # The model that is trained: the weights must be those of the average in the engine, too, and training goes on.
    ema.get_ema_model(model)
    assert_average(weights_of(trainer))
    trainer.fit(duration='1ba')
    average = _average(trainer)
    trainer.close()
    assert_average(ema.get_ema_model(_model(4)).state_dict())
    assert_average(ema.get_ema_model(model).state_dict())


def save(strategy: str | None, folder: str) -> dict[str, Any]:
    """Train, saving in the middle of the second epoch."""
    trainer = _trainer(
        strategy,
        EMA(half_life='2ba'),
        _model(),
        save_folder=folder,
        save_interval=f'{SAVED_AT}ba',
        save_overwrite=True,
        save_filename='ba{batch}.pt',
        callbacks=_savers(strategy, folder),
    )
    trainer.fit()
    return _result(trainer)


def _savers(strategy: str | None, folder: str) -> list[Callback]:
    if strategy is None:
        return []
    return [ShardedCheckpointSaver(f'{folder}/sharded', f'{SAVED_AT}ba', 'ba{batch}', overwrite=True)]


def resume(strategy: str | None, folder: str, load_sharded: str | None = None) -> dict[str, Any]:
    """Go on from the checkpoint, with other weights to begin with, and an evaluation before anything else."""
    watch = Watch(0.5)
    trainer = _trainer(
        strategy,
        EMA(half_life='2ba'),
        _model(99),
        load_path=str(Path(folder) / f'ba{SAVED_AT}.pt') if load_sharded is None else None,
        load_sharded=load_sharded,
        callbacks=[watch],
    )
    trainer.eval()
    trainer.fit()
    return {**_result(trainer), 'metrics': watch.metrics, 'evaluated': watch.evaluated[0]}


def _result(trainer: Trainer) -> dict[str, Any]:
    # At the last batch of the run the checkpoint may have left the average in the model.
    (ema,) = (algorithm for algorithm in trainer.state.algorithms if isinstance(algorithm, EMA))
    ema._ensure_training_weights_active(trainer.state)
    result = {'weights': weights_of(trainer), 'average': _average(trainer)}
    trainer.close()
    return result
