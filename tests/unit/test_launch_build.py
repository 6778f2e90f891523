"""Making the objects of a run: parameter groups, refusals, and data that leaves a rank without work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import DataSpec
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import composer_ds
from composer_ds.errors import ConfigError
from composer_ds.launch.arguments import Choice
from composer_ds.launch.build import make, make_algorithms, make_optimizer, require_samples
from composer_ds.launch.schema import DeepSpeedConfig


class SmallModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 2)
        self.linear = torch.nn.Linear(2, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)


def names_of_groups(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[tuple[list[str], float]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [([names[p] for p in group['params']], group['weight_decay']) for group in optimizer.param_groups]


def test_one_group_of_the_parameters_that_train():
    model = SmallModel()
    optimizer = make_optimizer(Choice('optimizer', torch.optim.AdamW, {'lr': 0.1, 'weight_decay': 0.3}), model)
    names = ['embedding.weight', 'linear.weight', 'linear.bias', 'norm.weight', 'norm.bias']
    assert names_of_groups(optimizer, model) == [(names, 0.3)]


def test_norms_and_biases_get_a_group_without_weight_decay():
    model = SmallModel()
    arguments = {'lr': 0.1, 'weight_decay': 0.3, 'no_decay_on_norms_and_biases': True}
    optimizer = make_optimizer(Choice('optimizer', torch.optim.AdamW, arguments), model)
    assert names_of_groups(optimizer, model) == [
        (['embedding.weight', 'linear.weight'], 0.3),
        (['linear.bias', 'norm.weight', 'norm.bias'], 0.0),
    ]
    assert [group['lr'] for group in optimizer.param_groups] == [0.1, 0.1]


def test_a_group_that_would_be_empty_is_left_out():
    model = torch.nn.Linear(2, 2, bias=False)
    arguments = {'lr': 0.1, 'no_decay_on_norms_and_biases': True}
    assert len(make_optimizer(Choice('optimizer', torch.optim.SGD, arguments), model).param_groups) == 1


def test_a_value_that_the_class_refuses_is_told_with_section_and_reason():
    with pytest.raises(ConfigError, match=r"optimizer: SGD refused \{'lr': -1.0\}: Invalid learning rate: -1.0"):
        make_optimizer(Choice('optimizer', torch.optim.SGD, {'lr': -1.0}), SmallModel())


def test_a_model_without_anything_to_train_is_refused():
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match=r'optimizer: SGD refused .*empty parameter list'):
        make_optimizer(Choice('optimizer', torch.optim.SGD, {'lr': 0.1}), model)


def test_an_object_cannot_change_the_configuration():
    arguments: dict[str, Any] = {'options': {'a': 1}}

    def factory(options):
        options['a'] = 2

    make(Choice('loggers.x', factory, arguments))  # type: ignore[arg-type]
    assert arguments == {'options': {'a': 1}}


def test_the_algorithm_gets_only_what_was_given(monkeypatch):
    class Recorder:
        def __init__(self, **arguments):
            self.arguments = arguments

    monkeypatch.setattr(composer_ds, 'DeepSpeed', Recorder, raising=False)
    assert make_algorithms(None) == []
    (default,) = make_algorithms(DeepSpeedConfig())
    assert vars(default) == {'arguments': {}}
    (given,) = make_algorithms(DeepSpeedConfig(zero_stage=3, ds_config={'a': 1}))
    assert vars(given) == {'arguments': {'zero_stage': 3, 'ds_config': {'a': 1}}}


def task_with(samples: int, **options: Any) -> Any:
    return SimpleNamespace(train_dataloader=DataLoader(TensorDataset(torch.zeros(samples, 1)), **options))


@pytest.mark.parametrize(('samples', 'ranks'), [(1, 1), (2, 2), (3, 2), (100, 8)])
def test_enough_samples_pass(samples, ranks):
    require_samples(task_with(samples), ranks)


@pytest.mark.parametrize('wrap', [lambda loader: loader, DataSpec], ids=['DataLoader', 'DataSpec'])
@pytest.mark.parametrize(
    ('samples', 'options', 'reason'),
    [
        (0, {}, 'is empty: 0 samples'),
        (3, {}, r'has fewer samples \(3\) than there are ranks \(4\)'),
        (4, {'batch_size': 8, 'drop_last': True}, r'gives no batch on a rank \(4 samples for 4 ranks\)'),
    ],
)
def test_too_few_samples_are_refused(samples, options, reason, wrap):
    task = task_with(samples, **options)
    task.train_dataloader = wrap(task.train_dataloader)
    with pytest.raises(ConfigError, match=f'data: the training data {reason}'):
        require_samples(task, 4)


def test_data_of_unknown_length_passes():
    class Endless(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1)

    require_samples(SimpleNamespace(train_dataloader=DataLoader(Endless())), 8)  # type: ignore[arg-type]
