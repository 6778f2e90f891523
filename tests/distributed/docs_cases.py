"""Runs the Python blocks of a page, as if the reader had a model, an optimizer and a dataloader by those names."""

from __future__ import annotations

import os
import pathlib
import sys
import types
from typing import Any

import composer
import torch
from composer.algorithms import EMA
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import composer_ds
from composer_ds import launch
from tests.distributed.parity_cases import Regression
from tests.pages import Block


class MyModel(Regression):
    """The reader's: takes what the pages leave open as ``...``, and has a head."""

    def __init__(self, *_: Any):
        super().__init__()
        self.head = self.net[5]

    def resize_token_embeddings(self, _: int) -> None:
        """Stands for that of a Hugging Face model, which has its own tests."""


class _Reader:
    """What the reader has; remembers the Trainers that were made."""

    def __init__(self):
        self.trainers: list[composer.Trainer] = []

    def trainer(self, *left_open: Any, **given: Any) -> composer.Trainer:
        assert left_open in ((), (...,))
        given = {name: value for name, value in given.items() if value is not ...}
        model = given.setdefault('model', MyModel())
        given.setdefault('optimizers', torch.optim.SGD(model.parameters(), lr=0.01))
        given.setdefault('train_dataloader', _loader(_points(), batch_size=8))
        given = {'max_duration': '2ba', 'device': 'cpu', 'progress_bar': False, **given}
        self.trainers.append(composer.Trainer(**given))
        return self.trainers[-1]


def _points() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, 2, generator=generator))


def _loader(dataset: Any = None, batch_size: int = 8, sampler: Any = None) -> DataLoader:
    dataset = dataset or _points()
    return DataLoader(dataset, batch_size=batch_size, sampler=dist.get_sampler(dataset))


def run_page(blocks: list[Block], folder: str) -> int:
    """Run the blocks one after the other; train with each Trainer that a block left untrained.

    Returns:
        int: How many Trainers were made, each of which has trained.
    """
    before = pathlib.Path.cwd()
    os.chdir(folder)
    reader = _Reader()
    model = MyModel()
    module = types.ModuleType('page')  # classes in it are looked up by its name
    sys.modules['page'] = module
    module.__dict__.update(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        dataloader=_loader(),
        dataset=_points(),
        tokenizer=range(10),
        torch=torch,
        nn=nn,
        EMA=EMA,
        MyModel=MyModel,
        DataLoader=_loader,
        DeepSpeed=composer_ds.DeepSpeed,
        Trainer=reader.trainer,
    )
    if blocks[0].page == 'docs/evaluation.md':
        _prepare_generation(reader, module)
    try:
        for block in blocks:
            # Imports of the page bring the real Trainer.
            text = block.text.replace('from composer import Trainer\n', '')
            text = text.replace('from composer import Callback, Trainer\n', 'from composer import Callback\n')
            exec(compile('\n' * (block.line - 1) + text, block.page, 'exec'), module.__dict__)
            if '__main__' in block.text:
                module.__dict__['main']()
        for trainer in reader.trainers:
            if trainer.state.timestamp.batch.value == 0:
                trainer.fit()
            assert trainer.state.timestamp.batch.value > 0
            trainer.close()
    finally:
        os.chdir(before)
        del sys.modules['page']
    return len(reader.trainers)


def _prepare_generation(reader: _Reader, module: types.ModuleType) -> None:
    """Give the reader of the page about generation a language model that is trained."""
    hf_model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=32, n_embd=8, n_layer=1, n_head=2, pad_token_id=0))
    ids = torch.randint(1, 16, (8, 6), generator=torch.Generator().manual_seed(1))
    samples = [{'input_ids': one, 'labels': one, 'attention_mask': torch.ones_like(one)} for one in ids]
    loader = DataLoader(samples, batch_size=4, sampler=dist.get_sampler(samples))  # pyright: ignore[reportArgumentType]
    trainer = reader.trainer(
        model=HuggingFaceModel(hf_model, use_logits=True),
        train_dataloader=loader,
        max_duration='1ba',
        algorithms=[composer_ds.DeepSpeed(zero_stage=3)],
    )
    trainer.fit()
    batch = next(iter(loader))
    module.__dict__.update(trainer=trainer, batch=batch, input_ids=batch['input_ids'], hf_model=hf_model)


def run_command(arguments: list[str], folder: str) -> int:
    """Run ``run.py`` with arguments; return its exit code."""
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        return launch.main(arguments)
    finally:
        os.chdir(before)
