"""A batch with an infinite target on one rank, in every dtype. Runs inside rank processes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from composer_ds import DeepSpeed
from tests.distributed.bf16_cases import _model, by_hand, half_trainer
from tests.distributed.fp16_cases import fp16_on_this_cpu
from tests.distributed.parity_cases import STRATEGIES, weights_of

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


def train_past_an_infinite_batch(dtype: str, strategy: str) -> dict[str, float]:
    """Compare with training by hand that leaves the spoilt batch out, once in each of two epochs."""
    # A fixed loss scale: what is tested here is that a skipped optimizer step leaves nothing behind.
    section: dict[str, Any] = {} if dtype == 'fp32' else {dtype: {'enabled': True}}
    if dtype == 'fp16':
        section['fp16']['loss_scale'] = 256.0
    with fp16_on_this_cpu() if dtype == 'fp16' else contextlib.nullcontext():
        trainer = half_trainer(strategy, section, poisoned=True)
        trainer.fit()
    ours, before = weights_of(trainer), _model().state_dict()
    (algorithm,) = (part for part in trainer.state.algorithms if isinstance(part, DeepSpeed))
    assert algorithm.ds_engine is not None
    skipped = algorithm.ds_engine.skipped_steps
    trainer.close()
    each = [dtype != 'fp32' and STRATEGIES[strategy]['zero_stage'] > 1] * 2
    oracle = by_hand(each, DTYPES[dtype], poisoned=True)
    return {
        'difference': max(float((ours[name] - oracle[name]).abs().max()) for name in oracle),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in oracle),
        'skipped': skipped,
    }
