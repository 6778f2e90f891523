"""mT5 on grapheme-to-phoneme conversion with the CMU Pronouncing Dictionary: from ``c a t`` to ``K AE T``.

By default a small mT5 learns from random weights, in minutes on a CPU; ``model.pretrained`` starts from real weights
with their own tokenizer. Words are split into train, validation and test (:mod:`recipes.cmudict_data`); error rates are
those of greedy generation on words never trained on (:mod:`recipes.g2p_metrics`). The validation words are evaluated
at the Trainer's ``eval_interval``, the test words once, after training.
"""

from __future__ import annotations

import logging
from typing import Annotated

import torch
from composer.core import Evaluator, Event, State
from composer.utils import dist
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt
from transformers import MT5Config, MT5ForConditionalGeneration, PreTrainedModel, PreTrainedTokenizerBase

from composer_ds.errors import ConfigError
from recipes.cmudict_data import Word, phonemes, read_words, split_words
from recipes.dataloaders import batch_size_problems, build_dataloader, split_problems
from recipes.g2p_batches import EvalCollator, TrainCollator, count_tokens, training_samples
from recipes.g2p_model import G2PModel
from recipes.g2p_report import G2PReport
from recipes.g2p_tokenizer import g2p_tokenizer
from recipes.pretrained import load_pretrained
from recipes.task import Task

__all__ = ['DataConfig', 'ModelConfig', 'build']

log = logging.getLogger(__name__)

# What pretrained weights decide themselves.
_SIZES = {'d_model', 'd_kv', 'd_ff', 'num_layers', 'num_decoder_layers', 'num_heads', 'seed'}


class ModelConfig(BaseModel, extra='forbid'):
    """The section ``model`` of the YAML.

    Args:
        pretrained (str | None): A folder or a repository of the hub, such as ``google/mt5-small``, to take weights,
            sizes and tokenizer from; ``None`` starts from random weights of the sizes below.
        d_model (int): Width of the residual stream.
        d_kv (int): Width of one attention head.
        d_ff (int): Width inside the gated feed-forward layers.
        num_layers (int): Layers of the encoder.
        num_decoder_layers (int): Layers of the decoder.
        num_heads (int): Attention heads of each layer.
        dropout_rate (float): Dropout in training. Pretrained weights keep their own rate unless this is written.
        max_new_tokens (int | None): Where generation stops at the latest; ``None`` allows the tokens of the longest
            pronunciation in the dictionary.
        seed (int): Seed of the random weights, on every rank.
    """

    pretrained: str | None = None
    d_model: PositiveInt = 128
    d_kv: PositiveInt = 32
    d_ff: PositiveInt = 256
    num_layers: PositiveInt = 2
    num_decoder_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    dropout_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_new_tokens: PositiveInt | None = None
    seed: int = 17


class DataConfig(BaseModel, extra='forbid'):
    """The section ``data`` of the YAML.

    Args:
        global_batch_size (int): Samples per optimizer step over all ranks; a sample is a word with one pronunciation.
        eval_batch_size (int): Words per evaluation batch of each rank.
        validation_fraction (float): Share of the words in the validation split.
        test_fraction (float): Share of the words in the test split.
        max_words (int | None): Train on so many words only, the same ones each time; ``None`` takes all.
        eval_max_words (int | None): Evaluate on so many words of each held-out split only, the same ones each time;
            ``None`` takes all.
        keep_stress (bool): Whether the model has to tell stress, too.
        num_workers (int): Worker processes that each rank loads with; 0 loads in the training process.
        seed (int): Seed of the splits; runs with the same one hold out the same words.
        shuffle_seed (int): Seed of the order of the samples, a new one each epoch.
    """

    global_batch_size: PositiveInt = 256
    eval_batch_size: PositiveInt = 256
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.10
    max_words: PositiveInt | None = None
    eval_max_words: PositiveInt | None = 2000
    keep_stress: bool = False
    num_workers: NonNegativeInt = 0
    seed: int = 17
    shuffle_seed: int = 17


def build(model: ModelConfig, data: DataConfig) -> Task:
    """Builds model, data and report on this rank, after ``torch.distributed`` was initialised, or without it.

    Collective: with ``model.pretrained`` the ranks agree on whether the files are there.

    Args:
        model (ModelConfig): What to train.
        data (DataConfig): What to train on.

    Returns:
        Task: Weights and data are the same on every rank; each rank's dataloaders give its share.

    Raises:
        ConfigError: On every rank, with all problems of the data at once, or when the pretrained files are missing.
    """
    words = read_words(keep_stress=data.keep_stress)
    splits = split_words(
        words, seed=data.seed, validation_fraction=data.validation_fraction, test_fraction=data.test_fraction
    )
    samples = training_samples(splits.train[: data.max_words])
    validation, test = splits.validation[: data.eval_max_words], splits.test[: data.eval_max_words]
    if problems := [
        *batch_size_problems(data.global_batch_size),
        *split_problems('train', len(samples), 'raise data.max_words or lower the fractions of the held-out splits'),
        *split_problems('validation', len(validation), 'raise data.eval_max_words or data.validation_fraction'),
        *split_problems('test', len(test), 'raise data.eval_max_words or data.test_fraction'),
    ]:
        raise ConfigError(problems)

    network, tokenizer = _network_and_tokenizer(model, keep_stress=data.keep_stress)
    train_dataloader = build_dataloader(
        samples,
        TrainCollator(tokenizer),
        batch_size=data.global_batch_size // dist.get_world_size(),
        shuffle_seed=data.shuffle_seed,
        num_workers=data.num_workers,
        count_tokens=count_tokens,
    )
    collate, batch_size = EvalCollator(tokenizer), data.eval_batch_size
    evaluators = [
        Evaluator(label='validation', dataloader=build_dataloader(validation, collate, batch_size=batch_size)),
        Evaluator(
            label='test',
            dataloader=build_dataloader(test, collate, batch_size=batch_size),
            eval_interval=_after_training,
        ),
    ]
    return Task(
        model=G2PModel(network, tokenizer, model.max_new_tokens or _longest_target(words, tokenizer)),
        train_dataloader=train_dataloader,
        eval_dataloader=evaluators,
        callbacks=[G2PReport('test', split_size=len(splits.test))],
    )


def _network_and_tokenizer(model: ModelConfig, *, keep_stress: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads pretrained weights, or draws random ones without touching the global random state."""
    if model.pretrained is not None:
        written = model.model_dump(include={'dropout_rate'}, exclude_unset=True)
        loaded = load_pretrained(
            MT5ForConditionalGeneration,
            model.pretrained,
            alternative='leave model.pretrained out to train the small model from random weights',
            **written,
        )
        ignored = [f'model.{name}' for name in sorted(_SIZES & model.model_fields_set)]
        if ignored and dist.get_global_rank() == 0:
            log.warning(f'The weights of {model.pretrained} bring their own sizes: {", ".join(ignored)} not used.')
        return loaded
    tokenizer = g2p_tokenizer(phonemes(keep_stress=keep_stress))
    config = MT5Config(vocab_size=len(tokenizer), **model.model_dump(include={*_SIZES - {'seed'}, 'dropout_rate'}))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(model.seed)  # the CPU's alone: torch.manual_seed would reset the GPUs', too
        network = MT5ForConditionalGeneration(config)
    # transformers 5 ties the output layer to the embeddings, which it draws with a deviation of 1: logits would start
    # with one of sqrt(d_model). Measured on the default model: after 600 optimizer steps PER 0.58 instead of 0.15.
    network.shared.weight.data.mul_(model.d_model**-0.5)
    return network, tokenizer


def _longest_target(words: list[Word], tokenizer: PreTrainedTokenizerBase) -> int:
    """Counts the tokens of the longest pronunciation, the end token included."""
    pronunciations = (pronunciation for word in words for pronunciation in word.pronunciations)
    return len(tokenizer(max(pronunciations, key=len))['input_ids'])


def _after_training(state: State, event: Event) -> bool:
    """Says when to evaluate the test words: once, when ``fit`` has made its last optimizer step."""
    return event == Event.FIT_END
