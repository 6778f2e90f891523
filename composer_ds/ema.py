"""Composer's ``EMA`` (the moving average of the weights) over ZeRO's partitions.

The average is element-wise, so every rank averages the fp32 master weights that it owns: the average is partitioned
like the optimizer's state, lies where the master weights lie, and nothing is communicated for an update. Only a swap
(evaluation, a checkpoint) gathers the weights that the model computes with, as an optimizer step does.

At ``BEFORE_LOAD`` the user's object in ``state.algorithms`` is replaced by a face: an instance of a subclass of its
class that shares its ``__dict__``, so that its settings, its class's name in checkpoints and what the user asks of the
own object afterwards stay true.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from composer.algorithms import EMA
from composer.algorithms.ema.ema import EMAParameters
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist

from composer_ds.faces.face import face_class
from composer_ds.partitions import Partitions
from composer_ds.whole import make_whole

__all__ = ['partition_averages']


class PartitionedParameters(EMAParameters):
    """The average: this rank's runs of the trained parameters, and all buffers.

    Args:
        partitions (Partitions): The layout.
        model (torch.nn.Module): The model; the average starts from its weights.
    """

    def __init__(self, partitions: Partitions, model: torch.nn.Module):
        self.partitions = partitions
        self.engine_lives = True
        # A parameter of which other ranks own everything has an empty run here.
        self.named_parameters_dict = {
            name: torch.empty(0, device=partitions.ds_engine.device)
            if (fragment := partitions.fragment(name)) is None
            else fragment.master.clone()
            for parameter, name in partitions.names.items()
            if parameter.requires_grad
        }
        self.named_buffers_dict = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def update(self, model: torch.nn.Module, smoothing: float) -> None:
        """Move the average towards the weights. Called at ``BATCH_END`` or ``EPOCH_END``, on every rank.

        Args:
            model (torch.nn.Module): The model, for its buffers.
            smoothing (float): The weight of what was; between 0 and 1.
        """
        # In the order of Composer's own compute_ema, to the last digit.
        for average, weights in itertools.chain(self._runs(), self._buffers(model)):
            average.copy_(average * smoothing + weights * (1.0 - smoothing))

    @torch.no_grad()
    def swap_params(self, model: torch.nn.Module) -> None:
        """Exchange the average and the weights of the model, exactly.

        Collective: the weights that the model computes with are gathered.

        Args:
            model (torch.nn.Module): The model.
        """
        with self.partitions.writing_masters():
            for average, weights in itertools.chain(self._runs(), self._buffers(model)):
                before = weights.clone()
                weights.copy_(average)
                average.copy_(before)

    @torch.no_grad()
    def transfer_ema_params(self, model: torch.nn.Module) -> None:
        """Write the average into a model: the one that is trained, or any other with the same names.

        Collective: every rank calls it. A model that a closed Trainer with ZeRO 3 has left cut over the ranks is put
        together first.

        Args:
            model (torch.nn.Module): The model.
        """
        parameters = dict(model.named_parameters())
        if self.engine_lives and any(parameter in self.partitions.names for parameter in parameters.values()):
            # The weights of the engine: the next optimizer step would undo what is not in its master weights.
            with self.partitions.writing_masters():
                for average, weights in self._runs():
                    weights.copy_(average)
        else:
            make_whole(model)
            for name, average in self.whole_parameters():
                if name in parameters:
                    parameters[name].copy_(average)
        for average, buffer in self._buffers(model):
            buffer.copy_(average)

    def move_params_to_device(self, destination_model: torch.nn.Module) -> None:
        """Do nothing: the average lies where the master weights lie.

        Args:
            destination_model (torch.nn.Module): Not used.
        """

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Put the averages of the parameters together, one after the other.

        Collective: every rank takes all of them.

        Yields:
            tuple[str, torch.Tensor]: The user's name, and fp32 of the parameter's full shape.
        """
        for name in self.partitions.names.values():
            if name in self.named_parameters_dict:
                mine = self.named_parameters_dict[name]
                yield name, self.partitions.assemble(name, mine)

    def load(self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        """Take whole averages: every rank keeps its own runs.

        Args:
            parameters (dict[str, torch.Tensor]): By the user's names.
            buffers (dict[str, torch.Tensor]): By the user's names.
        """
        for fragment in self.partitions.fragments:
            if fragment.name in self.named_parameters_dict and fragment.name in parameters:
                self.named_parameters_dict[fragment.name].copy_(fragment.cut(parameters[fragment.name]))
        for name in self.named_buffers_dict.keys() & buffers.keys():
            self.named_buffers_dict[name].copy_(buffers[name])

    def _runs(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for fragment in self.partitions.fragments:
            if fragment.name in self.named_parameters_dict:
                yield self.named_parameters_dict[fragment.name], fragment.master

    def _buffers(self, model: torch.nn.Module) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for name, buffer in model.named_buffers():
            if name in self.named_buffers_dict:
                yield self.named_buffers_dict[name], buffer


class PartitionedEMA(EMA):
    """Mixed into the class of the user's ``EMA`` by :func:`partition_averages`; never constructed directly."""

    _partitions: Partitions

    def match(self, event: Event, state: State) -> bool:
        """Start the average when its time has come, as ``EMA`` does, and say which events to act on.

        Args:
            event (Event): The event.
            state (State): Composer's state.

        Returns:
            bool: Whether :meth:`apply` is to be called.
        """
        if event == self.update_event and not self.ema_started and self._should_start(state):
            self.ema_model = PartitionedParameters(self._partitions, state.model)
            self.ema_started = True
        return super().match(event, state)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the average; all other events are left to ``EMA``. Collective: Composer calls it on every rank.

        Args:
            event (Event): The event.
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        if event == self.update_event:
            assert isinstance(self.ema_model, PartitionedParameters) and isinstance(self.smoothing, float)
            self.ema_model.update(state.model, self.smoothing)
        else:
            super().apply(event, state, logger)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole average in Composer's own layout.

        Collective: every rank calls it and gets all tensors.

        Returns:
            dict[str, Any]: As plain Composer's ``EMA`` on as many ranks returns it.
        """
        state = super().state_dict()
        assert isinstance(self.ema_model, PartitionedParameters)
        prefix = self._prefix()
        state['ema_model'] = {
            'named_parameters_dict': {prefix + name: whole for name, whole in self.ema_model.whole_parameters()},
            'named_buffers_dict': {
                prefix + name: average.clone() for name, average in self.ema_model.named_buffers_dict.items()
            },
        }
        return state

    def _prefix(self) -> str:
        # Once started, Composer's EMA (0.32) takes the names from the model in its DistributedDataParallel, and does
        # not know its own checkpoint under other names. tests/distributed/test_ema.py exchanges checkpoints.
        return 'module.' if self.ema_started and dist.get_world_size() > 1 else ''

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Take a whole average in Composer's layout: every rank keeps its own runs.

        Args:
            state (dict[str, Any]): As :meth:`state_dict` returns it, or as plain Composer's ``EMA`` does on any number
                of ranks.
            strict (bool): Has no effect, as in ``EMA``.
        """
        assert isinstance(self.ema_model, PartitionedParameters)
        state = self.ensure_compatible_state_dict(state)
        parameters, buffers = (
            {name.removeprefix('module.'): average for name, average in state['ema_model'][kind].items()}
            for kind in ('named_parameters_dict', 'named_buffers_dict')
        )
        self.ema_model.load(parameters, buffers)
        self.ema_weights_active = state['ema_weights_active']
        self.ema_started = state['ema_started']


def partition_averages(algorithms: list[Algorithm], partitions: Partitions, model: torch.nn.Module) -> Callable:
    """Let every ``EMA`` average over partitions. Called at ``BEFORE_LOAD``, on every rank, once the engine is built.

    Args:
        algorithms (list[Algorithm]): Composer's ``state.algorithms``; changed in place.
        partitions (Partitions): The layout.
        model (torch.nn.Module): The user's model.

    Returns:
        Callable: To be called without arguments when the engine is taken down.
    """
    faces = []
    for index, algorithm in enumerate(algorithms):
        if isinstance(algorithm, EMA):
            face = object.__new__(face_class(PartitionedEMA, type(algorithm), _partitions=partitions))
            object.__setattr__(face, '__dict__', vars(algorithm))
            # In the place of the whole copy that EMA has made at INIT.
            face.ema_model = PartitionedParameters(partitions, model)
            algorithms[index] = face
            faces.append(face)

    def close() -> None:
        for face in faces:
            cast(PartitionedParameters, face.ema_model).engine_lives = False

    return close
