"""Composer's W&B logger, made to work with current versions of wandb, and without any network in offline mode."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING

import composer.loggers
from composer.utils import dist

from composer_ds.errors import EnvironmentProblem

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

__all__ = ['WandBLogger']


class WandBLogger(composer.loggers.WandBLogger):
    """`composer.loggers.WandBLogger` with a start of its own; arguments and logging are Composer's.

    Composer 0.32 calls ``Run.get_url()``, which wandb deprecated in 0.19.10 and no longer has in 0.31: this class can
    go when Composer asks for ``Run.url``.
    """

    def init(self, state: State, logger: Logger) -> None:
        """Starts the W&B run: one for the job, or with ``rank_zero_only=False`` one for each rank.

        Called at ``Event.INIT``. Collective: every rank learns entity and project from rank 0.

        Args:
            state (State): For the run's name.
            logger (Logger): Not used.

        Raises:
            EnvironmentProblem: W&B did not start a run; only on the ranks that log.
        """
        del logger
        options = self._init_kwargs
        name = options.get('name') or state.run_name
        if self._rank_zero_only:
            options['name'] = name
        else:
            options['name'] = f'{name}-rank{dist.get_global_rank()}'
            options.setdefault('group', name)
        entity_and_project: list[str | None] = [None, None]
        if self._enabled:
            entity_and_project = self._start()
        dist.broadcast_object_list(entity_and_project)
        self.entity, self.project = entity_and_project

    def _start(self) -> list[str | None]:
        options = self._init_kwargs
        if options.get('mode') == 'offline':
            # wandb reports its own errors and usage over the network, offline runs included.
            os.environ.setdefault('WANDB_ERROR_REPORTING', 'false')
        import wandb

        try:
            # wandb would write to a temporary folder instead of making this one.
            Path(options.get('dir') or '.').mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentProblem(f'loggers.wandb.init_kwargs.dir: cannot make the folder: {error}') from error
        try:
            run = wandb.init(**options)
        except wandb.Error as error:
            reason = str(error).rstrip('.')
            raise EnvironmentProblem(
                f'loggers.wandb: W&B did not start a run: {reason}. To log online, run `wandb login` first; to log to '
                'a folder only, give loggers.wandb.init_kwargs.mode=offline'
            ) from error
        atexit.register(self._set_is_in_atexit)
        self.run_dir = run.dir
        self.run_url = None if run.offline else run.url
        return [str(run.entity), str(run.project)]
