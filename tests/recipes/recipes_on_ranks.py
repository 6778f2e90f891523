"""What each rank does in the tests of the recipes on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback, State
from composer.loggers import Logger
from composer.utils import dist
from pydantic import BaseModel

from composer_ds.errors import ConfigError
from composer_ds.launch.arguments import Choice
from composer_ds.launch.build import construction, make_optimizer
from composer_ds.launch.schema import DeepSpeedConfig
from recipes import causal_lm_finetune, gpt, image_classification, resume_anywhere
from recipes.task import Task


class Predictions(Callback):
    """Keeps what the model answered in evaluations."""

    def __init__(self):
        self.texts: list[str] = []

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        self.texts += state.outputs  # pyright: ignore[reportOperatorIssue]  (a list of strings in this model)


def train(
    recipe: Any,
    model: BaseModel,
    data: BaseModel,
    *,
    zero_stage: int | None = None,
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    callbacks: tuple[Callback, ...] = (),
    **trainer: Any,
) -> dict[str, Any]:
    """Trains as ``run.py`` does; ``None`` as the stage is plain Composer."""
    torch.manual_seed(17)
    deepspeed = None if zero_stage is None else DeepSpeedConfig(zero_stage=zero_stage)  # type: ignore[arg-type]
    algorithms: list[Algorithm] = []
    if zero_stage is not None:
        from composer_ds import DeepSpeed

        algorithms = [DeepSpeed(zero_stage=zero_stage)]
    with construction(model, deepspeed, 'cpu'):
        task: Task = recipe.build(model, data)
        elements_inside = sum(parameter.numel() for parameter in task.model.parameters())
        made = make_optimizer(Choice('optimizer', optimizer[0], optimizer[1]), task.model)
    elements_outside = sum(parameter.numel() for parameter in task.model.parameters())
    fitted = Trainer(
        model=task.model,
        optimizers=made,
        train_dataloader=task.train_dataloader,
        eval_dataloader=task.eval_dataloader,
        algorithms=[*task.algorithms, *algorithms],
        callbacks=[*task.callbacks, *callbacks],
        device='cpu',
        progress_bar=False,
        seed=17,
        **trainer,
    )
    fitted.fit()
    result = {
        'weights': {name: tensor.cpu().clone() for name, tensor in fitted.state.get_model_state_dict().items()},
        'metrics': {
            name: float(metric.compute()) for one in fitted.state.eval_metrics.values() for name, metric in one.items()
        },
        'group sizes': [len(group['params']) for group in made.param_groups],
        'elements inside, outside': (elements_inside, elements_outside),
    }
    fitted.close()
    return result


def classify_images(zero_stage: int | None) -> dict[str, Any]:
    return train(
        image_classification,
        image_classification.ModelConfig(width=8),
        image_classification.DataConfig(),
        zero_stage=zero_stage,
        optimizer=(torch.optim.SGD, {'lr': 0.1, 'momentum': 0.9}),
        max_duration='8ep',
        eval_interval='8ep',
    )


TINY_GPT: dict[str, Any] = {'d_model': 16, 'd_ff': 24, 'num_layers': 2, 'num_heads': 2}


def train_gpt_from_stream(stream: str, zero_stage: int | None, **trainer: Any) -> dict[str, Any]:
    """As below, with batches that streaming reads."""
    return train(
        gpt,
        gpt.ModelConfig(**TINY_GPT),
        gpt.DataConfig(stream=stream, sequence_length=64, global_batch_size=12, eval_batch_size=12),
        zero_stage=zero_stage,
        optimizer=(torch.optim.SGD, {'lr': 0.5, 'momentum': 0.9}),
        accumulate_train_batch_on_tokens=True,
        **trainer,
    )


def train_gpt(zero_stage: int | None, *, partitioned_init: bool = False, **trainer: Any) -> dict[str, Any]:
    """Five optimizer steps of 12 sequences; the packing puts those with few labels last."""
    return train(
        gpt,
        gpt.ModelConfig(**TINY_GPT, partitioned_init=partitioned_init),
        gpt.DataConfig(sequence_length=64, global_batch_size=12, eval_batch_size=12, max_paragraphs=150),
        zero_stage=zero_stage,
        optimizer=(torch.optim.SGD, {'lr': 0.5, 'momentum': 0.9, 'no_decay_on_norms_and_biases': True}),
        max_duration='5ba',
        eval_interval='5ba',
        accumulate_train_batch_on_tokens=True,
        **trainer,
    )


def finetune(folder: str, export: str, zero_stage: int | None, *, lora: bool) -> dict[str, Any]:
    """Six optimizer steps of 8 words, then a response to each of 11 words: odd, so that a rank pads."""
    from composer_ds import ConsolidatedWeightsSaver

    path = Path(export)
    predictions = Predictions()
    saver = ConsolidatedWeightsSaver(folder=str(path.parent), filename=path.name, interval='1dur')
    result = train(
        causal_lm_finetune,
        causal_lm_finetune.ModelConfig(
            pretrained=folder, max_new_tokens=12, lora=causal_lm_finetune.LoraConfig(r=2) if lora else None
        ),
        causal_lm_finetune.DataConfig(max_samples=220, global_batch_size=8, eval_batch_size=4),
        zero_stage=zero_stage,
        # With 0.5 the weights of LoRA would explode.
        optimizer=(torch.optim.SGD, {'lr': 0.05 if lora else 0.5, 'momentum': 0.9}),
        callbacks=(predictions, saver),
        max_duration='6ba',
        eval_interval='6ba',
        device_train_microbatch_size=3,
        accumulate_train_batch_on_tokens=True,
    )
    return {**result, 'predictions': predictions.texts}


def problems_of_finetune(pretrained: str, path: str) -> list[str]:
    try:
        causal_lm_finetune.build(
            causal_lm_finetune.ModelConfig(pretrained=pretrained), causal_lm_finetune.DataConfig(path=path)
        )
    except ConfigError as error:
        return error.problems
    return []


def resume(folder: str) -> float:
    return resume_anywhere.main(Path(folder))


def run_yaml(file: str, *overrides: str) -> None:
    """Runs a YAML as ``run.py`` does."""
    from composer_ds.launch.check import check
    from composer_ds.launch.config_file import read
    from composer_ds.launch.job import run_job

    assert dist.get_world_size() == 1  # run_job ends the process group, which ranks share between tests
    run_job(check(read(file, list(overrides))))
