"""How many elements a model's parameters have, and how much state its optimizer keeps for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ['GroupSizes', 'ModelSizes', 'sizes_of', 'state_bytes_per_element']


@dataclass(frozen=True)
class GroupSizes:
    """The trained parameters of one parameter group of the optimizer.

    Args:
        numels (tuple[int, ...]): Elements of each parameter, in the optimizer's order.
        state_bytes_per_element (int): What the optimizer keeps for each element: 8 for Adam's two fp32 moments.
    """

    numels: tuple[int, ...]
    state_bytes_per_element: int


@dataclass(frozen=True)
class ModelSizes:
    """All that is known about a model here.

    Args:
        groups (tuple[GroupSizes, ...]): The trained parameters.
        frozen_numels (tuple[int, ...]): Elements of each parameter that is not trained.
        buffer_bytes (int): Of the model's buffers.
    """

    groups: tuple[GroupSizes, ...]
    frozen_numels: tuple[int, ...] = ()
    buffer_bytes: int = 0

    @property
    def trained_numels(self) -> tuple[int, ...]:
        """Elements of each trained parameter."""
        return tuple(numel for group in self.groups for numel in group.numels)

    @property
    def trained(self) -> int:
        """Elements of all trained parameters."""
        return sum(self.trained_numels)

    @property
    def frozen(self) -> int:
        """Elements of all parameters that are not trained."""
        return sum(self.frozen_numels)


def sizes_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ModelSizes:
    """Read the sizes of a model, which may be on the meta device, before ZeRO has cut its parameters.

    Args:
        model (torch.nn.Module): The model.
        optimizer (torch.optim.Optimizer): Its optimizer.

    Returns:
        ModelSizes: Shared parameters and buffers are counted once.
    """
    groups = []
    for group in optimizer.param_groups:
        numels = tuple(parameter.numel() for parameter in group['params'] if parameter.requires_grad)
        if numels:
            groups.append(GroupSizes(numels, state_bytes_per_element(optimizer, group)))
    held = {id(parameter) for group in optimizer.param_groups for parameter in group['params']}
    not_trained = [one for one in model.parameters() if not one.requires_grad or id(one) not in held]
    return ModelSizes(
        tuple(groups),
        tuple(parameter.numel() for parameter in not_trained),
        sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    )


def state_bytes_per_element(optimizer: torch.optim.Optimizer, group: dict) -> int:
    """Find out what an optimizer keeps for each element: let the algorithm update a parameter of a few elements.

    Args:
        optimizer (torch.optim.Optimizer): The optimizer, which is left alone.
        group (dict): The parameter group whose settings count.

    Returns:
        int: Bytes for each element, with fp32 master weights.
    """
    import torch

    probe = torch.nn.Parameter(torch.ones(8))
    probe.grad = torch.ones(8)
    # A copy of the object with one group of its own: classes differ in what their constructors ask for.
    copy = object.__new__(type(optimizer))
    copy.__dict__.update({key: value for key, value in vars(optimizer).items() if key != 'step'})
    copy.state = type(optimizer.state)(dict)
    copy.param_groups = [{**group, 'params': [probe]}]
    copy.step()
    values = copy.state[probe].values()
    return sum(value.element_size() for value in values if torch.is_tensor(value) and value.shape == probe.shape)
