"""Fine-tuning a Hugging Face causal language model from a folder, all of it or LoRA, judged by what it generates.

Any model that ``AutoModelForCausalLM`` loads, with its own tokenizer. The default data are words with their
pronunciations (``cat = `` is to be answered by ``K AE T``); ``data.path`` takes prompts and responses of your own.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

from composer.core import Evaluator
from composer.utils import dist
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt
from transformers import AutoModelForCausalLM

from composer_ds.errors import ConfigError
from recipes.answering_model import AnsweringModel
from recipes.dataloaders import batch_size_problems, build_dataloader, split_problems
from recipes.pretrained import load_pretrained
from recipes.prompts import PromptCollator, count_tokens, read_prompts
from recipes.task import Task

__all__ = ['DataConfig', 'LoraConfig', 'ModelConfig', 'build']


class LoraConfig(BaseModel, extra='forbid'):
    """The section ``model.lora``: arguments of ``peft.LoraConfig``.

    Args:
        r (int): Rank of the matrices that are trained.
        lora_alpha (int): Their product is multiplied by ``lora_alpha / r``.
        lora_dropout (float): Dropout before them, in training.
        target_modules (list[str] | str): Names of the linear layers they are added to, or ``'all-linear'``.
    """

    r: PositiveInt = 8
    lora_alpha: PositiveInt = 16
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: list[str] | str = 'all-linear'


class ModelConfig(BaseModel, extra='forbid'):
    """The section ``model`` of the YAML.

    Args:
        pretrained (str): A folder with weights, configuration and tokenizer, or a repository of the hub.
        lora (LoraConfig | None): Train small matrices beside the weights, which stay as they are; ``None`` trains all.
        max_new_tokens (int): Where generation stops at the latest.
    """

    pretrained: str
    lora: LoraConfig | None = None
    max_new_tokens: PositiveInt = 64


class DataConfig(BaseModel, extra='forbid'):
    """The section ``data`` of the YAML.

    Args:
        path (str | None): A file of JSON lines with ``prompt`` and ``response``; ``None`` takes words with their
            pronunciations.
        global_batch_size (int): Samples per optimizer step over all ranks.
        eval_batch_size (int): Prompts per evaluation batch of each rank.
        validation_fraction (float): Share of the samples that are not trained on.
        max_samples (int | None): Use so many samples only, for both splits; ``None`` takes all.
        eval_max_samples (int | None): Evaluate on so many samples of the validation split only; ``None`` takes all.
        num_workers (int): Worker processes that each rank loads with; 0 loads in the training process.
        seed (int): Seed of the split.
        shuffle_seed (int): Seed of the order of the samples, a new one each epoch.
    """

    path: str | None = None
    global_batch_size: PositiveInt = 64
    eval_batch_size: PositiveInt = 64
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_samples: PositiveInt | None = None
    eval_max_samples: PositiveInt | None = 256
    num_workers: NonNegativeInt = 0
    seed: int = 17
    shuffle_seed: int = 17


def build(model: ModelConfig, data: DataConfig) -> Task:
    """Builds model and data on this rank.

    Collective: the ranks agree on whether the pretrained files are there.

    Args:
        model (ModelConfig): What to train.
        data (DataConfig): What to train on.

    Returns:
        Task: Weights and data are the same on every rank; each rank's dataloaders give its share.

    Raises:
        ConfigError: On every rank, with all problems of the data at once, or when the pretrained files are missing.
    """
    prompts = read_prompts(data.path)
    random.Random(data.seed).shuffle(prompts)
    prompts = prompts[: data.max_samples]
    held_out = round(data.validation_fraction * len(prompts))
    validation, train = prompts[:held_out][: data.eval_max_samples], prompts[held_out:]
    if problems := [
        *batch_size_problems(data.global_batch_size),
        *split_problems('train', len(train), 'give more samples or lower data.validation_fraction'),
        *split_problems('validation', len(validation), 'give more samples or raise data.validation_fraction'),
    ]:
        raise ConfigError(problems)
    network, tokenizer = load_pretrained(AutoModelForCausalLM, model.pretrained)
    return Task(
        model=AnsweringModel(network, tokenizer, model.max_new_tokens, peft_config=_peft_config(model.lora)),
        train_dataloader=build_dataloader(
            train,
            PromptCollator(tokenizer, with_responses=True),
            batch_size=data.global_batch_size // dist.get_world_size(),
            shuffle_seed=data.shuffle_seed,
            num_workers=data.num_workers,
            count_tokens=count_tokens,
        ),
        eval_dataloader=[
            Evaluator(
                label='validation',
                dataloader=build_dataloader(
                    validation, PromptCollator(tokenizer, with_responses=False), batch_size=data.eval_batch_size
                ),
            )
        ],
    )


def _peft_config(lora: LoraConfig | None) -> Any:
    if lora is None:
        return None
    try:
        from peft import LoraConfig as PeftLoraConfig
    except ImportError as error:
        raise ConfigError('model.lora needs the package peft, which is not installed: pip install peft') from error
    return PeftLoraConfig(task_type='CAUSAL_LM', **lora.model_dump())
