"""fp16 with DeepSpeed's dynamic loss scaler, driven by Composer's own fp16 path. Runs inside rank processes.

DeepSpeed asks for a CPU with fp16 instructions; torch computes in fp16 on any, more slowly. So that the whole runs
everywhere, the test answers that one question for the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from composer import Callback

from composer_ds import DeepSpeed
from tests.distributed.bf16_cases import _model, by_hand, half_trainer
from tests.distributed.parity_cases import STRATEGIES, weights_of


@contextlib.contextmanager
def fp16_on_this_cpu() -> Iterator[None]:
    """Let DeepSpeed compute in fp16 on a CPU without instructions for it."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


class Scales(Callback):
    """Records the loss scale before each batch, and the weights after it."""

    def __init__(self):
        self.scales: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def batch_start(self, state, logger):
        assert state.scaler is not None
        self.scales.append(state.scaler.get_scale())

    def batch_end(self, state, logger):
        self.weights.append({name: value.clone() for name, value in state.model.state_dict().items()})


def compare_fp16(strategy: str, initial_scale_power: int, growth_window: int = 1000) -> dict[str, Any]:
    """Train from a loss scale; compare with training by hand, overflows included."""
    section = {
        'enabled': True,
        'initial_scale_power': initial_scale_power,
        'hysteresis': 1,
        'loss_scale_window': growth_window,
    }
    before, recorder = _model().state_dict(), Scales()
    with fp16_on_this_cpu():
        trainer = half_trainer(strategy, {'fp16': section}, callbacks=[recorder])
        trainer.fit()
    assert trainer.state.precision.value == 'amp_fp16'
    ours = weights_of(trainer)
    assert {parameter.dtype for parameter in trainer.state.model.parameters()} == {torch.float16}
    (algorithm,) = (part for part in trainer.state.algorithms if isinstance(part, DeepSpeed))
    assert algorithm.ds_engine is not None
    skipped = algorithm.ds_engine.skipped_steps
    trainer.close()

    expected_scales: list[float] = []
    each = STRATEGIES[strategy]['zero_stage'] > 1
    oracle = by_hand(
        [each, each], torch.float16, 2.0**initial_scale_power, expected_scales, growth_window=growth_window
    )
    return {
        'difference': _largest_difference(ours, oracle),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in oracle),
        'moves': [
            _largest_difference(after, earlier)
            for earlier, after in zip([before, *recorder.weights], recorder.weights, strict=False)
        ],
        'scales': recorder.scales,
        'expected_scales': expected_scales,
        'skipped': skipped,
    }


def resume_fp16(first: str, then: str, folder: str) -> dict[str, Any]:
    """Train an epoch under one strategy, save, go on under another; the loss scale overflows in both epochs."""
    section = {'fp16': {'enabled': True, 'initial_scale_power': 17, 'hysteresis': 1}}
    recorders = Scales(), Scales()
    with fp16_on_this_cpu():
        trainer = half_trainer(first, section, callbacks=[recorders[0]], max_duration='1ep', save_folder=folder)
        trainer.fit()
        trainer.close()
        checkpoint = f'{folder}/latest-rank0.pt'
        trainer = half_trainer(then, section, callbacks=[recorders[1]], load_path=checkpoint)
        trainer.fit()
    ours, scaler = weights_of(trainer), trainer.state.scaler
    assert scaler is not None
    torchs = torch.amp.grad_scaler.GradScaler('cpu')
    torchs.load_state_dict(scaler.state_dict())
    trainer.close()
    expected_scales: list[float] = []
    # The stages round the average over the ranks at different places, so each epoch has an oracle of its own.
    each = [STRATEGIES[strategy]['zero_stage'] > 1 for strategy in (first, then)]
    oracle = by_hand(each, torch.float16, 2.0**17, expected_scales)
    return {
        'difference': _largest_difference(ours, oracle),
        'scales': recorders[0].scales + recorders[1].scales,
        'expected_scales': expected_scales,
        'torch_scale': torchs.get_scale(),
    }


def _largest_difference(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((ours[name] - other[name]).abs().max()) for name in ours)
