"""The user's optimizer as DeepSpeed steps it: the same algorithm, over flat partitions.

DeepSpeed hands the optimizer one long vector for each parameter group. That is the same mathematics for element-wise
algorithms, but for one thing: plain torch leaves a parameter without a gradient alone (no weight decay, no momentum, no
step count), and in the middle of a flat vector nothing can be left alone. So when a parameter got no gradient in an
optimizer step, its flat partition is from then on updated fragment by fragment, each with its own state, exactly as
torch does. Where every parameter always has a gradient, the flat vectors are stepped as they are.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from composer_ds.partitions import Fragment, Partitions

__all__ = ['PartitionedOptimizer', 'partitioned_optimizer']


class PartitionedOptimizer(torch.optim.Optimizer):
    """Mixed into the class of the user's optimizer by :func:`partitioned_optimizer`; never constructed directly."""

    group_pairs: list[tuple[dict[str, Any], dict[str, Any]]]
    own_settings: dict[str, Any]
    partitions: Partitions
    without_gradient: set[torch.nn.Parameter]
    split: dict[int, list[tuple[Fragment, torch.Tensor]]]
    observers: list[Callable[[list[Fragment]], AbstractContextManager[None]]]
    """Entered around each update, with the fragments that it updates: gradients in ``flat.grad``, then new weights."""

    def bind(self, partitions: Partitions) -> None:
        """Tell the optimizer what its flat partitions hold. Called once, after DeepSpeed has made them.

        Args:
            partitions (Partitions): The layout.
        """
        self.partitions = partitions

    def pull_settings(self) -> None:
        """Take over lr, weight decay and every other setting from the user's parameter groups."""
        for theirs, ours in self.group_pairs:
            ours.update({key: value for key, value in theirs.items() if key != 'params'} | self.own_settings)

    def push_settings(self) -> None:
        """Hand back what the algorithm wrote into its parameter groups."""
        for theirs, ours in self.group_pairs:
            theirs.update({key: ours[key] for key in theirs if key != 'params' and key not in self.own_settings})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update this rank's partitions. Called by DeepSpeed with the reduced and clipped gradient in ``flat.grad``.

        Args:
            closure (None): DeepSpeed passes none.
        """
        flats = [group['params'] for group in self.param_groups]
        updated = [fragment for group in flats for flat in group for fragment in self.partitions.in_flat(flat)]
        for group in self.param_groups:
            group['params'] = [tensor for flat in group['params'] for tensor in self._tensors_of(flat)]
        try:
            with ExitStack() as stack:
                for observer in self.observers:
                    stack.enter_context(observer(updated))
                super().step()  # the user's own algorithm
        finally:
            for group, flat in zip(self.param_groups, flats, strict=True):
                for tensor in group['params']:
                    if all(tensor is not one for one in flat):
                        tensor.grad = None
                group['params'] = flat

    def _tensors_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        fragments = self.partitions.in_flat(flat)
        if id(flat) not in self.split:
            if all(fragment.parameter not in self.without_gradient for fragment in fragments):
                return [flat]
            self._split(flat, fragments)
        tensors = []
        for fragment, tensor in self.split[id(flat)]:
            gradient = None if fragment.parameter in self.without_gradient else flat.grad
            tensor.grad = None if gradient is None else fragment.of(gradient)
            tensors.append(tensor)
        return tensors

    def _split(self, flat: torch.Tensor, fragments: list[Fragment]) -> None:
        """Give every fragment of a flat partition its own tensor (a view) and its own state (views, copied scalars)."""
        state = self.state.get(flat, {})
        self.split[id(flat)] = []
        for fragment in fragments:
            tensor = fragment.master.requires_grad_(True)
            self.split[id(flat)].append((fragment, tensor))
            if state:
                self.state[tensor] = {key: _fragment_of_state(fragment, value) for key, value in state.items()}

    def state_of(self, fragment: Fragment) -> dict[str, Any]:
        """Return the optimizer state of one fragment.

        Args:
            fragment (Fragment): A fragment of this rank.

        Returns:
            dict[str, Any]: By torch's keys: views of shape ``(numel,)``, and scalars. Empty before the first update.
        """
        for split_fragment, tensor in self.split.get(id(fragment.flat), []):
            if split_fragment is fragment:
                return dict(self.state.get(tensor, {}))
        return {key: _fragment_of_state(fragment, value) for key, value in self.state.get(fragment.flat, {}).items()}

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Replace the state of every fragment.

        Args:
            states (dict[str, dict[str, Any]]): For each parameter name its state: tensors of shape ``(numel,)`` of this
                rank's fragment, or functions that return one, which are called one after the other; and scalars. A
                parameter that is not named has no state, as before its first update.
        """
        self.state.clear()
        self.split.clear()
        flats = {id(fragment.flat): fragment.flat for fragment in self.partitions.fragments}
        for flat in flats.values():
            fragments = self.partitions.in_flat(flat)
            loaded = [states.get(fragment.name, {}) for fragment in fragments]
            if all(_alike(one, loaded[0]) for one in loaded):
                self.state[flat] = _flat_state(flat, fragments, loaded)
                continue
            self._split(flat, fragments)
            for (_, tensor), state in zip(self.split[id(flat)], loaded, strict=True):
                if state:
                    self.state[tensor] = {
                        key: value.to(tensor.device, copy=True) if torch.is_tensor(value) else value
                        for key, value in ((key, _read(value)) for key, value in state.items())
                    }

    def __del__(self):
        """Leave resources of the user's optimizer (DeepSpeedCPUAdam frees a C++ object) to the user's object."""


def partitioned_optimizer(
    client: torch.optim.Optimizer, fused: bool = False, hidden: Collection[torch.nn.Parameter] = ()
) -> PartitionedOptimizer:
    """Make the optimizer that DeepSpeed may rewrite, out of the user's optimizer, which stays as it is.

    Parameter groups without a parameter to train are left out: DeepSpeed fails on them, or drops them and shifts the
    others.

    Args:
        client (torch.optim.Optimizer): The user's optimizer.
        fused (bool): Whether torch's fused kernel is to run it, although the user's groups do not ask for it.
        hidden (Collection[torch.nn.Parameter]): Parameters that DeepSpeed does not see. Default: none.

    Returns:
        PartitionedOptimizer: An instance of a subclass of the user's class with parameter groups of its own.
    """
    cls = type(client)
    ours = object.__new__(type(cls.__name__, (PartitionedOptimizer, cls), {'__module__': __name__}))
    # A scheduler has put a wrapped `step` of the user's object into its __dict__, which must not shadow ours.
    ours.__dict__.update({key: value for key, value in vars(client).items() if key != 'step'})
    ours.without_gradient = set()
    ours.split = {}
    ours.observers = []
    ours.state = defaultdict(dict)
    ours.own_settings = {'fused': True} if fused else {}
    ours.group_pairs = []
    left_out = {id(parameter) for parameter in hidden}
    for group in client.param_groups:
        trained = [p for p in group['params'] if p.requires_grad and id(p) not in left_out]
        if trained:
            ours.group_pairs.append((group, {**group, 'params': trained, **ours.own_settings}))
    ours.param_groups = [group for _, group in ours.group_pairs]
    return ours


def _fragment_of_state(fragment: Fragment, value: Any) -> Any:
    if torch.is_tensor(value) and value.shape == fragment.flat.shape:
        return fragment.of(value)
    return copy.deepcopy(value)


def _alike(state: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two fragments' states can share one flat state: the same keys, equal scalars."""
    if state.keys() != other.keys():
        return False
    return all(
        _is_run(value) == _is_run(other[key]) and (_is_run(value) or bool(value == other[key]))
        for key, value in state.items()
    )


def _is_run(value: Any) -> bool:
    return callable(value) or (torch.is_tensor(value) and value.dim() > 0)


def _read(value: Any) -> Any:
    return value() if callable(value) else value


def _flat_state(flat: torch.Tensor, fragments: list[Fragment], states: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, value in states[0].items() if states else ():
        if not _is_run(value):
            merged[key] = copy.deepcopy(value)
            continue
        for fragment, state in zip(fragments, states, strict=True):
            run = _read(state[key])
            if key not in merged:
                merged[key] = torch.zeros_like(flat, dtype=run.dtype, requires_grad=False)
            fragment.of(merged[key]).copy_(run)
    return merged
