"""A model under construction of which a bounded part is whole at any time: what ``partitioned_init`` does.

Every parameter is an ordinary one to whoever touches it. The least recently used are cut over the ranks when the whole
ones exceed ``WHOLE_LIMIT_BYTES``, and one that is cut is put together again before any function of torch gets hold of
it. So initialisation by a parent module, tied weights, surgery, ``load_state_dict`` and Hugging Face's
``from_pretrained`` need no code of their own, and have the effect that they have anywhere else.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from composer.utils import dist
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from composer_ds.errors import ComposerDSError
from composer_ds.partitioned_parameters import cut, storage_of, uncut, waiting_behind
from composer_ds.whole import guard, is_waiting

__all__ = ['WHOLE_LIMIT_BYTES', 'Construction']

WHOLE_LIMIT_BYTES = 256 * 2**20
"""So much of the model is whole at a time on each rank, besides what is in use."""

_Tensor: Any = torch.Tensor
# What these say of a parameter that is cut is right already ...
_SAY_NOTHING_OF_VALUES = {
    *(getattr(_Tensor, name).__get__ for name in ('requires_grad', 'dtype', 'layout', 'grad', 'is_leaf', 'is_meta')),
    *(_Tensor.requires_grad.__set__, _Tensor.requires_grad_, _Tensor.is_floating_point, _Tensor.is_complex),
}
# ... and these are asked of a tensor without values that has the shape of the whole.
_ASK_FOR_THE_SHAPE = {
    *(_Tensor.shape.__get__, _Tensor.ndim.__get__, _Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.nelement),
    _Tensor.__len__,
}


class Construction(TorchFunctionMode):
    """Which parameters are whole, and the cutting and putting together.

    Invariant: the ranks make the same calls and hold the same list, so that their collectives meet. It is compared
    before each, since code inside of the context may do otherwise.

    Args:
        zero (Mapping[str, Any]): What parameters are cut with.
    """

    def __init__(self, zero: Mapping[str, Any]):
        super().__init__()
        self.zero = zero
        self.whole: dict[int, torch.nn.Parameter] = {}
        """By id, the least recently used first."""
        self._numbers: dict[int, int] = {}
        """Of those, by id: what the ranks call them among each other."""
        self._count = itertools.count()
        self.modules: dict[int, torch.nn.Module] = {}
        self.children: set[int] = set()
        self.limit_bytes = WHOLE_LIMIT_BYTES
        self._at_work = False
        self._thread = threading.get_ident()

    def parameter_registered(self, module: torch.nn.Module, name: str, parameter: Any) -> None:
        """Take a new parameter. Called by torch before it is put into its module.

        Args:
            module (torch.nn.Module): Its module.
            name (str): Its name there.
            parameter (Any): The parameter, or None.
        """
        with self._working() as ours:
            if ours:
                self.modules.setdefault(id(module), module)
                if parameter is not None:
                    self._take([parameter])
                    self._cut_some(keep={id(parameter)})

    def module_registered(self, module: torch.nn.Module, name: str, submodule: Any) -> None:
        """Take a new submodule, which may be a copy whose parameters nobody has registered. Called by torch.

        Args:
            module (torch.nn.Module): The parent.
            name (str): The submodule's name there.
            submodule (Any): The submodule, or None.
        """
        with self._working() as ours:
            if ours:
                self.modules.setdefault(id(module), module)
                if submodule is not None:
                    self.children.add(id(submodule))
                    for inner in submodule.modules():
                        self.modules.setdefault(id(inner), inner)
                    self._take(submodule.parameters())
                    self._cut_some()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put the parameters among the arguments together, call the function, cut others if too many are whole now."""
        kwargs = kwargs or {}
        with self._working() as ours:
            parameters = (
                list(self._parameters_in((args, kwargs))) if ours and func not in _SAY_NOTHING_OF_VALUES else []
            )
            if not parameters:
                return func(*args, **kwargs)
            if func in _ASK_FOR_THE_SHAPE and is_waiting(parameters[0]):
                return func(torch.empty(parameters[0].ds_shape, device='meta'), *args[1:], **kwargs)
            self._put_together([parameter for parameter in parameters if is_waiting(parameter)])
            for parameter in parameters:
                self.whole[id(parameter)] = self.whole.pop(id(parameter))  # the most recently used now
            result = func(*args, **kwargs)
            self._cut_some(keep={id(parameter) for parameter in parameters})
            return result

    def finish(self, refuse: Callable[..., None]) -> None:
        """Cut all that is whole. Called when the context is left without an error. Collective.

        Args:
            refuse (Callable[..., None]): Called when somebody uses a model that waits for its engine.
        """
        for module in self.modules.values():
            self._take(module.parameters(recurse=False))  # those that were put into its dictionary directly
        with self._working():
            self._cut([parameter for parameter in self.whole.values() if _can_be_cut(parameter)])
        for key, module in self.modules.items():
            if key not in self.children and any(is_waiting(parameter) for parameter in module.parameters()):
                guard(module, refuse)

    @contextmanager
    def _working(self) -> Iterator[bool]:
        """Leave alone what happens inside; answers False where it is inside already, or in another thread."""
        if self._at_work or threading.get_ident() != self._thread:
            yield False
            return
        self._at_work = True
        try:
            yield True
        finally:
            self._at_work = False

    def _parameters_in(self, arguments: Any) -> Iterator[Any]:
        if isinstance(arguments, torch.nn.Parameter):
            self._adopt(arguments)
            if id(arguments) in self.whole or is_waiting(arguments):
                yield arguments
        elif isinstance(arguments, list | tuple | dict):
            for argument in arguments.values() if isinstance(arguments, dict) else arguments:
                yield from self._parameters_in(argument)

    def _adopt(self, parameter: Any) -> None:
        """Let a parameter made of one that was cut have its values, too. At the latest when it is registered."""
        if _has_values(parameter) and not parameter.numel() and not is_waiting(parameter):
            original = waiting_behind(parameter)
            if original is not None:
                self._put_together([original])
                parameter.data = original.data
                self._take([parameter])

    def _take(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if not hasattr(parameter, 'ds_tensor') and id(parameter) not in self.whole:
                self.whole[id(parameter)] = parameter
                self._numbers[id(parameter)] = next(self._count)

    def _put_together(self, parameters: list[Any]) -> None:
        if parameters:
            _compare('put together', [(parameter.ds_id, tuple(parameter.ds_shape)) for parameter in parameters])
            for parameter in {id(parameter): parameter for parameter in parameters}.values():
                uncut(parameter)
            self._take(parameters)

    def _cut_some(self, keep: Collection[int] = ()) -> None:
        whole_bytes = sum(_size_bytes(parameter) for parameter in self.whole.values())
        if whole_bytes <= self.limit_bytes:
            return
        chosen = []
        candidates = [p for key, p in self.whole.items() if key not in keep and _can_be_cut(p)]
        # Not those whose values somebody still holds: a tensor before it became a parameter, weight.data, a view.
        held = [_is_held(parameter) for parameter in candidates]
        everyones = _compare('cut one of', [self._called(parameter) for parameter in candidates], held)
        held_somewhere = [any(flags) for flags in zip(*everyones, strict=True)]
        for parameter, is_held in zip(candidates, held_somewhere, strict=True):
            if not is_held and whole_bytes > WHOLE_LIMIT_BYTES // 2:  # half, so that it need not be done each time
                chosen.append(parameter)
                whole_bytes -= _size_bytes(parameter)
        self._cut(chosen)
        # What is held now may be so for long.
        self.limit_bytes = max(WHOLE_LIMIT_BYTES, whole_bytes + WHOLE_LIMIT_BYTES // 4)

    def _cut(self, parameters: list[torch.nn.Parameter]) -> None:
        if parameters:
            _compare('cut', [self._called(parameter) for parameter in parameters])
            cut(parameters, self.zero)
            for parameter in parameters:
                del self.whole[id(parameter)], self._numbers[id(parameter)]

    def _called(self, parameter: Any) -> tuple[int, tuple[int, ...]]:
        return self._numbers[id(parameter)], tuple(parameter.shape)


def _compare(what: str, parameters: list[tuple[int, tuple[int, ...]]], mine: Any = None) -> list[Any]:
    """See to it that all ranks are at the same place of the model. Collective.

    Args:
        what (str): What this rank is to do.
        parameters (list[tuple[int, tuple[int, ...]]]): With which parameters: number and shape of each.
        mine (Any): What else the others are to know.

    Returns:
        list[Any]: Each rank's own contribution.
    """
    everyone = dist.all_gather_object((what, parameters, mine))
    if any((other, theirs) != (what, parameters) for other, theirs, _ in everyone):
        raise ComposerDSError(
            'The ranks do different things inside of partitioned_init: '
            + '; '.join(
                f'rank {rank} is to {other} {_shapes(theirs)}' for rank, (other, theirs, _) in enumerate(everyone)
            )
            + '. Every rank must build the same model, and what only one does must not touch the weights.'
        )
    return [contribution for _, _, contribution in everyone]


def _shapes(parameters: list[tuple[int, tuple[int, ...]]]) -> str:
    return ', '.join(f'parameter {number} of shape {shape}' for number, shape in parameters)


def _size_bytes(parameter: Any) -> int:
    return parameter.numel() * parameter.element_size() if _has_values(parameter) else 0


def _has_values(parameter: Any) -> bool:
    return not is_lazy(parameter) and not parameter.is_meta


def _can_be_cut(parameter: Any) -> bool:
    """Whether ZeRO can run it; what is left whole is then refused by DeepSpeed(...), under the user's name for it."""
    return _has_values(parameter) and parameter.dim() > 0 and parameter.is_contiguous()


def _is_held(parameter: Any) -> bool:
    return _holders(parameter) > _holders_of_its_own()


def _holders(parameter: Any) -> int:
    # Private to torch (2.7, 2.15); numpy arrays and tensors of autograd count, too. The public ways do not see those.
    return torch._C._storage_Use_Count(storage_of(parameter))  # pyright: ignore


@functools.cache
def _holders_of_its_own() -> int:
    """How often a parameter counts that nobody else holds: once; in newer torch its storage keeps one for Python."""
    return _holders(torch.nn.Parameter(torch.zeros(1)))
