"""Exports of weights under a strategy or under plain Composer. Runs inside rank processes."""

from __future__ import annotations

import copy
import logging
import os
import pathlib
import resource
import signal
from typing import Any

import torch
from composer import Callback, ComposerModel, Trainer
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from composer_ds.callbacks import ConsolidatedWeightsSaver
from composer_ds.checkpoint import exported_weights
from composer_ds.errors import CheckpointError
from tests.distributed import contents_cases, option_cases
from tests.distributed.bf16_cases import half_trainer
from tests.distributed.parity_cases import STRATEGIES, Tied

SEVERAL_FILES = '0.3KB'


def export_numbers(strategy: str | None, folder: str) -> None:
    """Put numbers in the place of all weights, and export them in every dtype and in several files."""
    torch.manual_seed(3)
    model = contents_cases.bare_model('everything')
    numbered = contents_cases.weights_to_write(model)
    trainer = Trainer(
        model=model,
        optimizers=contents_cases.optimizer_of(model),
        train_dataloader=contents_cases._loader('everything'),
        max_duration='1ba',
        device='cpu',
        algorithms=[] if strategy is None else [DeepSpeed(**copy.deepcopy(STRATEGIES[strategy]))],
        progress_bar=False,
    )
    trainer.fit()
    prefix = 'module.' if isinstance(trainer.state.model, nn.parallel.DistributedDataParallel) else ''
    trainer.state.model.load_state_dict({prefix + name: value for name, value in numbered.items()})
    for dtype in ('fp32', 'bf16', 'fp16'):
        ConsolidatedWeightsSaver(folder, dtype=dtype, filename=dtype).save(trainer.state)
    part_bytes, exported_weights.PART_BYTES = exported_weights.PART_BYTES, 24  # so that a tensor comes in parts
    ConsolidatedWeightsSaver(folder, filename='several', max_shard_size=SEVERAL_FILES).save(trainer.state)
    exported_weights.PART_BYTES = part_bytes
    trainer.close()


def masters(strategy: str, folder: str) -> dict[str, torch.Tensor]:
    """Train in bf16, and return the fp32 master weights that DeepSpeed itself tells, by name."""
    from deepspeed.utils import safe_get_full_fp32_param

    saver = ConsolidatedWeightsSaver(folder, '1ep', filename='newest')
    trainer = half_trainer(strategy, {'bf16': {'enabled': True}}, callbacks=[saver])
    trainer.fit()
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in trainer.state.model.named_parameters()}
    trainer.close()
    return {name: value.clone() for name, value in found.items() if value is not None}


def trained(strategy: str | None, folder: str, **options: Any) -> dict[str, Any]:
    """Train six batches, two epochs, with a saver; return the weights, and what rank 0 logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.addFilter(lambda record: record.getMessage().startswith('Saved the weights'))
    logger = logging.getLogger('composer_ds.announcements')
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    saver = ConsolidatedWeightsSaver(folder, **options)
    trainer = option_cases.trainer_of(strategy, callbacks=[saver])
    before = option_cases.weights(trainer)
    trainer.fit()
    weights = option_cases.weights(trainer)
    trainer.close()
    logger.removeHandler(handler)
    return {'before': before, 'weights': weights, 'saved': saver.saved, 'lines': lines}


def to_object_store(strategy: str, folder: str, url: str) -> list[str]:
    """Export into S3, in several files, and again in another number of files; the errors."""
    with option_cases._s3(url):
        trainer = option_cases.trainer_of(strategy)
        trainer.fit(duration='1ba')
        saver = ConsolidatedWeightsSaver(folder, filename='ba{batch}', max_shard_size=SEVERAL_FILES)
        assert saver.save(trainer.state) == saver.save(trainer.state) == f'{folder}/ba1'
        errors = []
        different: list[dict[str, Any]] = [
            {'max_shard_size': '1GB'},
            {'max_shard_size': SEVERAL_FILES, 'overwrite': False},
        ]
        for options in different:
            try:
                ConsolidatedWeightsSaver(folder, filename='ba{batch}', **options).save(trainer.state)
            except CheckpointError as error:
                errors.append(str(error))
        trainer.close()
    return errors


def resumed(strategy: str, folder: str) -> tuple[list[str], list[str]]:
    """Train three batches, close, go on; what remains."""
    options: dict[str, Any] = {'save_folder': f'{folder}/checkpoints', 'save_interval': '1ba', 'autoresume': True}
    found = []
    for duration in ('3ba', '6ba'):
        saver = ConsolidatedWeightsSaver(f'{folder}/weights', '1ba', num_to_keep=2)
        # Behind the saver of checkpoints: a checkpoint knows the exports of before.
        trainer = option_cases.trainer_of(strategy, max_duration=duration, callbacks=[saver], **options)
        trainer.fit()
        trainer.close()
        dist.barrier()
        found.append(sorted(os.listdir(f'{folder}/weights')))
        dist.barrier()
    return found[0], found[1]


class _FullDisk(Callback):
    """At a batch, rank 0 may write no file larger than so many bytes."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == 2 and dist.get_global_rank() == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit_bytes, resource.RLIM_INFINITY))


def full_disk(strategy: str | None, folder: str) -> str:
    """The second export finds no room in the middle of its second tensor; a later one is complete."""
    saver = ConsolidatedWeightsSaver(folder, '1ba', filename='ba{batch}')
    trainer = option_cases.trainer_of(strategy, callbacks=[_FullDisk(700), saver])
    try:
        trainer.fit()
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert trainer.state.timestamp.batch == 2
    dist.barrier()
    there = sorted(os.listdir(folder))
    assert there == ['ba1'], there
    dist.barrier()
    saver.save(trainer.state)
    trainer.close()
    return message


def errors(strategy: str | None, folder: str) -> list[str]:
    """What else is refused, on every rank."""
    trainer = option_cases.trainer_of(strategy)
    trainer.fit(duration='1ba')
    model = trainer.state.model
    found = []
    if dist.get_global_rank() == 0:
        pathlib.Path(folder, 'file').write_text('')
    dist.barrier()
    large = {name: 1e5 * torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(large)
    refused: list[dict[str, Any]] = [
        {'folder': f'{folder}/file'},
        {'folder': folder, 'filename': 'file'},
        {'folder': folder, 'dtype': 'fp16'},
    ]
    for options in refused:
        try:
            ConsolidatedWeightsSaver(**options).save(trainer.state)
        except CheckpointError as error:
            found.append(str(error))
    ConsolidatedWeightsSaver(folder, filename='once', overwrite=False).save(trainer.state)
    try:
        ConsolidatedWeightsSaver(folder, filename='once', overwrite=False).save(trainer.state)
    except CheckpointError as error:
        found.append(str(error))
    trainer.close()
    return found


class WithState(Tied):
    """Has a state that is no tensor."""

    def get_extra_state(self):
        return {'of': 'its own'}

    def set_extra_state(self, state):
        pass


def extra_state(strategy: str, folder: str) -> None:
    """Export a model with a state that safetensors cannot hold."""
    model = WithState()
    dataset = TensorDataset(torch.ones(4, 5, dtype=torch.int64), torch.ones(4, 5, dtype=torch.int64))
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(dataset, batch_size=2, sampler=dist.get_sampler(dataset)),
        max_duration='1ba',
        device='cpu',
        algorithms=[DeepSpeed(**copy.deepcopy(STRATEGIES[strategy]))],
        callbacks=[ConsolidatedWeightsSaver(folder, filename='all')],
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner: Any = Tokenizer(models.WordLevel({f'w{number}': number for number in range(11)}, unk_token='w0'))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token='w1', eos_token='w2', unk_token='w0')


TOKENS = torch.arange(10).view(2, 5)


def huggingface(kind: str, strategy: str | None, folder: str) -> dict[str, torch.Tensor]:
    """Train a tiny GPT-2 or LoRA on one, with a saver, and return the logits of the live model, and fp32 weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, bos_token_id=3, eos_token_id=2)  # fmt: skip
    inner: Any = GPT2LMHeadModel(config)
    inner.generation_config.max_new_tokens = 3
    tokenizer = _tokenizer()
    if kind != 'gpt2':
        if dist.get_global_rank() == 0:
            inner.save_pretrained(f'{folder}/base')
        dist.barrier()
        settings = LoraConfig(r=2, target_modules=['c_attn'], modules_to_save=['ln_f'], init_lora_weights=False)
        inner = get_peft_model(inner, settings)
    model: ComposerModel = HuggingFaceModel(inner, tokenizer, should_save_peft_only=kind == 'lora only')
    dataset: Any = [{'input_ids': row, 'labels': row} for row in torch.randint(0, 11, (8, 5))]
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05),
        train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False)),
        max_duration='2ba',
        device='cpu',
        algorithms=[] if strategy is None else [DeepSpeed(**copy.deepcopy(STRATEGIES[strategy]))],
        progress_bar=False,
    )
    trainer.fit()
    ConsolidatedWeightsSaver(folder, filename='fp32').save(trainer.state)
    ConsolidatedWeightsSaver(folder, filename='bf16', dtype='bf16', max_shard_size='2KB').save(trainer.state)
    assert inner.config.dtype != torch.bfloat16, 'the live configuration was changed'
    with torch.no_grad():
        trainer.state.model.eval()
        logits = trainer.state.model({'input_ids': TOKENS, 'attention_mask': torch.ones_like(TOKENS)}).logits.clone()
    weights = {name.removeprefix('module.model.').removeprefix('model.'): value.clone()
               for name, value in trainer.state.model.state_dict().items()}  # fmt: skip
    trainer.close()
    return {'logits': logits, **weights}
