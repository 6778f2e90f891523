"""A decoder-only language model from scratch: packed sequences of bytes, ZeRO 3, microbatches weighted by tokens.

The tokens are the bytes of the text, so nothing is trained or downloaded for them. The model has Llama's architecture.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, cast

import torch
from composer.core import Evaluator
from composer.utils import dist
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from composer_ds.errors import ConfigError
from recipes.causal_lm_model import LanguageModel
from recipes.dataloaders import batch_size_problems, build_dataloader, split_problems
from recipes.packed_text import collate, count_tokens, encode, pack, read_paragraphs, split_paragraphs
from recipes.task import Task

__all__ = ['DataConfig', 'ModelConfig', 'build']


class ModelConfig(BaseModel, extra='forbid'):
    """The section ``model`` of the YAML.

    Args:
        d_model (int): Width of the residual stream.
        d_ff (int): Width inside the gated feed-forward layers.
        num_layers (int): Layers.
        num_heads (int): Attention heads of each layer.
        vocab_size (int | None): Rows of the embedding; ``None`` takes as many as there are tokens, 259.
        partitioned_init (bool): Whether the launcher builds the model inside of ``composer_ds.partitioned_init``, so
            that no rank ever holds the whole of it. For ZeRO 3; without effect where ranks keep whole weights.
        seed (int): Seed of the random weights, on every rank.
    """

    d_model: PositiveInt = 128
    d_ff: PositiveInt = 352
    num_layers: PositiveInt = 3
    num_heads: PositiveInt = 4
    vocab_size: Annotated[int, Field(ge=259)] | None = None
    partitioned_init: bool = False
    seed: int = 17


class DataConfig(BaseModel, extra='forbid'):
    """The section ``data`` of the YAML.

    Args:
        path (str | None): A text file in UTF-8; ``None`` takes what ``help()`` tells about Python itself.
        stream (str | None): A folder or URI that ``python -m recipes.text_stream`` has written, in the place of a text;
            needs ``mosaicml-streaming``. ``validation_fraction`` and ``seed`` are then without effect.
        stream_cache (str | None): The folder, on a disk of each node, for what is downloaded from a URI.
        sequence_length (int): Tokens of a sequence, into which paragraphs are packed.
        global_batch_size (int): Sequences per optimizer step over all ranks.
        eval_batch_size (int): Sequences per evaluation batch of each rank.
        validation_fraction (float): Share of the paragraphs that are not trained on.
        max_paragraphs (int | None): Use so many paragraphs only, for both splits; ``None`` takes all.
        num_workers (int): Worker processes that each rank loads with; 0 loads in the training process.
        seed (int): Seed of the split.
        shuffle_seed (int): Seed of the order of the sequences, a new one each epoch.
    """

    path: str | None = None
    stream: str | None = None
    stream_cache: str | None = None
    sequence_length: Annotated[int, Field(ge=2)] = 256
    global_batch_size: PositiveInt = 32
    eval_batch_size: PositiveInt = 32
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_paragraphs: PositiveInt | None = None
    num_workers: NonNegativeInt = 0
    seed: int = 17
    shuffle_seed: int = 17


def build(model: ModelConfig, data: DataConfig) -> Task:
    """Builds model and data on this rank. No rank talks to another, unless the launcher partitions the construction.

    Args:
        model (ModelConfig): What to train.
        data (DataConfig): What to train on.

    Returns:
        Task: Weights and data are the same on every rank; each rank's dataloaders give its share.

    Raises:
        ConfigError: On every rank, with all problems of the sections at once.
    """
    tokenizer = ByT5Tokenizer(extra_ids=0)
    train, validation = _samples(data, tokenizer)
    num_train = len(train) if data.stream is None else train.num_samples
    problems = [
        *batch_size_problems(data.global_batch_size),
        *split_problems('train', num_train, 'give a longer text or lower data.validation_fraction'),
        *split_problems('validation', len(validation), 'give a longer text or raise data.validation_fraction'),
    ]
    if model.d_model % (2 * model.num_heads):
        problems.append(
            f'model.d_model is {model.d_model} and model.num_heads {model.num_heads}: rotary positions need heads of '
            'an even width. Write a d_model that divides by twice the number of heads.'
        )
    if problems:
        raise ConfigError(problems)
    pad: Any = tokenizer.pad_token_id
    make_batch = partial(collate, sequence_length=data.sequence_length, pad=pad)
    return Task(
        model=LanguageModel(_network(model, tokenizer, data.sequence_length), tokenizer),
        train_dataloader=build_dataloader(
            train,
            make_batch,
            batch_size=data.global_batch_size // dist.get_world_size(),
            shuffle_seed=data.shuffle_seed,
            num_workers=data.num_workers,
            count_tokens=count_tokens,
        ),
        eval_dataloader=[
            Evaluator(
                label='validation',
                dataloader=build_dataloader(validation, make_batch, batch_size=data.eval_batch_size),
            )
        ],
    )


def _samples(data: DataConfig, tokenizer: ByT5Tokenizer) -> tuple[Any, Any]:
    """Packed sequences to train on, and those for validation."""
    if data.stream is None:
        parts = split_paragraphs(
            read_paragraphs(data.path)[: data.max_paragraphs],
            seed=data.seed,
            validation_fraction=data.validation_fraction,
        )
        train, validation = (pack((encode(text, tokenizer) for text in part), data.sequence_length) for part in parts)
        return train, validation
    problems = [
        f'data.{name} is {getattr(data, name)!r}, and with data.stream that was decided when the stream was written. '
        f'Write data.{name}=null, or data.stream=null.'
        for name in ('path', 'max_paragraphs')
        if getattr(data, name) is not None
    ]
    try:
        from recipes.text_stream import InOrder, open_split
    except ImportError as error:
        problems.append(
            f'data.stream needs mosaicml-streaming ({error}); docs/recipes.md says how to install it beside '
            'transformers 5.'
        )
    if problems:
        raise ConfigError(problems)
    train, validation = (
        open_split(
            data.stream,
            split,
            cache=data.stream_cache,
            sequence_length=data.sequence_length,
            batch_size=batch_size,
            shuffle=split == 'train',
            shuffle_seed=data.shuffle_seed,
        )
        for split, batch_size in (
            ('train', max(1, data.global_batch_size // dist.get_world_size())),
            ('validation', data.eval_batch_size),
        )
    )
    return train, InOrder(validation)


def _network(model: ModelConfig, tokenizer: ByT5Tokenizer, sequence_length: int) -> LlamaForCausalLM:
    """Draws random weights without touching the global random state."""
    end, pad = cast(Any, tokenizer.eos_token_id), cast(Any, tokenizer.pad_token_id)
    config = LlamaConfig(
        vocab_size=model.vocab_size or len(tokenizer),
        hidden_size=model.d_model,
        intermediate_size=model.d_ff,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        max_position_embeddings=sequence_length,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=pad,
        use_cache=False,  # nobody generates here, and in training the cache takes memory
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(model.seed)  # the CPU's alone: torch.manual_seed would reset the GPUs', too
        return LlamaForCausalLM(config)
