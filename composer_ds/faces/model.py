"""The model as Composer sees it: the user's model, whose forward passes go through the ``ds_engine``.

The face is an instance of a subclass, made on the spot, of the user's own class, and shares the ``__dict__`` of the
user's object: attributes, names, tree walks and ``isinstance`` hold, and the user's object keeps its class. What
belongs to the face alone is therefore kept on its class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from composer.distributed.dist_strategy import prepare_ddp_module
from torch.nn.modules.module import _IncompatibleKeys

from composer_ds.empty_parameters import EmptyParameters
from composer_ds.errors import ComposerDSError
from composer_ds.faces.face import face_class
from composer_ds.faces.loading import loading_into_partitions
from composer_ds.faces.outputs import make_outputs_visible
from composer_ds.frozen import whole_frozen
from composer_ds.partitions import Partitions

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

__all__ = ['ModelFace', 'model_face']


class ModelFace(torch.nn.Module):
    """Mixed into the class of the user's model by :func:`model_face`; never constructed directly."""

    _user_model: torch.nn.Module
    _ds_engine: DeepSpeedEngine | None
    _partitions: Partitions
    _empty: EmptyParameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model through the engine. Not through ``Module.__call__``: the shared hooks would run twice.

        Collective under ZeRO 3: every rank runs the same number of forward passes.
        """
        if self._ds_engine is None:
            raise ComposerDSError('This Trainer is closed, and its DeepSpeed engine with it. Build a new Trainer.')
        outputs = self._ds_engine(*args, **kwargs)
        if torch.is_grad_enabled():
            make_outputs_visible(outputs, self._ds_engine, self._user_model)
        return outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model through the engine, as a call does: under ZeRO 3 a forward beside it loses gradients."""
        return self(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Iterate over the user's parameters, which are empty tensors under ZeRO 3 outside of a forward pass.

        Args:
            recurse (bool): Whether to go into submodules.

        Returns:
            Iterator[torch.nn.Parameter]: The parameters.
        """
        # Composer (0.32) wraps any model with a trainable parameter in DistributedDataParallel, which would reduce the
        # gradients a second time; it has no public way to say no. So to that one caller, and to nobody else, the model
        # has no parameters. tests/distributed/test_faces.py fails when Composer asks in another way.
        if sys._getframe(1).f_code is prepare_ddp_module.__code__:
            return iter(())
        return super().parameters(recurse)

    def named_parameters(
        self, prefix: str = '', recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the user's parameters, as :meth:`parameters` does, those without elements last.

        Args:
            prefix (str): Put in front of the names.
            recurse (bool): Whether to go into submodules.
            remove_duplicate (bool): Whether to name tied parameters once.

        Yields:
            tuple[str, torch.nn.Parameter]: Name and parameter.
        """
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        for name, parameter in self._empty.named.items() if self._ds_engine is not None else ():
            if recurse or '.' not in name:
                yield f'{prefix}.{name}' if prefix else name, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore
        """Return the whole weights under the user's names: fp32 master weights, whatever ZeRO stage and precision.

        Collective: every rank calls it and gets all tensors, but while Composer saves a checkpoint: then rank 0 alone
        does, in host memory, and the others get tensors without memory. Tied weights are listed under every name.

        Args:
            *args (Any): As in ``torch.nn.Module.state_dict``.
            **kwargs (Any): As in ``torch.nn.Module.state_dict``; ``keep_vars`` has no effect.

        Returns:
            dict[str, Any]: Names to detached tensors.
        """
        kwargs['keep_vars'] = True  # hands out the parameters themselves, by which the partitions know them
        wholes: dict[int, torch.Tensor] = {}
        with self._empty.shown():
            state = self._user_model.state_dict(*args, **kwargs)
            known = {id(tensor) for tensor in (*self._user_model.parameters(), *self._user_model.buffers())}
        for name, value in state.items():
            if torch.is_tensor(value):
                if value.numel() == 0 and id(value) not in known and self._is_cut:
                    raise ComposerDSError(
                        f'{type(self).__name__}.state_dict() computes {name} from the weights, and under ZeRO 3 these '
                        'are empty outside of the forward pass; return the parameters themselves, or use ZeRO 2'
                    )
                if id(value) not in wholes:
                    wholes[id(value)] = self._whole(value)
                state[name] = wholes[id(value)]
        return state

    @property
    def _is_cut(self) -> bool:
        return any(hasattr(parameter, 'ds_id') for parameter in self._user_model.parameters())

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter):
            if tensor in self._partitions.names:
                return self._partitions.whole_master(tensor)
            if hasattr(tensor, 'ds_id'):
                return whole_frozen(tensor, torch.device(self._partitions.ds_engine.device))  # pyright: ignore[reportArgumentType]
        return tensor.detach()

    @torch.no_grad()
    def load_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Take whole weights: every rank keeps its own partition of them, as fp32 master weights.

        Collective: every rank calls it with the same tensors.

        Args:
            state_dict (Mapping[str, Any]): Names to whole tensors.
            strict (bool): Whether missing or unexpected names are an error.
            assign (bool): Has no effect: partitions are always written in place.

        Returns:
            _IncompatibleKeys: Missing and unexpected names.

        Raises:
            RuntimeError: torch's own, for names (when strict) or shapes that do not fit, all at once.
        """
        with loading_into_partitions(self._partitions, self._user_model), self._empty.shown():
            return self._user_model.load_state_dict(state_dict, strict=strict)

    def __eq__(self, other: object) -> bool:
        """Be the same model as the user's object, which hooks (as those of Composer's ActivationMonitor) are given."""
        return other is self or other is self._user_model

    def __hash__(self) -> int:
        """Hash as the user's object, to be found in its place."""
        return hash(self._user_model)

    def __deepcopy__(self, memo: Any):
        """Refuse to be copied or pickled: a copy would share the engine, and train the original."""
        self.__reduce_ex__(4)

    def __reduce_ex__(self, protocol: Any):
        """Refuse to be copied or pickled, as above."""
        raise TypeError(
            f'{type(self).__name__} is run by a DeepSpeed engine and cannot be copied or pickled. '
            'Load state.model.state_dict() into a new instance of your model.'
        )


def model_face(
    model: torch.nn.Module, ds_engine: DeepSpeedEngine, partitions: Partitions, empty: EmptyParameters
) -> ModelFace:
    """Make the face of a model. Called at ``BEFORE_LOAD``, on every rank.

    Args:
        model (torch.nn.Module): The user's model, ``ds_engine.module``.
        ds_engine (DeepSpeedEngine): The engine that runs it.
        partitions (Partitions): Where its trained parameters live.
        empty (EmptyParameters): Its parameters that are hidden from DeepSpeed.

    Returns:
        ModelFace: An instance of the user's class, too.
    """
    cls = face_class(
        ModelFace, type(model), _user_model=model, _ds_engine=ds_engine, _partitions=partitions, _empty=empty
    )
    face = object.__new__(cls)
    object.__setattr__(face, '__dict__', vars(model))
    return face
