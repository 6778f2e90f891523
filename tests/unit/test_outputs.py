"""Which outputs of a model DeepSpeed can see, and what is done about the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from composer_ds.errors import ModelOutputError
from composer_ds.faces.outputs import make_outputs_visible

pytest.importorskip('deepspeed')


class RecordingEngine:
    """Stands in for the engine: notes what DeepSpeed's hooks call."""

    def __init__(self):
        self.prologues = 0

    def _backward_prologue(self) -> None:
        self.prologues += 1

    def _backward_prologue_per_tensor(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    more: Any = None


class Slots:
    """Has no ``__dict__``."""

    __slots__ = ('logits',)

    def __init__(self, logits: torch.Tensor):
        self.logits = logits


def run(wrap) -> tuple[RecordingEngine, torch.nn.Module]:
    from deepspeed.runtime.utils import register_output_backward_hooks

    model, engine = torch.nn.Linear(3, 2), RecordingEngine()
    logits = model(torch.ones(1, 3))
    outputs = wrap(logits)
    # As the engine's own forward does.
    register_output_backward_hooks(
        outputs,
        preprocess_once_fn=engine._backward_prologue,
        preprocess_per_tensor_fn=engine._backward_prologue_per_tensor,
    )
    make_outputs_visible(outputs, engine, model)  # pyright: ignore[reportArgumentType]
    logits.square().sum().backward()
    return engine, model


@pytest.mark.parametrize(
    'wrap',
    [
        lambda logits: logits,
        lambda logits: (logits, None, 3),
        lambda logits: {'loss': logits, 'name': 'x'},
        Output,
        Slots,
        lambda logits: {'deep': [Output(logits.detach(), more=(Slots(logits),))]},
        lambda logits: {'seen': logits, 'hidden': Output(logits)},
        lambda logits: {'seen': logits * 2, 'hidden': Output(logits)},
    ],
)
def test_the_prologue_runs_exactly_once(wrap):
    engine, model = run(wrap)
    assert engine.prologues == 1
    torch.testing.assert_close(model.bias.grad, 2 * model(torch.ones(1, 3)).detach()[0])


def test_an_output_without_a_gradient_is_refused_by_name():
    with pytest.raises(ModelOutputError, match=r'Linear.forward returned .*Output'):
        run(lambda logits: Output(logits.detach()))


def test_a_model_that_is_not_trained_may_return_anything():
    model = torch.nn.Linear(3, 2).eval()
    make_outputs_visible(object(), RecordingEngine(), model)  # pyright: ignore[reportArgumentType]
