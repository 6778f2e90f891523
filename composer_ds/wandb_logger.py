"""Composer's W&B logger, for current versions of wandb: one run for a job, however often the job is started."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import composer.loggers
from composer.utils import dist

from composer_ds.announcements import announce
from composer_ds.errors import EnvironmentProblem
from composer_ds.wandb_description import describe
from composer_ds.wandb_files import last_step, lives_of_run, wait_for_own_folder

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

    from composer_ds.wandb_artifacts import CheckpointReferences

__all__ = ['WandBLogger']


class WandBLogger(composer.loggers.WandBLogger):
    """`composer.loggers.WandBLogger` that also resumes, and knows the monitors of ``composer_ds.callbacks``.

    - One W&B run for a job: a job that loads a checkpoint goes on in the run that the checkpoint is of, if their names
      are the same. Points that the run has already are not logged again.
    - Keys of the monitors have ``optimizer_steps/applied`` as their x-axis.
    - W&B's step is the number of batches that are done. All that one batch gives has the same step, its loss, too,
      which Composer logs with the number of batches before it: a run that ends and goes on has no hole there.
    - The config has the plan (``deepspeed_plan``) and the environment (``deepspeed_environment``).

    Composer 0.32 calls ``Run.get_url()``, which wandb deprecated in 0.19.10 and no longer has in 0.31.

    Args:
        project (str | None): W&B's project. Default: None.
        group (str | None): Of runs in W&B. Default: None.
        name (str | None): Of the W&B run. Default: None, for the Trainer's ``run_name``.
        entity (str | None): User or team. Default: None.
        tags (list[str] | None): Of the W&B run. Default: None.
        log_artifacts (bool): Upload whatever Composer uploads. Default: False.
        rank_zero_only (bool): One run for the job; False makes one for each rank, which are not resumed. Default: True.
        init_kwargs (dict[str, Any] | None): For ``wandb.init``. ``id`` names the run to be continued,
            ``resume='never'`` begins a new one. Default: None.
        reference_checkpoints (bool): Log each checkpoint as an artifact that says where it is; nothing is uploaded.
            Default: False.
    """

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        tags: list[str] | None = None,
        log_artifacts: bool = False,
        rank_zero_only: bool = True,
        init_kwargs: dict[str, Any] | None = None,
        reference_checkpoints: bool = False,
    ):
        super().__init__(project, group, name, entity, tags, log_artifacts, rank_zero_only, init_kwargs)
        self.reference_checkpoints = reference_checkpoints
        self._references: CheckpointReferences | None = None
        self._run: Any = None
        self._waiting: list[Callable[[], None]] = []
        """What was logged before the run is started."""
        self._of_checkpoint: dict[str, Any] = {}
        self._step_of_batch: int | None = None
        """W&B's step of the batch at hand, while it is trained on."""
        self._first_step = 0
        """What was logged before this one is in W&B already."""

    def init(self, state: State, logger: Logger) -> None:
        """Settle the run's name. Called by Composer at ``Event.INIT``, on every rank.

        The run itself is started when a checkpoint, which may tell its ID, has been loaded.

        Args:
            state (State): For the run's name.
            logger (Logger): Not used.
        """
        del logger
        options = self._init_kwargs
        name = options.get('name') or state.run_name
        if self._rank_zero_only:
            options['name'] = name
        else:
            options['name'] = f'{name}-rank{dist.get_global_rank()}'
            options.setdefault('group', name)

    def after_load(self, state: State, logger: Logger) -> None:
        """Start the W&B run: one for the job, or with ``rank_zero_only=False`` one for each rank.

        Called by Composer at ``Event.AFTER_LOAD``, with a checkpoint or without. Collective: every rank learns entity
        and project from rank 0.

        Args:
            state (State): Composer's state.
            logger (Logger): Not used.

        Raises:
            EnvironmentProblem: W&B did not start a run; only on the ranks that log.
        """
        del logger
        entity_and_project: list[str | None] = [None, None]
        if self._enabled:
            entity_and_project = self._start(state)
        dist.broadcast_object_list(entity_and_project)
        self.entity, self.project = entity_and_project

    def _start(self, state: State) -> list[str | None]:
        options = {**self._init_kwargs, **self._continued()}
        if options.get('mode') == 'offline':
            # wandb reports its own errors and usage over the network, offline runs included.
            os.environ.setdefault('WANDB_ERROR_REPORTING', 'false')
        import wandb

        folder = Path(options.get('dir') or '.')
        try:
            # wandb would write to a temporary folder instead of making this one.
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentProblem(f'loggers.wandb.init_kwargs.dir: cannot make the folder: {error}') from error
        if options.get('id'):
            wait_for_own_folder(folder, options['id'])
        try:
            run = wandb.init(**options)
        except wandb.Error as error:
            reason = str(error).rstrip('.')
            raise EnvironmentProblem(
                f'loggers.wandb: W&B did not start a run: {reason}. To log online, run `wandb login` first; to log to '
                'a folder only, give loggers.wandb.init_kwargs.mode=offline'
            ) from error
        atexit.register(self._set_is_in_atexit)
        self._run = run
        self.run_dir = run.dir
        self.run_url = None if run.offline else run.url
        if options.get('id'):
            self._find_first_step(state)
        describe(run, state)
        if self.reference_checkpoints:
            from composer_ds.wandb_artifacts import CheckpointReferences

            self._references = CheckpointReferences(state)
        for call in self._waiting:
            call()
        self._waiting = []
        return [str(run.entity), str(run.project)]

    def _continued(self) -> dict[str, Any]:
        """The options that continue the run of the checkpoint; none for a new run."""
        options, saved = self._init_kwargs, self._of_checkpoint
        if not self._rank_zero_only or options.get('resume') == 'never':
            return {}
        if {'id', 'resume_from', 'fork_from'} & options.keys():
            return {} if {'resume', 'resume_from', 'fork_from'} & options.keys() else {'resume': 'allow'}
        if saved.get('name') != options.get('name') or saved.get('project') != options.get('project'):
            return {}
        return {'id': saved['run_id'], 'resume': options.get('resume') or 'allow'}

    def _find_first_step(self, state: State) -> None:
        # Online the server knows; offline the files of earlier lives do, where they are in the same folder.
        self._first_step = self._run.starting_step
        if self._run.offline:
            own = Path(self._run.dir).parent
            steps = [last_step(file) for file in lives_of_run(own.parent, self._run.id) if file.parent != own]
            self._first_step = max([self._first_step, *(step + 1 for step in steps if step is not None)])
        batch = state.timestamp.batch.value
        if self._first_step:
            announce(f'W&B: goes on with run {self._run.id}, which has {self._first_step - 1} batches.')
        if self._first_step > batch + 1:
            announce(
                f'W&B: training goes on after batch {batch}. What the run has of batches {batch + 1} to '
                f'{self._first_step - 1} stays, and is not logged again; loggers.wandb.init_kwargs.resume=never begins '
                'a new run.'
            )

    def batch_start(self, state: State, logger: Logger) -> None:
        """Note which batch it is; tell of new checkpoints. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Not used.
        """
        self._step_of_batch = state.timestamp.batch.value + 1
        self._tell_of_checkpoints(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Note that Composer has counted the batch. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Not used.
        """
        self._step_of_batch = None

    def close(self, state: State, logger: Logger) -> None:
        """Tell of the last checkpoints. Called by Composer when the Trainer is closed, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Not used.
        """
        self._tell_of_checkpoints(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Tell of checkpoints. Called by Composer at the end of training, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Not used.
        """
        self._step_of_batch = None
        self._tell_of_checkpoints(state)

    def _tell_of_checkpoints(self, state: State) -> None:
        if self._references is not None:
            for artifact, aliases in self._references.new(state):
                self._run.log_artifact(artifact, aliases=aliases)

    def state_dict(self) -> dict[str, Any]:
        """Say which run this is. Part of every checkpoint.

        Returns:
            dict[str, Any]: In plain types; empty before the run is started, and on ranks without one.
        """
        if self._run is None or not self._rank_zero_only:
            return {}
        options = self._init_kwargs
        return {'run_id': self._run.id, 'name': options.get('name'), 'project': options.get('project')}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take note of the run of a checkpoint. Called when one is loaded, on every rank.

        Args:
            state (dict[str, Any]): From :meth:`state_dict`; empty in checkpoints of Composer's own logger.
        """
        self._of_checkpoint = dict(state) if 'run_id' in state else {}

    def _when_started(self, call: Callable[[], None]) -> None:
        if not self._enabled:
            return
        if self._run is None:
            self._waiting.append(call)
        else:
            call()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log numbers. Called by Composer, on every rank.

        Args:
            metrics (dict[str, Any]): By key.
            step (int | None): The number of batches that Composer has counted.
        """
        if self._step_of_batch is not None and step == self._step_of_batch - 1:
            step = self._step_of_batch
        if step is None or step >= self._first_step:
            log = super().log_metrics
            self._when_started(lambda: log(metrics, step))

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Log the run's configuration. Called by Composer, on every rank.

        Args:
            hyperparameters (dict[str, Any]): By key; the values of a resumed run are replaced.
        """
        self._when_started(lambda: self._run.config.update(hyperparameters, allow_val_change=True))

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Get the file of an artifact. Called by Composer on one rank of each node, which looks for a checkpoint.

        Args:
            remote_file_name (str): The artifact.
            destination (str): Where the file goes.
            overwrite (bool): Whether to replace a file there. Default: False.
            progress_bar (bool): Not used by W&B. Default: True.

        Raises:
            FileNotFoundError: There is none.
        """
        options = self._init_kwargs
        if (options.get('mode') or os.environ.get('WANDB_MODE')) in ('offline', 'disabled'):
            # Composer's own asks W&B all the same, which is an error without an account: autoresume would not start.
            raise FileNotFoundError(f'W&B is offline: {remote_file_name} is not looked for')
        if not self.entity or not self.project:
            import wandb

            self.entity = self.entity or options.get('entity') or wandb.Api().default_entity
            self.project = self.project or options.get('project') or 'uncategorized'
        super().download_file(remote_file_name, destination, overwrite, progress_bar)
