"""``DeepSpeed``: which of Composer's events does what. Start reading here.

Composer's loop, with what this algorithm does in it::

    Trainer(...)
        BEFORE_LOAD             all settings are compared: one plan, or one error with all conflicts; the engine is
                                built; faces take the places of the model, optimizer, scaler and schedulers
        (a checkpoint is loaded, through the faces)
        AFTER_LOAD              or a sharded checkpoint is loaded
        (DistributedDataParallel is offered a model without parameters, and leaves it alone)
    Trainer.fit()
        FIT_START               the block that says what will be run is logged
        for batch in dataloader:
            optimizer.step(closure)                 the optimizer face
                BEFORE_TRAIN_BATCH                  buffers are taken from rank 0
                for microbatch in batch:
                    BEFORE_FORWARD
                    outputs = model(microbatch)     the model face: through the engine
                    loss = model.loss(...) * the microbatch's share of the batch
                    loss.backward()                 the engine reduces and partitions gradients
                    AFTER_BACKWARD                  stale gradient buffers are cleared
                ds_engine.step()                    the accumulation boundary, when the batch ends a window
                OPTIMIZER_STEP                      our own event, when the update was applied
            scheduler.step()                        the scheduler faces move, when an update was applied
            BATCH_END, ...                          the counts are settled; a short last window is stepped
    Trainer.eval(), and within fit()
        EVAL_BATCH_START        under ZeRO 3 the ranks' numbers of microbatches are compared
        model.eval_forward()    beside the engine: evaluation.py has prepared it
    Trainer.close()             the engine is taken down
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from composer import Algorithm
from composer.algorithms import GradientClipping
from composer.core import Event, Precision, State
from composer.loggers import Logger
from composer.utils import dist, ensure_tuple

from composer_ds.announcements import announce, block_of
from composer_ds.assembly import assemble
from composer_ds.batches import batches_per_optimizer_step
from composer_ds.checkpoint.node_disks import latest_of, lend
from composer_ds.counts import OptimizerSteps
from composer_ds.ds_config import read_ds_config
from composer_ds.engine import EngineCloser, broadcast_buffers, check_environment
from composer_ds.errors import ConfigError
from composer_ds.faces import ScalerFace
from composer_ds.facts import Settings
from composer_ds.launchers import complete_environment
from composer_ds.optimizers import is_composers_default, optimizer_from_section
from composer_ds.ownership import Plan
from composer_ds.plan_record import log_record
from composer_ds.process_groups import forget_destroyed_groups
from composer_ds.resumption import LoadSharded, load_what_is_chosen, read_load_sharded, refuse_two_checkpoints
from composer_ds.trainer_facts import agreed_plan, check_still_frozen, check_still_ours, facts_of
from composer_ds.trainer_frame import place_of_autoresume

__all__ = ['DeepSpeed']


# A checkpoint at each of them must hold the last update.
_AFTER_A_BATCH = (Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.FIT_END)


class DeepSpeed(Algorithm):
    """Trains the Trainer's model with DeepSpeed's ZeRO.

    Give it to ``Trainer(algorithms=[DeepSpeed(zero_stage=2)])`` and leave the rest of the Trainer as it is: the batch
    of the dataloader is one optimizer step, ``device_train_microbatch_size`` cuts it in microbatches, Composer's
    schedulers, checkpoints, evaluation and loggers work as ever. The weights after every optimizer step are those of
    plain Composer.

    Args:
        zero_stage (int | None): What is partitioned over the ranks: 1 the optimizer state, 2 the gradients, too, 3 the
            weights, too. 0 is run as 1. Default: None, for the stage in the ds_config, or else 2.
        offload_optimizer (str | None): ``'cpu'`` keeps master weights and optimizer state in host memory. Default:
            None.
        offload_param (str | None): ``'cpu'`` keeps the weights in host memory between uses; ZeRO 3 only. Default: None.
        ds_config (Mapping[str, Any] | str | Path | None): Further settings of DeepSpeed, as a dict or the path of a
            JSON or YAML file. A setting that the Trainer owns must be absent, ``'auto'`` or agree. Default: None.
        max_consecutive_skipped_steps (int | None): After so many optimizer steps in a row that were skipped because a
            gradient was infinite or NaN, training ends with a ``TrainingError``; None never ends it. Default: 50.
        load_sharded (str | Path | Mapping[str, Any] | LoadSharded | None): A sharded checkpoint to begin with, or a
            folder of them, or a checkpoint of DeepSpeed's own; as a path, or with options as :class:`LoadSharded` has
            them. Default: None.

    Raises:
        ConfigError: When the ds_config cannot be read. Settings that are not allowed or disagree with the Trainer's are
            raised from ``Trainer(...)``, all at once.
        EnvironmentProblem: When deepspeed or a compiler is missing.
    """

    def __init__(
        self,
        zero_stage: int | None = None,
        offload_optimizer: str | None = None,
        offload_param: str | None = None,
        ds_config: Mapping[str, Any] | str | Path | None = None,
        max_consecutive_skipped_steps: int | None = 50,
        load_sharded: str | Path | Mapping[str, Any] | LoadSharded | None = None,
    ):
        self.settings = Settings(zero_stage, offload_optimizer, offload_param, read_ds_config(ds_config))
        complete_environment()
        check_environment()
        self.max_consecutive_skipped_steps = max_consecutive_skipped_steps
        self.load_sharded = read_load_sharded(load_sharded)
        self.optimizer_steps = OptimizerSteps()
        """Counts of optimizer steps, applied and skipped; part of every checkpoint."""
        self.plan: Plan | None = None
        self.ds_engine: Any = None
        """The ``deepspeed.DeepSpeedEngine``, from ``BEFORE_LOAD`` until the Trainer is closed."""
        self._optimizer_from_section = False
        self._assembly: Any = None
        """The ``Assembly``, from ``BEFORE_LOAD`` on."""
        self._counts_were_loaded = False
        self._give_back: Callable[[], None] = lambda: None
        """Removes the copy of a checkpoint that another node's disk has."""
        self._handlers = {
            Event.INIT: self._init,
            Event.BEFORE_LOAD: self._before_load,
            Event.FIT_START: self._fit_start,
            Event.AFTER_LOAD: self._after_load,
            Event.BATCH_START: self._batch_start,
            Event.BEFORE_TRAIN_BATCH: self._before_train_batch,
            Event.BEFORE_FORWARD: self._before_forward,
            Event.AFTER_BACKWARD: self._after_backward,
            Event.EVAL_BATCH_START: self._eval_batch_start,
            **{event: functools.partial(self._settle, event) for event in _AFTER_A_BATCH},
        }

    def match(self, event: Event, state: State) -> bool:
        """Say which events this algorithm acts on. Called by Composer on every event, on every rank.

        Args:
            event (Event): The event.
            state (State): Composer's state.

        Returns:
            bool: Whether :meth:`apply` is to be called.
        """
        return event in self._handlers

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Act on an event. Collective: Composer calls it on every rank.

        Args:
            event (Event): The event.
            state (State): Composer's state, in which the faces are put.
            logger (Logger): Composer's logger.
        """
        self._handlers[event](state, logger)

    @staticmethod
    def required_on_load() -> bool:
        """Say that a checkpoint may be loaded without this algorithm: it is an ordinary Composer checkpoint.

        Returns:
            bool: False.
        """
        return False

    def _init(self, state: State, logger: Logger) -> None:
        if state.fsdp_config is not None or state.tp_config is not None:
            agreed_plan(self.settings, facts_of(state))  # raises, before Composer shards the model itself
        # Before the schedulers are made for it.
        section, optimizers = self.settings.ds_config.get('optimizer'), ensure_tuple(state.optimizers)
        if section not in (None, 'auto') and optimizers and is_composers_default(optimizers[0]):
            optimizer = optimizer_from_section(section, optimizers[0])
            if optimizer is not None:
                state.optimizers = optimizer
                self._optimizer_from_section = True

    def _before_load(self, state: State, logger: Logger) -> None:
        # Not at INIT: surgery of other algorithms may follow there, and the Trainer does not know its dataloader yet.
        if self.ds_engine is not None:
            raise ConfigError('This DeepSpeed instance already belongs to a Trainer; make a new one for each Trainer.')
        refuse_two_checkpoints(self.load_sharded)
        # The Trainer itself starts no process group on one rank.
        dist.initialize_dist(state.device)
        forget_destroyed_groups()
        self.plan = plan = agreed_plan(self.settings, facts_of(state, self._optimizer_from_section))
        for note in plan.notes:
            announce(note)
        state.precision = Precision(plan.precision)
        state.callbacks.append(EngineCloser(self.close))
        # Their work is DeepSpeed's now.
        state.algorithms = [part for part in state.algorithms if not isinstance(part, GradientClipping)]
        self._assembly = assemble(state, logger, plan, self.optimizer_steps, self.max_consecutive_skipped_steps)
        self.ds_engine = self._assembly.ds_engine
        log_record(plan, logger)
        place = place_of_autoresume()
        latest = None if place is None else latest_of(*place, state.run_name)
        if latest is not None:
            self._give_back = lend(state, latest)

    def _fit_start(self, state: State, logger: Logger) -> None:
        assert self.plan is not None
        facts = check_still_ours(state, self.plan, self.settings, self._assembly.taken)
        self._assembly.clock.fit_start(batches_per_optimizer_step(self.settings.ds_config, facts))
        if self.plan.precision == 'amp_fp16' and not isinstance(state.scaler, ScalerFace):
            state.scaler = ScalerFace(self.ds_engine)  # fit(precision=...) has made a new one
        # Collective: the ranks' batch sizes are added up.
        announce(block_of(self.plan, state, self._assembly.clock.window.size))

    def _after_load(self, state: State, logger: Logger) -> None:
        self._give_back()
        load_what_is_chosen(self.load_sharded, state, logger)
        self._assembly.clock.after_load(self._counts_were_loaded)

    def _batch_start(self, state: State, logger: Logger) -> None:
        self._assembly.clock.batch_start()

    def _settle(self, event: Event, state: State, logger: Logger) -> None:
        self._assembly.clock.settle(event)

    def state_dict(self) -> dict[str, Any]:
        """Return what is part of a checkpoint: the counts of optimizer steps. Called on every rank.

        Returns:
            dict[str, Any]: In plain types.
        """
        counts = self.optimizer_steps.state_dict() if self._assembly is None else self._assembly.clock.state_dict()
        return {**super().state_dict(), 'optimizer_steps': counts}

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Take over the counts of a checkpoint. Called on every rank, after ``BEFORE_LOAD``.

        Args:
            state (dict[str, Any]): From :meth:`state_dict`.
            strict (bool): Not used.
        """
        counts = state.get('optimizer_steps')
        self._counts_were_loaded = counts is not None
        if self._assembly is not None and counts is not None:
            self._assembly.clock.load_state_dict(counts)

    def _before_train_batch(self, state: State, logger: Logger) -> None:
        check_still_frozen(self._assembly.frozen)
        broadcast_buffers(state.model)

    def _before_forward(self, state: State, logger: Logger) -> None:
        self._assembly.even_microbatches.remember()

    def _after_backward(self, state: State, logger: Logger) -> None:
        self._assembly.gradients.after_backward()
        self.optimizer_steps.microbatches += 1

    def _eval_batch_start(self, state: State, logger: Logger) -> None:
        self._assembly.even_evaluation.batch_start()

    def close(self, state: State) -> None:
        """Take the engine down. Called when the Trainer is closed, on every rank.

        Args:
            state (State): Composer's state; its faces refuse to train from now on.
        """
        if self.ds_engine is None:
            return
        self.ds_engine = None
        self._assembly.close(state)
