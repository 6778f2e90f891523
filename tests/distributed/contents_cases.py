"""Models with everything that a checkpoint can hold, every tensor filled with numbers of its own. Runs in ranks.

``bare_model`` is also called in a process that can import neither deepspeed nor composer_ds.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from composer import ComposerModel, Trainer
from composer.models import HuggingFaceModel
from composer.utils import checkpoint, dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ADAPTERS_ONLY = ['state/model/*base_layer*', 'state/model/*wte*', 'state/model/*wpe*', 'state/model/*ln_*',
                 'state/model/*mlp*', 'state/model/*lm_head*', 'state/model/*c_proj*']  # fmt: skip


class Everything(ComposerModel):
    """Frozen, tied, toggled, scalar and (where asked) empty parameters, all kinds of buffers, names with ``module``."""

    kept: torch.Tensor
    not_kept: torch.Tensor

    def __init__(self, with_empty: bool):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.module = nn.Sequential(nn.Linear(5, 5), nn.ModuleDict({'module': nn.Linear(5, 5), 'a_b': nn.Linear(5, 3)}))
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fixed_scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.late = nn.Parameter(torch.ones(3))
        self.list_of = nn.ParameterList([torch.ones(2, 3), torch.ones(1)])
        self.empty = nn.Parameter(torch.empty(0, 4)) if with_empty else None
        self.no_outputs = nn.Linear(5, 0) if with_empty else nn.Identity()
        self.register_buffer('kept', torch.tensor([1.0, 2.0]))
        self.register_buffer('counted', torch.tensor(3, dtype=torch.int64))
        self.register_buffer('not_kept', torch.tensor([4.0]), persistent=False)

    def forward(self, batch):
        outer: Any = self.module
        frozen: Any = self.frozen
        hidden = self.norm(outer[0](self.embedding(batch[0])) + frozen(self.embedding(batch[0])))
        inner = outer[1]
        hidden = torch.tanh(inner['module'](hidden)) * self.scale * self.fixed_scale + self.kept.sum()
        extra = (inner['a_b'](hidden) * self.late).sum(1, keepdim=True) + self.list_of[0].sum() + self.list_of[1]
        return (
            self.head(hidden)
            + extra
            + self.not_kept
            + (0 if self.empty is None else self.empty.sum() + self.no_outputs(hidden).sum())
        )

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def bare_model(kind: str) -> ComposerModel:
    """Make a model anew, with weights that do not matter."""
    if kind in ('everything', 'everything but empty'):
        return Everything(with_empty=kind == 'everything')
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    lora: Any = get_peft_model(
        GPT2LMHeadModel(config), LoraConfig(r=2, target_modules=['c_attn'], task_type='CAUSAL_LM')
    )
    return HuggingFaceModel(lora, should_save_peft_only=False)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Two parameter groups: matrices with weight decay, the rest without."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2 and parameter.requires_grad]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2 and parameter.requires_grad]
    groups: list[dict[str, Any]] = [{'params': matrices, 'weight_decay': 0.1}, {'params': others, 'weight_decay': 0.0}]
    return torch.optim.AdamW([group for group in groups if group['params']], lr=0.01)


def numbers(name: str, kind: str, like: torch.Tensor) -> torch.Tensor:
    """A ramp that starts elsewhere for every tensor, so that a swapped, shifted or lost element shows."""
    start = sum(ord(letter) * (position + 1) for position, letter in enumerate(f'{kind}/{name}')) % 9973
    ramp = start + torch.arange(like.numel(), dtype=torch.float64) / 7
    return ramp.reshape(like.shape).to(like.dtype)


def weights_to_write(model: nn.Module) -> dict[str, torch.Tensor]:
    """Numbers for every tensor; tied weights have the same under each name."""
    first: dict[int, torch.Tensor] = {}
    return {
        name: first.setdefault(id(value), numbers(name, 'weight', value))
        for name, value in model.state_dict(keep_vars=True).items()
    }


def _loader(kind: str) -> DataLoader:
    generator = torch.Generator().manual_seed(4)
    if 'everything' in kind:
        dataset: Any = TensorDataset(
            torch.randint(0, 7, (8,), generator=generator), torch.randint(0, 7, (8,), generator=generator)
        )
    else:
        tokens = torch.randint(0, 11, (8, 5), generator=generator)
        dataset = [{'input_ids': row, 'labels': row} for row in tokens]
    return DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False))


def train_and_write(kind: str, strategy: dict[str, Any], path: str) -> None:
    """Make an optimizer step, put numbers in the place of all weights and moments, save all and the adapters alone."""
    from composer_ds import DeepSpeed
    from composer_ds.checkpoint.writing import save_checkpoint

    torch.manual_seed(3)
    model = bare_model(kind)
    numbered = weights_to_write(model)
    trainer = Trainer(
        model=model,
        optimizers=optimizer_of(model),
        train_dataloader=_loader(kind),
        max_duration='1ba',
        device='cpu',
        algorithms=[DeepSpeed(**copy.deepcopy(strategy))],
        progress_bar=False,
    )
    if isinstance(model, Everything):
        model.late.requires_grad_(False)
    trainer.fit()
    face, optimizer = trainer.state.model, trainer.state.optimizers[0]
    before = {name: value.clone() for name, value in face.state_dict().items()}
    face.load_state_dict(numbered)
    state = optimizer.state_dict()
    names = {parameter: name for name, parameter in face.named_parameters()}
    held = [names[parameter] for group in optimizer.param_groups for parameter in group['params']]
    for index, moments in state['state'].items():
        for key in ('exp_avg', 'exp_avg_sq'):
            if key in moments:
                moments[key] = numbers(held[index], key, moments[key])
    optimizer.load_state_dict(state)
    assert any((before[name] - value).abs().max() > 1 for name, value in face.state_dict().items() if value.numel())
    trainer.save_checkpoint(f'{path}-whole.pt')
    save_checkpoint(trainer.state, f'{path}-streamed.pt')
    if kind == 'lora':
        save_checkpoint(trainer.state, f'{path}-adapters.pt', ignore_keys=ADAPTERS_ONLY, weights_only=True)
    trainer.close()
    if kind == 'everything':
        assert {'empty', 'no_outputs.weight', 'no_outputs.bias'} < {name for name, _ in model.named_parameters()}


def streamed_as_torch_saves(path: str) -> None:
    """Write views, shared storages, empty tensors and whatever else to the same effect as ``torch.save``."""
    from composer_ds.checkpoint.stream import write_stream
    from composer_ds.consolidation import consolidate, consolidate_copy, consolidating_later

    torch.manual_seed(1)
    base = torch.randn(5, 7)
    plain = {
        'base': base, 'view': base.view(-1)[3:9], 'strided': base.t(), 'parameter': nn.Parameter(torch.ones(2)),
        'scalar': torch.tensor(3.0), 'integers': torch.arange(5), 'empty': torch.empty(0, 4),
        'half': torch.randn(3).bfloat16(), 'flags': torch.tensor([True, False]), 'other': [1, 'two', (3.0, None)],
    }  # fmt: skip
    # Enough, and of sizes that differ enough, that memory is used again.
    later = {f'later {size}': torch.randn(size, 3).to(dtype) for size, dtype in (
        (1, torch.float32), (0, torch.float32), (700, torch.bfloat16), (900, torch.float32), (20, torch.int64),
    )}  # fmt: skip
    cut = torch.arange(30.0)
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    runs = [(owner, 30 * owner // world_size, 30 // world_size) for owner in range(world_size)]
    with consolidating_later() as pending:
        mine = cut[runs[rank][1] :][: runs[rank][2]]
        streamed: dict[str, Any] = dict(plain)
        streamed |= {name: consolidate_copy(whole) for name, whole in later.items()}
        left_out = consolidate_copy(torch.ones(4))
        streamed['cut'] = consolidate(runs, mine, torch.float32, torch.device('cpu'), torch.Size((5, 6)))
        streamed['again'] = streamed['cut']
    for read in (lambda: streamed['cut'] + 1, left_out.clone, lambda: copy.deepcopy(streamed['cut'])):
        try:
            read()
        except RuntimeError as error:
            assert 'no elements yet' in str(error)
        else:
            raise AssertionError('a copy of nothing')
    assert write_stream(streamed, pending, path) is None
    dist.barrier()
    expected_file = io.BytesIO()
    whole = cut.view(5, 6)
    torch.save({**plain, **later, 'cut': whole, 'again': whole}, expected_file)
    expected_file.seek(0)
    expected = torch.load(expected_file)
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert list(found) == list(expected)
        for name, value in expected.items():
            if torch.is_tensor(value):
                assert type(found[name]) is type(value) and found[name].stride() == value.stride(), name
                torch.testing.assert_close(found[name], value, rtol=0, atol=0)
                assert found[name].data_ptr() % 4 == 0
            else:
                assert found[name] == value
        assert found['again'] is found['cut']
        found['base'][0, 3] = 99
        assert found['view'][0] == 99 and found['strided'][3, 0] == 99, 'one storage'


def what_each_rank_holds(strategy: dict[str, Any], folder: str) -> list[dict[str, tuple[str, int, int]]]:
    """Return for each way to ask for the state: device, elements, and bytes of memory of every tensor on this rank."""
    from composer_ds import DeepSpeed

    model = bare_model('everything but empty')
    trainer = Trainer(
        model=model,
        optimizers=optimizer_of(model),
        train_dataloader=_loader('everything'),
        max_duration='1ba',
        device='cpu',
        algorithms=[DeepSpeed(**copy.deepcopy(strategy))],
        progress_bar=False,
    )
    trainer.fit()
    found = []

    def look(state: dict[str, Any]) -> None:
        tensors = dict(state['state']['model'])
        for name, moments in state['state']['optimizers']['AdamW']['state'].items():
            tensors |= {f'{name} {key}': value for key, value in moments.items() if key != 'step'}
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad} | {'head.weight'}
        found.append(
            {
                name: (value.device.type, value.numel(), value.untyped_storage().nbytes())
                for name, value in tensors.items()
                if name.split()[0] in trained
            }
        )

    checkpoint.save_checkpoint(trainer.state, f'{folder}/saved.pt', ignore_keys=look)
    look({'state': trainer.state.state_dict()})
    trainer.close()
    return found
