"""What a user does with a Trainer, besides one fit. Runs inside rank processes."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import torch
from composer import Algorithm, ComposerModel, Trainer
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composer_ds import (
    ComposerDSError,
    ConfigError,
    DeepSpeed,
    ModelOutputError,
    TrainingError,
    make_whole,
    partitioned_init,
)
from tests.distributed.parity_cases import OPTIMIZERS, STRATEGIES, FindUnusedParameters, weights_of


class Classifier(ComposerModel):
    """With a parameter of the root module itself, metrics, and attributes and methods of the user's."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 1.5))
        self.net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        self.register_buffer('offset', torch.tensor([0.5]))
        self.purpose = 'to be found'

    def describe(self) -> str:
        return f'{self.purpose}: {len(self.net)}'

    def forward(self, batch):
        return self.net(batch[0]) * self.scale + self.offset

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool):
        return {'Accuracy': MulticlassAccuracy(3, average='micro')}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


def _dataset(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(count, 5, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def _loader(count: int = 24) -> DataLoader:
    dataset = _dataset(count)
    return DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False))


def _algorithms(strategy: str | None) -> list[Algorithm]:
    return [] if strategy is None else [DeepSpeed(**copy.deepcopy(STRATEGIES[strategy]))]


def _trainer(
    strategy: str | None, model: ComposerModel | None = None, optimizer: str = 'adamw', **arguments
) -> Trainer:
    if model is None:
        torch.manual_seed(17)
        model = Classifier()
    arguments = {'max_duration': '2ep', 'train_dataloader': _loader(), 'progress_bar': False, **arguments}
    return Trainer(
        model=model,
        optimizers=OPTIMIZERS[optimizer](list(model.parameters())),
        device='cpu',
        device_train_microbatch_size=3,
        algorithms=_algorithms(strategy),
        seed=5,
        **arguments,
    )


def identity_of_faces(strategy: str) -> None:
    """The faces are what the user gave, to everyone who asks; the user's own objects are as they were."""
    torch.manual_seed(17)
    model = Classifier()
    numel = sum(parameter.numel() for parameter in model.parameters())
    trainer = _trainer(strategy, model)
    face, optimizer = trainer.state.model, trainer.state.optimizers[0]
    assert type(model) is Classifier and isinstance(face, Classifier) and type(face).__name__ == 'Classifier'
    assert not isinstance(face, DistributedDataParallel)
    assert face.describe() == 'to be found: 3' and face.purpose == model.purpose
    assert [name for name, _ in face.named_parameters()] == [name for name, _ in model.named_parameters()]
    # Straight after construction, before any further event: nobody but Composer's DDP is told that there are none.
    assert sum(getattr(p, 'ds_numel', p.numel()) for p in face.parameters()) == numel
    assert isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__qualname__ == 'AdamW'
    assert len(optimizer.param_groups[0]['params']) == len(list(model.parameters()))
    face.purpose = 'changed'
    assert model.purpose == 'changed'
    trainer.fit()
    assert not isinstance(trainer.state.model, DistributedDataParallel)
    for copying in (copy.deepcopy, lambda one: torch.save(one, io.BytesIO())):
        try:
            copying(trainer.state.model)
        except TypeError as error:
            assert 'state_dict' in str(error)
        else:
            raise AssertionError('a copy of the face would train the original')
    trainer.close()
    try:
        trainer.state.model([torch.zeros(1, 5)])
    except Exception as error:
        assert 'closed' in str(error)
    else:
        raise AssertionError('a closed engine ran')


def evaluation_and_prediction(strategy: str | None) -> dict[str, Any]:
    """Evaluate and predict before any training, then train with evaluation, then evaluate and predict again."""
    trainer = _trainer(strategy, eval_dataloader=_loader(18), eval_interval='1ep')
    found: dict[str, Any] = {}

    def look(name: str) -> None:
        trainer.eval()
        found[f'{name} accuracy'] = float(trainer.state.eval_metrics['eval']['Accuracy'].compute())
        found[f'{name} outputs'] = torch.cat(trainer.predict(_loader(8)))

    look('before')
    trainer.fit()
    assert trainer.state.train_metrics is not None
    found['train accuracy'] = float(trainer.state.train_metrics['Accuracy'].compute())
    look('after')
    trainer.close()
    return found


def fit_twice(strategy: str | None) -> dict[str, torch.Tensor]:
    """Train one epoch, then one more with another dataloader and a scheduler, as ``fit`` allows."""
    from composer.optim import LinearScheduler

    trainer = _trainer(strategy, max_duration='1ep')
    trainer.fit()
    trainer.fit(train_dataloader=_loader(16), duration='1ep', schedulers=LinearScheduler())
    weights = weights_of(trainer)
    trainer.close()
    return weights


def trainers_in_a_row(strategies: list[str | None]) -> dict[str, torch.Tensor]:
    """Several trainers, one after the other in one process, each going on with the same model object."""
    torch.manual_seed(17)
    model = Classifier()
    for strategy in strategies:
        if strategy is None and strategies[0] is not None:
            try:
                model([torch.zeros(1, 5)])
            except ComposerDSError as error:
                assert 'make_whole' in str(error)
            else:
                raise AssertionError('a partitioned model ran')
            make_whole(model)
        trainer = _trainer(strategy, model, optimizer='sgd', max_duration='3ba')
        trainer.fit()
        weights = weights_of(trainer)
        trainer.close()
        # Closing leaves no hook of ours or DeepSpeed's on the model, and the face still answers.
        assert len(model._forward_hooks) == 0
        torch.testing.assert_close(weights_of(trainer), weights, rtol=0, atol=0)
    return weights


def in_a_process_group_after_another(strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What two runs train alike, each of which begins without a process group, as in a notebook."""
    found = []
    for _ in range(2):
        torch.manual_seed(17)
        with partitioned_init(**STRATEGIES[strategy]):
            model = Classifier()
        trainer = _trainer(strategy, model, optimizer='sgd', max_duration='3ba')
        trainer.fit()
        found.append(weights_of(trainer))
        trainer.close()
        torch.distributed.destroy_process_group()
    return found[0], found[1]


class _Opaque:
    """Hides its tensor in a closure, where no walk over attributes finds it."""

    def __init__(self, tensor):
        self.get = lambda: tensor


class HidesItsOutput(Classifier):
    """Returns an object in which nobody can find the tensors."""

    def forward(self, batch):
        return _Opaque(super().forward(batch))

    def loss(self, outputs, batch):
        return super().loss(outputs.get(), batch)


def _error_of(build) -> Exception:
    try:
        build()
    except Exception as error:
        return error
    raise AssertionError('no error was raised')


def bad_input() -> dict[str, str]:
    """Each mistake of the issue, and what it raises."""
    errors = {
        'twice': _error_of(
            lambda: Trainer(model=Classifier(), device='cpu', algorithms=[DeepSpeed(), DeepSpeed(zero_stage=1)])
        ),
        'parallelism': _error_of(
            lambda: Trainer(model=Classifier(), device='cpu', algorithms=[DeepSpeed()], parallelism_config={'fsdp': {}})
        ),
        'adagrad': _error_of(
            lambda: Trainer(
                model=(model := Classifier()),
                optimizers=torch.optim.Adagrad(model.parameters()),
                device='cpu',
                algorithms=[DeepSpeed()],
            )
        ),
        'left out': _error_of(
            lambda: Trainer(
                model=(model := Classifier()),
                optimizers=torch.optim.SGD(model.net.parameters(), lr=0.1),
                device='cpu',
                algorithms=[DeepSpeed()],
            )
        ),
        'opaque': _error_of(lambda: _trainer('zero2', HidesItsOutput()).fit()),
        'compile': _error_of(lambda: _trainer('zero2', compile_config={}).fit()),
    }
    shared = DeepSpeed()

    def reuse() -> None:
        first = Trainer(model=Classifier(), device='cpu', algorithms=[shared])
        Trainer(model=Classifier(), device='cpu', algorithms=[shared])
        first.close()

    errors['shared'] = _error_of(reuse)

    def unfreeze() -> None:
        model = Classifier()
        model.scale.requires_grad_(False)
        trainer = _trainer('zero2', model)
        trainer.fit(duration='2ba')
        model.scale.requires_grad_(True)
        trainer.fit(duration='2ba')

    errors['unfrozen'] = _error_of(unfreeze)
    kinds = {'opaque': ModelOutputError, 'unfrozen': TrainingError}
    for name, error in errors.items():
        assert isinstance(error, kinds.get(name, ConfigError)), (name, error)
    return {name: str(error) for name, error in errors.items()}


def non_finite_gradient(strategy: str) -> tuple[float, str]:
    """How far the weights move in an optimizer step with an infinite gradient on one rank, and what is logged."""
    stream = io.StringIO()
    logger = logging.getLogger('composer_ds')
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        trainer = _trainer(strategy, optimizer='sgd', max_duration='1ba')
        if dist.get_global_rank() == 0:
            trainer.state.train_dataloader.dataset.tensors[0][:] = float('inf')  # pyright: ignore
        before = weights_of(trainer)
        trainer.fit()
        after = weights_of(trainer)
        trainer.close()
    finally:
        logger.removeHandler(handler)
    return max(float((after[name] - before[name]).abs().max()) for name in before), stream.getvalue()


def logged_block(zero_stage: int, microbatch_size: int, batch_size: int) -> str:
    """What is logged at INFO from the construction of the Trainer to the start of training."""
    stream = io.StringIO()
    logger = logging.getLogger('composer_ds')
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        dataset = _dataset()
        model = Classifier()
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters()),
            train_dataloader=DataLoader(dataset, batch_size=batch_size, sampler=dist.get_sampler(dataset)),
            max_duration='1ba',
            device='cpu',
            device_train_microbatch_size=microbatch_size,
            algorithms=[DeepSpeed(zero_stage=zero_stage, offload_optimizer='cpu')],
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return stream.getvalue()


def hugging_face(strategy: str | None) -> dict[str, Any]:
    """A Hugging Face model with tied embeddings through Composer's wrapper."""
    from transformers import MT5Config, MT5ForConditionalGeneration

    torch.manual_seed(17)
    config = MT5Config(
        vocab_size=31, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = HuggingFaceModel(MT5ForConditionalGeneration(config), use_logits=True)
    generator = torch.Generator().manual_seed(6)
    samples: Any = [
        {
            'input_ids': torch.randint(1, 31, (6,), generator=generator),
            'labels': torch.randint(1, 31, (4,), generator=generator),
        }
        for _ in range(16)
    ]
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        train_dataloader=DataLoader(samples, batch_size=4, sampler=dist.get_sampler(samples, shuffle=False)),
        max_duration='2ep',
        device='cpu',
        device_train_microbatch_size=3,
        algorithms=_algorithms(strategy) or [FindUnusedParameters()],
        progress_bar=False,
    )
    assert isinstance(trainer.state.model, HuggingFaceModel) or strategy is None
    before = {name: value.clone() for name, value in model.state_dict().items()} if strategy is None else None
    trainer.fit()
    weights = weights_of(trainer)
    trainer.close()
    return {'weights': weights, 'before': before}
