"""Text generation by Hugging Face models whose weights are cut over the ranks.

A rank whose sequences have all ended stops running the model, and leaves the others waiting for its part of the
weights. ``generate(synced_gpus=True)`` goes on until all ranks have ended. transformers chooses it by itself where it
knows that a model is cut; so it is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ['generating_models', 'tell_transformers']

# Private to transformers (5.24): generate and LayerDrop ask for it, by is_fsdp_managed_module. The other way to tell,
# HfDeepSpeedConfig, would hold for all models of the process. tests/distributed/test_evaluation.py waits for ever, up
# to its time limit, when transformers asks in another way.
_MARK = '_is_fsdp_managed_module'


def generating_models(model: torch.nn.Module) -> list[Any]:
    """List the Hugging Face models in a model that can generate.

    Args:
        model (torch.nn.Module): The user's model: a wrapper around them, or one of them.

    Returns:
        list[Any]: Each a ``transformers.PreTrainedModel``; those inside of an adapter of peft, too.
    """
    return [inner for inner in _hugging_face_models(model) if hasattr(inner, 'generate')]


def tell_transformers(model: torch.nn.Module) -> Callable[[], None]:
    """Mark the Hugging Face models in a model as cut over the ranks. Called at ``BEFORE_LOAD``, under ZeRO 3.

    From then on ``generate`` must be called by all ranks, and equally often, but sequences may end anywhere.

    Args:
        model (torch.nn.Module): The user's model.

    Returns:
        Callable[[], None]: Takes the marks away again.
    """
    # Submodules, too: LayerDrop asks about the encoder, a plain module.
    modules = {module for inner in _hugging_face_models(model) for module in inner.modules()}
    marked = [vars(module) for module in modules if _MARK not in vars(module)]
    for attributes in marked:
        attributes[_MARK] = True

    def take_back() -> None:
        for attributes in marked:
            attributes.pop(_MARK, None)

    return take_back


def _hugging_face_models(model: torch.nn.Module) -> list[Any]:
    transformers = sys.modules.get('transformers.modeling_utils')  # not imported, so there is none
    if transformers is None:
        return []
    return [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
