"""Sharded checkpoints of models with everything in them, and what is wrong with some. Runs inside rank processes."""

from __future__ import annotations

import copy
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch
from composer import ComposerModel, Trainer
from composer.optim import LinearWithWarmupScheduler
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import CheckpointError, ConfigError, DeepSpeed, ShardedCheckpointSaver, partitioned_init
from composer_ds.sharded.source import ShardedSource
from tests.distributed import contents_cases, deepspeed_format_cases
from tests.distributed.contents_cases import _loader, bare_model, numbers, optimizer_of, weights_to_write
from tests.distributed.parity_cases import STRATEGIES


def _trainer(model: Any, strategy: str, kind: str = 'everything', **arguments: Any) -> Trainer:
    settings = copy.deepcopy(STRATEGIES[strategy])
    load_sharded = arguments.pop('load_sharded', None)
    return Trainer(
        model=model,
        optimizers=arguments.pop('optimizers', None) or optimizer_of(model),
        schedulers=LinearWithWarmupScheduler('4ba'),
        step_schedulers_every_batch=True,
        train_dataloader=arguments.pop('train_dataloader', None) or _loader(kind),
        max_duration=arguments.pop('max_duration', '2ba'),
        device='cpu',
        algorithms=[DeepSpeed(**settings, load_sharded=load_sharded)],
        progress_bar=False,
        **arguments,
    )


def write_numbers(kind: str, strategy: str, folder: str) -> str:
    """Make an optimizer step, put numbers in the place of all weights and moments, and save."""
    torch.manual_seed(3)
    model = bare_model(kind)
    numbered = weights_to_write(model)
    saver = ShardedCheckpointSaver(folder, interval='100ba', filename=f'{strategy}-{{batch}}', overwrite=True)
    trainer = _trainer(model, strategy, kind, max_duration='1ba', callbacks=[saver])
    if isinstance(model, contents_cases.Everything):
        model.late.requires_grad_(False)
    trainer.fit()
    optimizer = trainer.state.optimizers[0]
    trainer.state.model.load_state_dict(numbered)
    state = optimizer.state_dict()
    held = _held(trainer)
    for index, moments in state['state'].items():
        for key in ('exp_avg', 'exp_avg_sq'):
            if key in moments:
                moments[key] = numbers(held[index], key, moments[key])
    optimizer.load_state_dict(state)
    path = saver.save(trainer.state)
    trainer.close()
    return str(path)


def _held(trainer: Trainer) -> list[str]:
    names = {parameter: name for name, parameter in trainer.state.model.named_parameters()}
    return [names[parameter] for group in trainer.state.optimizers[0].param_groups for parameter in group['params']]


def read_numbers(kind: str, strategy: str, path: str, partitioned: bool = False) -> int:
    """Load into another strategy, and compare every tensor; returns how many were compared."""
    torch.manual_seed(99)
    if partitioned:
        with partitioned_init(**copy.deepcopy(STRATEGIES[strategy])):
            model = bare_model(kind)
            optimizer = optimizer_of(model)  # which looks at shapes
    else:
        model = bare_model(kind)
        optimizer = optimizer_of(model)
    trainer = _trainer(model, strategy, kind, optimizers=optimizer, load_sharded=path)
    reference = bare_model(kind)
    expected, compared = weights_to_write(reference), 0
    found = trainer.state.model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
        compared += 1
    shapes = dict(reference.named_parameters())
    state = trainer.state.optimizers[0].state_dict()['state']
    for index, name in enumerate(_held(trainer)):
        for key in ('exp_avg', 'exp_avg_sq'):
            if name != 'late' and shapes[name].numel():
                torch.testing.assert_close(
                    state[index][key], numbers(name, key, shapes[name]), rtol=0, atol=0, msg=f'{name} {key}'
                )
                compared += 1
    assert trainer.state.timestamp.batch.value == 1
    trainer.fit()
    trainer.close()
    return compared


def read_offline(kind: str, path: str) -> None:
    """Read it as the commands do, without ranks."""
    expected, source = weights_to_write(bare_model(kind)), ShardedSource(path)
    assert source.tensors.keys() | source.tied.keys() == expected.keys()
    for name, stored in source.tensors.items():
        value = source.read(name, 0, stored.shape.numel()).view(stored.shape)
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


class Small(ComposerModel):
    """Two layers and a frozen one."""

    def __init__(self, width: int = 6, extra: bool = False):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        if extra:
            self.extra = nn.Linear(2, 2)
        self.counter = _Counter()

    def forward(self, batch):
        hidden = self.frozen(self.second(torch.tanh(self.first(batch[0]))))
        return self.extra(hidden) if hasattr(self, 'extra') else hidden

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


class _Counter(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {'count': self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state['count']


def _data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator))
    return DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False))


def small(strategy: str, seed: int, model: Small | None = None, **arguments: Any) -> Trainer:
    """A Trainer that is quickly built."""
    torch.manual_seed(seed)
    model = model or Small()
    return _trainer(model, strategy, train_dataloader=_data(), **arguments)


def save_small(strategy: str, folder: str, **arguments: Any) -> dict[str, Any]:
    """Train two batches and save; return what was saved."""
    trainer = small(strategy, 3, callbacks=[ShardedCheckpointSaver(folder, '2ba', 'ba{batch}', **arguments)])
    user: Any = trainer.state.model
    user.counter.count = 7
    trainer.fit()
    found = _what_is_there(trainer)
    trainer.close()
    return found


def _what_is_there(trainer: Trainer) -> dict[str, Any]:
    model: Any = trainer.state.model
    weights = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
    scheduler: Any = trainer.state.schedulers[0]
    state = copy.deepcopy(trainer.state.optimizers[0].state_dict())
    return {
        'weights': weights,
        'optimizer': state,
        'batch': trainer.state.timestamp.batch.value,
        'schedule': scheduler.state_dict()['last_epoch'],
        'count': model.counter.count,
    }


def load_small(strategy: str, load_sharded: Any, model: Callable[[], Small] = Small) -> dict[str, Any]:
    """Load, and return what is there then."""
    torch.manual_seed(8)
    trainer = small(strategy, 8, model(), load_sharded=load_sharded)
    found = _what_is_there(trainer)
    trainer.close()
    return found


def load_with_extra(strategy: str, load_sharded: Any) -> dict[str, Any]:
    """Load into a model with another layer."""
    return load_small(strategy, load_sharded, lambda: Small(extra=True))


def refusals(strategy: str, path: str) -> dict[str, str]:
    """Try everything that must not be loaded; return what each error says, alike on all ranks."""
    folder, found = pathlib.Path(path).parent, {}

    def attempt(what: str, load_sharded: Any, error: Any = CheckpointError, **arguments: Any) -> None:
        try:
            small(strategy, 8, load_sharded=load_sharded, **arguments).close()
        except error as raised:
            found[what] = str(raised)
        else:
            raise AssertionError(f'{what} was loaded')
        words = dist.all_gather_object(found[what])
        assert len(set(words)) == 1, words

    def damaged_copy(what: str, damage: Callable[[pathlib.Path], Any]) -> str:
        copy_of = folder / what
        if dist.get_global_rank() == 0:
            shutil.copytree(path, copy_of)
            damage(copy_of)
        dist.barrier()
        return str(copy_of)

    attempt('wrong path', str(folder / 'nowhere'))
    attempt('wrong model', path, model=Small(width=7))
    attempt('other names', path, model=Small(extra=True))
    torch.manual_seed(0)
    model = Small()
    weights, biases = [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{'params': biases[:1]}, {'params': weights + biases[1:]}]
    attempt('other groups', path, model=model, optimizers=torch.optim.AdamW(groups))
    model = Small()
    attempt('other optimizer', path, model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
    attempt('two checkpoints', path, ConfigError, load_path=str(folder / 'x.pt'))

    def flip(checkpoint: pathlib.Path) -> None:
        shard = checkpoint / '__0_0.distcp'
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)

    def cut(checkpoint: pathlib.Path) -> None:
        shard = checkpoint / '__0_0.distcp'
        shard.write_bytes(shard.read_bytes()[:-10])

    attempt('missing shard', damaged_copy('missing-shard', lambda one: (one / '__0_0.distcp').unlink()))
    attempt('flipped bit', damaged_copy('flipped-bit', flip))
    attempt('truncated', damaged_copy('truncated', cut))
    attempt('no manifest', damaged_copy('no-manifest', lambda one: (one / 'manifest.json').unlink()))
    attempt('bad manifest', damaged_copy('bad-manifest', lambda one: (one / 'manifest.json').write_text('{"a":')))
    # The folder around it: with latest, without, and with one that names nothing.
    latest = folder / 'latest'
    if dist.get_global_rank() == 0:
        latest.write_text('ba99\n')
    dist.barrier()
    attempt('latest names nothing', str(folder))
    if dist.get_global_rank() == 0:
        latest.unlink()
    dist.barrier()
    attempt('no latest', str(folder))
    return found


class Wrapped(ComposerModel):
    """A model that was trained by a loop over DeepSpeed, for Composer."""

    def __init__(self, model: Any):
        super().__init__()
        self.model: Any = model

    def forward(self, batch):
        return self.model(batch)

    def loss(self, outputs, batch):
        return outputs


def from_deepspeed(config: str, strategy: str, folder: str, weights_only: bool) -> int:
    """Train in a raw loop over DeepSpeed, save as DeepSpeed does, and go on with Composer."""
    engine = deepspeed_format_cases.engine_of(config, 'adamw')
    expected = deepspeed_format_cases.contents(engine)
    engine.save_checkpoint(folder)
    engine.destroy()
    torch.manual_seed(77)
    odd = deepspeed_format_cases.Odd()
    trained = [(name, p) for name, p in odd.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {'params': [p for _, p in trained if p.dim() > 1], 'weight_decay': 0.1},
            {'params': [p for name, p in trained if p.dim() == 1 and name != 'scale'], 'weight_decay': 0.0},
            {'params': [p for name, p in trained if name == 'scale'], 'lr': 0.5},
        ],
        lr=0.003,
    )
    tokens: Any = torch.zeros(8, 6, dtype=torch.long)
    trainer = _trainer(
        Wrapped(odd),
        strategy,
        optimizers=optimizer,
        train_dataloader=DataLoader(tokens, batch_size=4, sampler=dist.get_sampler(tokens)),
        load_sharded={'path': folder, 'weights_only': weights_only},
    )
    found = trainer.state.model.state_dict()
    for name, value in expected['weights'].items():
        torch.testing.assert_close(found[f'model.{name}'], value, rtol=0, atol=0, msg=name)
    state = trainer.state.optimizers[0].state_dict()['state']
    held = [name.removeprefix('model.') for name in _held(trainer)]
    for (name, key), value in expected['state'].items():
        if weights_only:
            assert state[held.index(name)] == {}
        else:
            torch.testing.assert_close(state[held.index(name)][key], value, rtol=0, atol=0, msg=f'{name} {key}')
            assert float(state[held.index(name)]['step']) == 3
    rates = [group['weight_decay'] for group in trainer.state.optimizers[0].param_groups]
    assert rates == [0.1, 0.0, 0.01] and trainer.state.timestamp.batch.value == 0
    trainer.close()
    return len(expected['state'])
