"""Parameters without elements under ZeRO 3: DeepSpeed (0.19) fails when it gathers one, so it never sees them.

While the engine lives they are ordinary attributes of their modules, which find them as ever. There is nothing to train
in them; the faces list them, so that checkpoints hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from composer_ds.partitions import full_numel
from composer_ds.whole import is_waiting, whole_again

__all__ = ['EmptyParameters']


class EmptyParameters:
    """The parameters of a model that have no elements.

    Collective: those that ``partitioned_init`` has cut become ordinary parameters again.

    Args:
        model (torch.nn.Module): The user's model.
        zero_stage (int): Below 3 nothing is hidden.
    """

    def __init__(self, model: torch.nn.Module, zero_stage: int):
        names = {id(parameter): name for name, parameter in model.named_parameters() if full_numel(parameter) == 0}
        self.named: dict[str, torch.nn.Parameter] = {}
        """By name, what is hidden; tied ones once."""
        self._places: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        if zero_stage == 3:
            for module in model.modules():
                for key, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) in names:
                        self.named[names[id(parameter)]] = parameter
                        self._places.append((module, key, parameter))
        for parameter in self.named.values():
            if is_waiting(parameter):
                whole_again(parameter)

    def hide(self) -> None:
        """Take them out of what ``model.parameters()`` lists. Called on every rank, before the engine is built."""
        for module, key, parameter in self._places:
            del module._parameters[key]
            vars(module)[key] = parameter

    def show(self) -> None:
        """Put them back. Called on every rank, when the engine is taken down."""
        for module, key, parameter in self._places:
            vars(module).pop(key, None)
            module._parameters[key] = parameter

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put them back while a state dict is made or loaded; no forward pass may run inside."""
        hidden = [(module, key) for module, key, _ in self._places if key in vars(module)]
        self.show()
        try:
            yield
        finally:
            if hidden:  # after the engine was taken down they stay
                self.hide()
