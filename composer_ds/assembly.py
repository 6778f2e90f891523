"""What stands between Composer and the ``ds_engine``: all that is built at ``BEFORE_LOAD``, and taken down again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist, ensure_tuple

from composer_ds.autocast import autocast_inside
from composer_ds.checkpoint import save_safely, verify_loads
from composer_ds.clock import Clock
from composer_ds.console import Console
from composer_ds.counts import OptimizerSteps
from composer_ds.ema import partition_averages
from composer_ds.empty_parameters import EmptyParameters
from composer_ds.engine import broadcast_buffers, build_engine, close_engine
from composer_ds.eval_microbatches import EvenEvaluation
from composer_ds.evaluation import surround_evaluation
from composer_ds.faces import ModelFace, OptimizerFace, ScalerFace, model_face, optimizer_face
from composer_ds.generation import tell_transformers
from composer_ds.gradients import GradientTracker
from composer_ds.loss_scaling import LossScale
from composer_ds.microbatches import EvenMicrobatches
from composer_ds.ownership import Plan
from composer_ds.partitioned_construction import is_building
from composer_ds.partitioned_optimizer import partitioned_optimizer
from composer_ds.partitioned_parameters import check_waiting, hand_over, restore_runs
from composer_ds.partitions import Partitions
from composer_ds.trainer_facts import parameters_of
from composer_ds.whole import is_left_partitioned, leave_partitioned, make_whole
from composer_ds.windows import Window

__all__ = ['Assembly', 'assemble']


@dataclass
class Assembly:
    """The engine and what belongs to it, while a Trainer is open.

    Args:
        ds_engine (Any): The ``deepspeed.DeepSpeedEngine``.
        plan (Plan): What is run.
        clock (Clock): Counts optimizer steps, moves the schedulers.
        gradients (GradientTracker): Which parameters got a gradient.
        even_microbatches (EvenMicrobatches): Gives every rank the same number of backward passes.
        even_evaluation (EvenEvaluation): Gives every rank the same number of forward passes in evaluation.
        frozen (dict[str, torch.nn.Parameter]): By name, the parameters that are not trained.
        taken (frozenset[torch.nn.Parameter]): All parameters of the model.
        undo (list[Callable[[], None]]): What to call, last first, before the engine is taken down.
    """

    ds_engine: Any
    plan: Plan
    clock: Clock
    gradients: GradientTracker
    even_microbatches: EvenMicrobatches
    even_evaluation: EvenEvaluation
    frozen: dict[str, torch.nn.Parameter]
    taken: frozenset[torch.nn.Parameter]
    undo: list[Callable[[], None]]

    def close(self, state: State) -> None:
        """Take the engine down. Called when the Trainer is closed, on every rank; makes no collective.

        Args:
            state (State): Composer's state; its faces refuse to train from now on.
        """
        while self.undo:
            self.undo.pop()()
        close_engine(self.ds_engine)
        for face in (state.model, *ensure_tuple(state.optimizers)):
            if isinstance(face, ModelFace | OptimizerFace):
                type(face)._ds_engine = None
        if self.plan.zero_stage == 3:
            leave_partitioned(self.ds_engine.module)


def assemble(
    state: State, logger: Logger, plan: Plan, optimizer_steps: OptimizerSteps, max_consecutive_skipped_steps: int | None
) -> Assembly:
    """Build the engine, and put faces in the places of the model, optimizer, scaler and schedulers.

    Collective: called at ``BEFORE_LOAD``, on every rank.

    Args:
        state (State): Composer's state, in which the faces are put.
        logger (Logger): Composer's logger.
        plan (Plan): What is run.
        optimizer_steps (OptimizerSteps): The counts.
        max_consecutive_skipped_steps (int | None): After so many, training ends.

    Returns:
        Assembly: What was built.
    """
    model, client = state.model, ensure_tuple(state.optimizers)[0]
    if is_left_partitioned(model):
        make_whole(model)
    check_waiting(model, plan, is_building())
    held = parameters_of(client)
    names = {p: name for name, p in model.named_parameters() if p.requires_grad and p in held}
    frozen = {name: parameter for name, parameter in model.named_parameters() if parameter not in names}
    taken = frozenset(model.parameters())
    empty = EmptyParameters(model, plan.zero_stage)
    empty.hide()
    optimizer = partitioned_optimizer(client, plan.fused_adam, empty.named.values())
    rounded = [parameter for parameter in names if plan.weights != 'fp32' and parameter.is_floating_point()]
    first = dist.get_global_rank() == 0
    runs = hand_over(model, plan)
    whole = [p for p in rounded if p not in runs]
    originals = {p: p.detach().to('cpu', torch.float32, copy=True) if first else None for p in whole}
    ds_engine = build_engine(model, optimizer, plan.ds_config)
    broadcast_buffers(model)
    partitions = Partitions(ds_engine, names)
    partitions.restore_masters(originals)
    restore_runs(partitions, runs)
    optimizer.bind(partitions)
    gradients = GradientTracker(partitions)
    even_microbatches = EvenMicrobatches(state, plan.zero_stage)
    undo: list[Callable[[], None]] = [empty.show, gradients.close]
    if plan.autocast_dtype is not None:
        device_type = torch.device(ds_engine.device).type  # pyright: ignore[reportArgumentType]
        handles = autocast_inside(model, device_type, plan.autocast_dtype)
        undo += [handle.remove for handle in handles]
    state.model = model_face(model, ds_engine, partitions, empty)
    if plan.zero_stage == 3:
        undo.append(tell_transformers(model))
    undo.append(surround_evaluation(model, ds_engine, plan))
    undo.append(partition_averages(state.algorithms, partitions, model))
    if plan.precision == 'amp_fp16':
        state.scaler = ScalerFace(ds_engine)
    window, loss_scale = Window(ds_engine), LossScale(ds_engine.optimizer)
    console = Console(optimizer_steps, window)
    state.callbacks.append(console)
    clock = Clock(state, logger, optimizer_steps, window, loss_scale, max_consecutive_skipped_steps, console)
    state.optimizers = optimizer_face(
        client, ds_engine, optimizer, gradients, even_microbatches, window, loss_scale, clock.after_optimizer_step
    )
    clock.take_schedulers()
    undo += [save_safely(state), verify_loads(state)]
    return Assembly(
        ds_engine=ds_engine,
        plan=plan,
        clock=clock,
        gradients=gradients,
        even_microbatches=even_microbatches,
        even_evaluation=EvenEvaluation(state, model, plan.zero_stage),
        frozen=frozen,
        taken=taken,
        undo=undo,
    )
