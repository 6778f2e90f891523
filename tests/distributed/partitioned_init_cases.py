"""Models built already partitioned, against the same code without partitioned_init. Runs inside rank processes."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from composer import ComposerModel, Trainer
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed, construction, make_whole, partitioned_init
from composer_ds.whole import is_waiting


class Block(nn.Module):
    """Initialises the parameters of its submodules in every way that comes to mind."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.third = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.orthogonal_(self.first.weight)
        self.first.bias.data.zero_()
        rows = self.second.weight.data
        nn.init.normal_(self.third.weight)
        self.third.bias.data = torch.linspace(-1, 1, width)
        rows[0] = 5.0  # through a view that was taken before others were touched
        with torch.no_grad():
            self.second.weight[1] = 7.0
            self.second.weight.narrow(0, 2, 1).copy_(self.third.weight[:1] * 2)
            self.norm.weight.detach().numpy()[1] = 3.0
            torch._foreach_mul_([self.first.weight, self.third.weight], 1.5)  # pyright: ignore[reportPrivateImportUsage]
        before = torch.full((width,), 0.5)
        self.offset = nn.Parameter(before)
        self.first.weight.data.mul_(0.5)
        before.add_(1.0)  # through the tensor from before it became a parameter


class Everything(ComposerModel):
    """Parents, tied weights, copies, replaced and frozen parameters, buffers, a parametrization."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.embedding = nn.Embedding(9, width)
        self.root = nn.Parameter(torch.rand(3))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.blocks: Any = nn.ModuleList(Block(width) for _ in range(2))
        self.copies = nn.ModuleList(copy.deepcopy(self.blocks[0]) for _ in range(2))
        self.wide: Any = nn.utils.parametrizations.weight_norm(nn.Linear(width, 33))
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer('mean', self.embedding.weight.detach().mean(0))
        self.apply(self._initialize)
        self.blocks[1].first.weight = nn.Parameter(self.blocks[0].first.weight.detach() + 1)
        self.blocks[1].load_state_dict(self.blocks[0].state_dict())
        self.blocks[0].norm.bias.requires_grad_(False).fill_(0.5)
        self.wide._parameters['direct'] = nn.Parameter(torch.rand(2), requires_grad=False)
        self.not_touched = nn.Parameter(self.blocks[0].norm.bias, requires_grad=False)
        self.of_another = nn.Parameter(self.wide.bias)
        self.of_another.data = self.of_another.data.clone()
        self.rows = len(self.head.weight) + self.head.weight.shape[1] + self.head.weight.numel()

    def _initialize(self, module: Any) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.7)

    def forward(self, batch):
        hidden = self.embedding(batch[0]) + self.mean
        block: Any
        for block in [*self.blocks, *self.copies]:
            hidden = hidden + block.norm(block.third(torch.tanh(block.first(block.second(hidden))))) * block.scale
            hidden = hidden * block.offset
        hidden = torch.tanh(hidden)
        factor = 1 + (self.wide(hidden) * self.of_another).mean() * self.root.sum()
        return self.head(hidden) * factor + self.nothing.sum()

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


MOVED = ('embedding.weight', 'root', 'blocks.1.first.weight', 'wide.bias', 'head.weight')


def built(build: Callable[[], Any], seed: int, **settings: Any) -> Any:
    """Build a model already partitioned, with a seed of its own on each rank, of which rank 0's counts."""
    torch.manual_seed(seed)
    with partitioned_init(**{'zero_stage': 3, **settings}, device='cpu'):
        return build()


def limited(limit_bytes: int) -> None:
    """Let so much of a model be whole at a time."""
    construction.WHOLE_LIMIT_BYTES = limit_bytes


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equals_plain(limit_bytes: int) -> None:
    """Bit for bit, with rank 0's seed, also read back inside of a second context."""
    limited(limit_bytes)
    torch.manual_seed(11)
    plain = Everything()
    model = built(Everything, 11 + dist.get_global_rank())
    assert all(p.numel() == 0 and p.ds_tensor.numel() * dist.get_world_size() >= p.ds_numel for p in model.parameters())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert model.rows == plain.rows
    if dist.get_global_rank() != 0:
        model.mean.copy_(plain.mean)  # buffers are taken from rank 0 by the engine
    with partitioned_init(zero_stage=3, device='cpu'):
        # Shapes are told without putting anything together, so that an optimizer's groups may depend on them.
        groups = [[p.ndim > 1 for p in each.parameters() if p.requires_grad] for each in (model, plain)]
        assert groups[0] == groups[1] and all(is_waiting(parameter) for parameter in model.parameters())
        torch.testing.assert_close(_state(model), _state(plain), rtol=0, atol=0)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    make_whole(model)
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(_state(model), _state(plain), rtol=0, atol=0)


def trainer(model: ComposerModel, *algorithms: DeepSpeed, **arguments: Any) -> Trainer:
    """Train a model with SGD, or with DeepSpeed."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 9, (24,), generator=generator)
    dataset = TensorDataset(tokens, torch.randint(0, 9, (24,), generator=generator))
    to_train = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(to_train, lr=0.005, momentum=0.9),
        train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False)),
        device='cpu',
        device_train_microbatch_size=2,
        algorithms=list(algorithms),
        progress_bar=False,
        **arguments,
    )


def trained(opened: Trainer) -> dict[str, torch.Tensor]:
    """Return the weights after ``fit``."""
    opened.fit()
    model: Any = opened.state.model
    state = _state(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model)
    opened.close()
    return state


def trains_and_resumes(build: Callable[[], ComposerModel], settings: dict[str, Any]) -> None:
    """Three batches as plain Composer; from its checkpoint two more; and a checkpoint that the bare model reads."""
    limited(300)
    with tempfile.TemporaryDirectory() as mine:
        folder = dist.all_gather_object(mine)[0]
        folders = (f'{folder}/plain', f'{folder}/ours')
        plain, ours = (f'{each}/ep0-ba3-rank0.pt' for each in folders)
        saving = {'max_duration': '5ba', 'save_interval': '3ba', 'save_filename': 'ep0-ba{batch}-rank{rank}.pt'}
        torch.manual_seed(11)
        start = _state(build())
        torch.manual_seed(11)
        expected = trained(trainer(build(), save_folder=folders[0], **saving))
        moved = {name: float((expected[name] - start[name]).abs().max()) for name in MOVED}
        assert min(moved.values()) > 1e-4, moved
        model = built(build, 11 + dist.get_global_rank(), **settings)
        found = trained(trainer(model, DeepSpeed(**settings), save_folder=folders[1], **saving))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        dist.barrier()
        other = built(build, 99, **settings)
        arguments = {'load_path': plain, 'max_duration': '5ba'}
        torch.testing.assert_close(
            trained(trainer(other, DeepSpeed(**settings), **arguments)), expected, rtol=0, atol=1e-6
        )
        bare = build()
        bare.load_state_dict(torch.load(ours, weights_only=False)['state']['model'], strict=True)
        torch.testing.assert_close(
            _state(bare), torch.load(plain, weights_only=False)['state']['model'], rtol=0, atol=1e-6
        )
        dist.barrier()


def masters_of_16_bits(settings: dict[str, Any]) -> None:
    """The fp32 master weights are those that were built, not rounded; the forward pass uses 16 bits."""
    limited(300)
    torch.manual_seed(11)
    plain = Everything()
    expected = dict(plain.state_dict())
    frozen = [name for name, parameter in plain.named_parameters() if not parameter.requires_grad]
    expected |= {name: expected[name].to(torch.bfloat16) for name in frozen}
    model = built(Everything, 11 + dist.get_global_rank(), **settings)
    opened = trainer(model, DeepSpeed(**settings), max_duration='1ba')
    found = dict(opened.state.model.state_dict())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    trained(opened)


def _configs() -> dict[str, Any]:
    from transformers import GPT2Config, LlamaConfig, MT5Config

    return {
        'mt5': MT5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2),
        'mt5-tied': MT5Config(
            vocab_size=30, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, tie_word_embeddings=True
        ),
        'gpt2': GPT2Config(vocab_size=30, n_positions=12, n_embd=8, n_layer=2, n_head=2),
        'llama': LlamaConfig(
            vocab_size=30, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        ),
    }


def hugging_face(name: str, limit_bytes: int) -> None:
    """from_config, resize_token_embeddings and from_pretrained are those of before, and tied weights stay tied."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    limited(limit_bytes)
    auto: Any = AutoModelForSeq2SeqLM if name.startswith('mt5') else AutoModelForCausalLM
    resized: list[Any] = []

    def from_config() -> Any:
        return auto.from_config(_configs()[name])

    def resize() -> Any:
        model = from_config()
        model.resize_token_embeddings(35)
        return model

    with tempfile.TemporaryDirectory() as mine:
        folder = dist.all_gather_object(mine)[0]
        for build in (from_config, resize, lambda: auto.from_pretrained(folder)):
            torch.manual_seed(11)
            plain = build()
            model = built(build, 11 + dist.get_global_rank())
            assert all(parameter.numel() == 0 for parameter in model.parameters())
            make_whole(model)
            torch.testing.assert_close(_state(model), _state(plain), rtol=0, atol=0)
            tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
            assert tied == (plain.get_output_embeddings().weight is plain.get_input_embeddings().weight)
            resized.append(len(model.get_input_embeddings().weight))
            if dist.get_global_rank() == 0 and len(resized) == 2:
                plain.save_pretrained(folder)
            dist.barrier()
    assert resized == [30, 35, 35]


def _from_outside(model: Any) -> None:
    import deepspeed

    with deepspeed.zero.GatheredParameters([model.root], modifier_rank=0):
        model.root.data.fill_(4.0)
        nn.init.constant_(model.root, 4.0)


def written_by_deepspeed(settings: dict[str, Any]) -> None:
    """deepspeed.zero.GatheredParameters keeps what is written, a second context, too; both reach the engine."""
    model = built(Everything, 11)
    _from_outside(model)
    with partitioned_init(zero_stage=3, device='cpu'):
        model.of_another.data.fill_(6.0)
        model.added = nn.Linear(2, 2)
    model.later = nn.Linear(2, 2)
    opened = trainer(model, DeepSpeed(**settings), max_duration='1ba')
    state = opened.state.model.state_dict()
    assert state['root'].tolist() == [4.0] * 3 and state['of_another'].tolist() == [6.0] * 33
    assert state['added.weight'].abs().min() > 0 and state['later.weight'].abs().min() > 0
    opened.close()
