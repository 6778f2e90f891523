"""What the model's forward returned, made visible to DeepSpeed.

DeepSpeed prepares each backward pass in hooks on the tensors that forward returned, and looks for them in tensors,
tuples, lists and dicts only. A tensor in any other object is not seen: training then fails deep inside, or is
silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from composer_ds.errors import ModelOutputError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

__all__ = ['make_outputs_visible']

_NO_TENSORS_INSIDE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def make_outputs_visible(outputs: Any, ds_engine: DeepSpeedEngine, model: torch.nn.Module) -> None:
    """See to it that DeepSpeed notices the backward pass of these outputs.

    Called after every forward pass that records gradients. Costs a walk over the outputs' containers.

    Args:
        outputs (Any): What forward returned: tensors, tuples, lists and dicts, which DeepSpeed sees by itself, or
            objects with attributes (a dataclass), which this function shows to it.
        ds_engine (DeepSpeedEngine): The engine that ran the forward pass.
        model (torch.nn.Module): Named in the error.

    Raises:
        ModelOutputError: When no tensor with a gradient is found in the outputs, and so none could be shown.
    """
    opaque = list(_opaque_objects(outputs))
    visible = list(_gradient_tensors(outputs, into_objects=False, visited=set()))
    tensors = list(_gradient_tensors(outputs, into_objects=True, visited=set())) if opaque else visible
    if not tensors and model.training and any(parameter.requires_grad for parameter in model.parameters()):
        kind = type(opaque[0] if opaque else outputs)
        raise ModelOutputError(
            f'{type(model).__name__}.forward returned {kind.__module__}.{kind.__qualname__}, in which no tensor with a '
            'gradient can be found, so DeepSpeed could not follow its backward pass. Return tensors, or a tuple, list, '
            'dict or dataclass of tensors, that depend on the trained parameters.'
        )
    if len(tensors) > len(visible):
        _show(tensors, visible, ds_engine)


def _show(tensors: list[torch.Tensor], visible: list[torch.Tensor], ds_engine: DeepSpeedEngine) -> None:
    # Private to deepspeed 0.19.8, as used by DeepSpeedEngine.forward. One manager for all tensors: it runs
    # the engine's prologue once, at the first gradient that arrives.
    from deepspeed.runtime.utils import register_output_backward_hooks

    for tensor in visible:
        for manager in getattr(tensor, '_backward_hook_managers', ()):
            manager.remove_hooks()
    register_output_backward_hooks(
        tensors,
        preprocess_once_fn=ds_engine._backward_prologue,
        preprocess_per_tensor_fn=ds_engine._backward_prologue_per_tensor,
    )


def _opaque_objects(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor | tuple | list | dict):
        if not isinstance(value, torch.Tensor):
            for part in value.values() if isinstance(value, dict) else value:
                yield from _opaque_objects(part)
    elif not isinstance(value, _NO_TENSORS_INSIDE):
        yield value


def _gradient_tensors(value: Any, into_objects: bool, visited: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in visited or isinstance(value, _NO_TENSORS_INSIDE):
        return
    visited.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value
        return
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, tuple | list):
        parts = list(value)
    elif into_objects and not isinstance(value, torch.nn.Module):
        slots = [slot for cls in type(value).__mro__ for slot in getattr(cls, '__slots__', ())]
        parts = [*getattr(value, '__dict__', {}).values(), *(getattr(value, slot, None) for slot in slots)]
    else:
        return
    for part in parts:
        yield from _gradient_tensors(part, into_objects, visited)
