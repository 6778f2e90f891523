"""Running a checked job: from the process group to the closed trainer."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_ds.errors import ConfigError
from composer_ds.launch.build import construction, make, make_algorithms, make_optimizer, require_samples
from composer_ds.launch.check import RunConfig

__all__ = ['run_job']


def run_job(config: RunConfig) -> None:
    """Trains as the configuration says.

    Collective: every rank calls it with the same configuration.

    Args:
        config (RunConfig): The checked run.

    Raises:
        ConfigError: A setting turned out to be impossible while building.
    """
    import torch.distributed
    from composer import Algorithm, Callback, Trainer
    from composer.loggers import LoggerDestination
    from composer.utils import dist, reproducibility

    _configure_logging(config)
    if dist.get_world_size() > 1:
        dist.initialize_dist(config.train.device, config.train.dist_timeout)
    # The same seed on every rank, for equal initial weights; the Trainer adds the rank to it afterwards.
    reproducibility.seed_all(config.layout.seed)

    # The task last but for the optimizer: what is cheap to make fails first.
    algorithms = make_algorithms(config.deepspeed)
    scheduler = make(config.scheduler) if config.scheduler else None
    algorithms = [*(make(choice, Algorithm) for choice in config.algorithms), *algorithms]
    callbacks = [make(choice, Callback) for choice in config.callbacks]
    loggers = [make(choice, LoggerDestination) for choice in config.loggers]
    if config.left_out and dist.get_global_rank() == 0:
        print(f'Without DeepSpeed nothing is made of callbacks.{", callbacks.".join(config.left_out)}.', flush=True)
    # The optimizer, too: after the construction the shapes that its parameter groups go by are gone.
    with construction(config.model, config.deepspeed, config.train.device):
        task = config.recipe.build(config.model, config.data)
        require_samples(task, dist.get_world_size())
        optimizer = make_optimizer(config.optimizer, task.model)

    with _refusals_of_composer():
        trainer = Trainer(
            model=task.model,
            train_dataloader=task.train_dataloader,
            eval_dataloader=task.eval_dataloader,
            optimizers=optimizer,
            schedulers=scheduler,
            algorithms=[*getattr(task, 'algorithms', ()), *algorithms],
            callbacks=[*task.callbacks, *callbacks],
            loggers=loggers,
            run_name=config.layout.run_name,
            seed=config.layout.seed,
            **config.train.model_dump(exclude_unset=True, exclude_none=True),
            **config.checkpoint.model_dump(exclude_unset=True),
        )
        trainer.logger.log_hyperparameters(config.resolved)
        trainer.fit()
    # Ends in a barrier, without which destroying a gloo group right after the last collective can hang. On an error
    # neither runs: another rank may not be there to meet this one.
    trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _tell_where_runs_are(loggers)


def _configure_logging(config: RunConfig) -> None:
    """Shows what composer_ds logs; `train.python_log_level` gives it and Composer a level and a longer format."""
    if config.train.python_log_level is None:
        logging.basicConfig(format='%(message)s')
    logging.getLogger('composer_ds').setLevel((config.train.python_log_level or 'info').upper())


@contextlib.contextmanager
def _refusals_of_composer() -> Iterator[None]:
    """Turns errors that Composer raises about its arguments into a `ConfigError`; errors of other code pass."""
    import composer

    try:
        yield
    except (ValueError, FileExistsError, FileNotFoundError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if Path(composer.__file__).parent not in raised_in.parents:
            raise
        raise ConfigError(f'Composer refused a setting: {error}') from error


def _tell_where_runs_are(loggers: list[Any]) -> None:
    """Prints the place of the W&B run on the one rank that has it."""
    for logger in loggers:
        if getattr(logger, 'run_url', None):
            print(f'W&B run: {logger.run_url}')
        elif type(logger).__name__ == 'WandBLogger' and logger.run_dir:
            folder = Path(logger.run_dir).parent
            if folder.is_relative_to(Path.cwd()):
                folder = folder.relative_to(Path.cwd())
            print(f'W&B run, offline: {folder} (to upload it: wandb sync {folder})')
