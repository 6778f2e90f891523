"""What each rank does in the tests of the mT5 recipe on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from composer.core import Algorithm
from composer.models import HuggingFaceModel
from composer.utils import dist

from composer_ds.errors import ConfigError
from recipes.mt5 import DataConfig, ModelConfig, build
from tests.recipes.g2p_oracle import greedy_prediction
from tests.recipes.tiny_mt5 import Watch, build_tiny, dataloader_of, model_of, trainer_of

EMBEDDING_SCALE = 2.0


def train_and_evaluate(zero_stage: int | None = None, **trainer: Any) -> dict[str, Any]:
    """Trains for 10 optimizer steps of 16 samples and evaluates 41 words of each split: odd, so that a rank pads.

    Larger embeddings make the little trained model babble at lengths from 0 to the maximum.
    """
    task = build_tiny()
    model_of(task).model.get_parameter('shared.weight').data.mul_(EMBEDDING_SCALE)
    watch = Watch()
    fitted = trainer_of(
        task,
        watch,
        algorithms=_algorithms(zero_stage),
        max_duration='10ba',
        eval_interval='10ba',
        accumulate_train_batch_on_tokens=True,
        **trainer,
    )
    fitted.fit()
    model = fitted.state.model.module if fitted.state.is_model_ddp else fitted.state.model
    assert isinstance(model, torch.nn.Module)
    result = {
        'is_hugging_face_model': isinstance(model, HuggingFaceModel),
        'evaluations': watch.evaluations,
        'predictions': watch.predictions,
        'weights': {name: tensor.clone() for name, tensor in model.state_dict().items()},
        'rates': {
            f'{label}/{name}': float(metric.compute())
            for label, metrics in fitted.state.eval_metrics.items()
            for name, metric in metrics.items()
        },
    }
    fitted.close()
    return result


def generate_to_different_lengths(zero_stage: int | None) -> list[tuple[list[str], list[str]]]:
    """Generates twice: at most 3 tokens on rank 0 and 20 on rank 1, then the other way round.

    Returns what the recipe generates beside what a twin without ZeRO and without ranks predicts.
    """
    task = build_tiny()
    model, twin = model_of(task), model_of(build_tiny())
    for each in (model, twin):
        each.model.get_parameter('shared.weight').data.mul_(2 * EMBEDDING_SCALE)  # runs into the limit
    trainer = trainer_of(task, max_duration='1ba', algorithms=_algorithms(zero_stage))
    batch = next(iter(dataloader_of(task.eval_dataloader[0].dataloader)))
    results = []
    model.eval()
    for limits in ((3, 20), (20, 3)):
        model.max_new_tokens = twin.max_new_tokens = limits[dist.get_global_rank()]
        with torch.no_grad():
            generated = model.eval_forward(batch)
        results.append((generated, [greedy_prediction(twin, spelling) for spelling in batch['spellings']]))
    trainer.close()
    return results


def problems_of(model: dict[str, Any], data: dict[str, Any], endpoint: str) -> list[str]:
    """Builds what cannot be built, without a hub to ask."""
    import huggingface_hub.constants

    huggingface_hub.constants.ENDPOINT = endpoint
    try:
        build(ModelConfig(**model), DataConfig(**data))
    except ConfigError as error:
        return error.problems
    return []


def weights_at_start() -> dict[str, torch.Tensor]:
    """Builds with a random state that differs between ranks."""
    torch.seed()
    return dict(build_tiny().model.state_dict())


def _algorithms(zero_stage: int | None) -> list[Algorithm]:
    if zero_stage is None:
        return []
    from composer_ds import DeepSpeed

    return [DeepSpeed(zero_stage=zero_stage)]
