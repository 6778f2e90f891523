"""The optimizer as Composer sees it: the user's optimizer, whose updates are made by the ``ds_engine``.

The face is an instance of a subclass, made on the spot, of the user's own class, with the same class name: Composer
uses the name as the key in checkpoints and in the names of metrics. Its parameter groups are the user's own list, so
that a scheduler of either drives the learning rate that DeepSpeed applies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from composer.utils import dist

from composer_ds.errors import ComposerDSError, TrainingError
from composer_ds.faces.face import face_class
from composer_ds.loss_scaling import LossScale
from composer_ds.microbatches import EvenMicrobatches
from composer_ds.partitioned_optimizer import PartitionedOptimizer
from composer_ds.partitions import Partitions, full_numel
from composer_ds.windows import Window

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from composer_ds.gradients import GradientTracker

__all__ = ['OptimizerFace', 'optimizer_face']


class OptimizerFace(torch.optim.Optimizer):
    """Mixed into the class of the user's optimizer by :func:`optimizer_face`; never constructed directly."""

    _client: torch.optim.Optimizer
    _ds_engine: DeepSpeedEngine | None
    _partitioned: PartitionedOptimizer
    _partitions: Partitions
    _gradients: GradientTracker
    _even_microbatches: EvenMicrobatches
    _window: Window
    _loss_scale: LossScale
    _after_optimizer_step: Callable[[bool], None]

    def step(self, closure: Callable | None = None, **kwargs: Any) -> Any:  # pyright: ignore
        """Run all microbatches of a batch, then the update when the batch ends a window. Called by Composer per batch.

        Collective.

        Args:
            closure (Callable | None): Composer's: runs forward and backward for every microbatch, returns the loss.
            **kwargs (Any): Passed on to the closure.

        Returns:
            Any: What the closure returned.
        """
        if self._ds_engine is None:
            raise ComposerDSError('This Trainer is closed, and its DeepSpeed engine with it. Build a new Trainer.')
        loss = None
        if closure is not None:
            self._even_microbatches.begin(closure)
            self._window.begin_batch(closure)
            with torch.enable_grad():
                loss = closure(**kwargs)
            self._even_microbatches.finish()
        self._gradients.end_batch()
        if self._window.is_full:
            self.finish_window()
        return loss

    def finish_window(self) -> None:
        """Make the update out of the gradients of all batches since the last. Called after the last of a window.

        Collective.
        """
        assert self._ds_engine is not None
        self._partitioned.without_gradient = self._gradients.without_gradient()
        self._partitioned.pull_settings()
        self._loss_scale.before_optimizer_step()
        with self._window.averaging():
            self._ds_engine.step()
        self._loss_scale.after_optimizer_step()
        applied = bool(self._ds_engine.was_step_applied())
        self._partitioned.push_settings()
        self._gradients.after_optimizer_step(not applied)
        # Read by torch's schedulers, which warn when they move before the optimizer that they hold did.
        self._client._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        self._after_optimizer_step(applied)

    def gradient_norm(self) -> float | None:
        """Return the norm of the last optimizer step's gradient, over all parameters and ranks, before clipping.

        Returns:
            float | None: None where the ds_config switches it off.
        """
        assert self._ds_engine is not None
        norm = self._ds_engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing between optimizer steps: the engine clears the gradients itself, at the end of each.

        Args:
            set_to_none (bool): Has no effect.

        Raises:
            TrainingError: When a batch was broken off after some of its microbatches: ZeRO has already mixed their
                gradients over the ranks, and the next optimizer step would contain them.
        """
        if self._gradients.microbatches_of_batch:
            raise TrainingError(
                f'The last batch was broken off after {self._gradients.microbatches_of_batch} microbatches, whose '
                'gradients DeepSpeed has already reduced and cannot take back. Build a new Trainer and resume from a '
                'checkpoint.'
            )

    @property
    def state(self) -> dict[torch.nn.Parameter, dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name the parameters that have a state; what is in it lives in partitions: see :meth:`state_dict`.

        Never empty: torch would make an optimizer step of its own to fill it.
        """
        return {parameter: {} for parameter in self._partitions.names}

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the whole optimizer state in torch's own layout, as the user's optimizer would have it without ZeRO.

        Collective: every rank calls it and gets all tensors, but while Composer saves a checkpoint: then rank 0 alone
        does, in host memory, and the others get tensors without memory.

        Returns:
            dict[str, Any]: ``{'state': {index: {key: value}}, 'param_groups': [...]}``; tensors of the parameters'
            shapes.
        """
        indices = {parameter: index for index, parameter in enumerate(self._all_parameters())}
        # Composer's LayerFreezing takes parameters out of the groups, and these have no place in torch's layout.
        held = [parameter for parameter in self._partitions.names if parameter in indices]
        layouts = self.layouts()
        names = self._partitions.names
        state = {
            indices[parameter]: self._whole_state(parameter, layouts.get(names[parameter], {})) for parameter in held
        }
        groups = []
        for group in self.param_groups:
            settings = {key: copy.deepcopy(value) for key, value in group.items() if key != 'params'}
            groups.append({**settings, 'params': [indices[parameter] for parameter in group['params']]})
        return {'state': {index: state[index] for index in sorted(state)}, 'param_groups': groups}

    def _all_parameters(self) -> list[torch.nn.Parameter]:
        return list(chain.from_iterable(group['params'] for group in self.param_groups))

    def layouts(self) -> dict[str, dict[str, Any]]:
        """Tell what the state of every parameter consists of, as the first rank that owns a run of it knows.

        Collective.

        Returns:
            dict[str, dict[str, Any]]: By the parameter's name and the state's key: the dtype of a tensor that is
                partitioned, or the value itself, on which the owners agree.
        """
        mine = {
            fragment.name: {
                key: value.dtype if _is_run(key, value) else value
                for key, value in self._partitioned.state_of(fragment).items()
            }
            for fragment in self._partitions.fragments
            if self._partitions.runs[fragment.name][0][0] == dist.get_global_rank()
        }
        return {name: layout for layouts in dist.all_gather_object(mine) for name, layout in layouts.items()}

    def _whole_state(self, parameter: torch.nn.Parameter, layout: dict[str, Any]) -> dict[str, Any]:
        name = self._partitions.names[parameter]
        fragment = self._partitions.fragment(name)
        mine = {} if fragment is None else self._partitioned.state_of(fragment)
        return {
            key: self._partitions.assemble(name, mine.get(key), dtype=value)
            if isinstance(value, torch.dtype)
            else copy.deepcopy(value)
            for key, value in layout.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a whole optimizer state in torch's layout: every rank keeps its own partition of it.

        Args:
            state_dict (dict[str, Any]): As :meth:`state_dict` returns it, or as plain torch does.

        Raises:
            ValueError: When the parameter groups or the sizes of tensors do not fit.
        """
        theirs = [len(group['params']) for group in state_dict['param_groups']]
        ours = [len(group['params']) for group in self.param_groups]
        if theirs != ours:
            raise ValueError(
                f'The checkpoint has parameter groups with {theirs} parameters, this optimizer has {ours}. Build the '
                'optimizer with the same parameter groups, or leave its state out '
                '(load_ignore_keys=["state/optimizers"]).'
            )
        indices = chain.from_iterable(group['params'] for group in state_dict['param_groups'])
        states: dict[str, dict[str, Any]] = {}
        for index, parameter in zip(indices, self._all_parameters(), strict=True):
            fragment = self._partitions.fragment(self._partitions.names.get(parameter, ''))
            saved = state_dict['state'].get(index, {})
            if fragment is not None:
                states[fragment.name] = {
                    key: fragment.cut(value)
                    if _is_run(key, value) and value.numel() == full_numel(parameter)
                    else value
                    for key, value in saved.items()
                }
        self._partitioned.load_states(states)
        for group, saved_group in zip(self.param_groups, state_dict['param_groups'], strict=True):
            group.update({key: copy.deepcopy(value) for key, value in saved_group.items() if key != 'params'})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the engine has partitioned the parameters already.

        Args:
            param_group (dict[str, Any]): Not used.
        """
        raise ComposerDSError(
            'DeepSpeed has partitioned the parameters already, so no parameter group can be added. Give all groups to '
            'the optimizer before you build the Trainer.'
        )

    def __del__(self):
        """Leave resources of the user's optimizer (DeepSpeedCPUAdam frees a C++ object) to the user's object."""


def _is_run(key: str, value: Any) -> bool:
    """Whether a state value has an element for each of the parameter's: 'step' has not, even when it is a tensor."""
    return torch.is_tensor(value) and key != 'step'


def optimizer_face(
    client: torch.optim.Optimizer,
    ds_engine: DeepSpeedEngine,
    partitioned: PartitionedOptimizer,
    gradients: GradientTracker,
    even_microbatches: EvenMicrobatches,
    window: Window,
    loss_scale: LossScale,
    after_optimizer_step: Callable[[bool], None],
) -> OptimizerFace:
    """Make the face of an optimizer. Called at ``BEFORE_LOAD``, on every rank.

    Args:
        client (torch.optim.Optimizer): The user's optimizer.
        ds_engine (DeepSpeedEngine): The engine that makes the updates.
        partitioned (PartitionedOptimizer): The optimizer that the engine steps.
        gradients (GradientTracker): Which parameters got a gradient.
        even_microbatches (EvenMicrobatches): Gives every rank the same number of backward passes.
        window (Window): The batches of an optimizer step.
        loss_scale (LossScale): Of the engine.
        after_optimizer_step (Callable[[bool], None]): Called after each, with whether the update was applied.

    Returns:
        OptimizerFace: An instance of the user's class, too.
    """
    cls = face_class(
        OptimizerFace,
        type(client),
        _client=client,
        _ds_engine=ds_engine,
        _partitioned=partitioned,
        _partitions=partitioned.partitions,
        _gradients=gradients,
        _even_microbatches=even_microbatches,
        _window=window,
        _loss_scale=loss_scale,
        _after_optimizer_step=staticmethod(after_optimizer_step),
        _step_supports_amp_closure=True,  # Composer then also hands its closure over in fp16
    )
    face = object.__new__(cls)
    # All but the state, which is a property here, and the wrapped `step` that a scheduler has left on the user's
    # object.
    vars(face).update({key: value for key, value in vars(client).items() if key not in ('state', 'step')})
    return face
