"""Checking a run's YAML file: its model and data are built on this process as the recipe builds them on rank 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer_ds.announcements import describe_batch
from composer_ds.batches import batches_per_optimizer_step
from composer_ds.check.facts import as_rank_0_of, expected_facts
from composer_ds.check.findings import Findings, memory_rows
from composer_ds.ds_config import read_ds_config
from composer_ds.errors import ConfigError
from composer_ds.facts import Settings
from composer_ds.launch.build import make, make_optimizer, require_samples
from composer_ds.launch.check import RunConfig, check
from composer_ds.launch.config_file import ConfigFile, read
from composer_ds.launch.schema import DeepSpeedConfig, TrainConfig
from composer_ds.launch.task import Task
from composer_ds.learning_rate import RunLength, learning_rates
from composer_ds.model_sizes import sizes_of
from composer_ds.ownership import make_plan

__all__ = ['check_run_file']


def check_run_file(file: str, overrides: Sequence[str], world_size: int, tell: Callable[[str], None]) -> Findings:
    """Find out what a run would do. Starts no process group.

    Args:
        file (str): Path of the YAML file.
        overrides (Sequence[str]): ``key=value`` items.
        world_size (int): Number of ranks.
        tell (Callable[[str], None]): Called with what is being done.

    Returns:
        Findings: What was found.

    Raises:
        ConfigError: With all problems.
    """
    source = read(file, overrides)
    config = check(source)
    on_cpu = _is_for_cpu(config.train)
    precision = config.train.precision or ('fp32' if on_cpu else 'amp_fp16')
    problems = []
    if on_cpu and precision != 'fp32':
        problems.append(
            f'train.precision = {precision!r} ({source.origin(("train", "precision"))}): on a CPU Composer computes in '
            'fp32 only; write fp32, or deepspeed.ds_config={bf16: {enabled: true}} for bf16'
        )
    tell(f'Building {config.layout.task}')
    with as_rank_0_of(world_size):
        task = _build(config)
        require_samples(task, world_size)
    optimizer = make_optimizer(config.optimizer, task.model)
    scheduler = make(config.scheduler) if config.scheduler else None
    callbacks = [make(choice) for choice in config.callbacks]
    loader = getattr(task.train_dataloader, 'dataloader', task.train_dataloader)
    batch_size = getattr(loader, 'batch_size', None)

    tell('Comparing the settings')
    facts = expected_facts(
        world_size=world_size,
        precision=precision,
        on_cpu=on_cpu,
        batch_size=batch_size,
        microbatch_size=config.train.device_train_microbatch_size,
        optimizer=optimizer,
        model=task.model,
        parts=(*task.callbacks, *getattr(task, 'algorithms', ()), *callbacks),
        scheduler_classes=() if scheduler is None else (type(scheduler).__name__,),
    )
    settings = Settings(None, None, None, {})
    if config.deepspeed is not None:
        given = config.deepspeed.model_dump(exclude_unset=True)
        settings = Settings(
            given.get('zero_stage'),
            given.get('offload_optimizer'),
            given.get('offload_param'),
            read_ds_config(given.get('ds_config')),
        )
    plan = rates = None
    remarks = []
    try:
        plan = None if config.deepspeed is None else make_plan(settings, facts)
    except ConfigError as error:
        problems += error.problems
    batches = batches_per_optimizer_step(settings.ds_config, facts) if plan else 1
    length = _length(config.train, loader, batch_size, world_size, batches)
    if length.optimizer_steps is None:
        remarks.append(f'No learning rates: how many optimizer steps {config.train.max_duration} are is not known yet.')
    else:
        try:
            rates = learning_rates(scheduler, optimizer, length)
        except ConfigError as error:
            problems += [f'scheduler ({source.origin(("scheduler", "name"))}): {one}' for one in error.problems]
    if problems:
        raise ConfigError(problems)
    sizes = sizes_of(task.model, optimizer)
    findings = Findings(
        title=file,
        world_size=world_size,
        plan=plan,
        batch=describe_batch(facts.device_train_microbatch_size, [batch_size] * world_size, batches),  # type: ignore[arg-type]
        on_cpu=on_cpu,
        model=_describe(task.model, sizes.trained, sizes.frozen, optimizer),
        memory=list(memory_rows(settings, facts, sizes, plan)),
        rates=rates,
        remarks=[*(plan.notes if plan else ['deepspeed: null, so plain Composer (DDP) trains this run.']), *remarks],
        origin_of=lambda decision: _origin(decision, source),
    )
    if config.train.device is None:
        findings.remarks.append(
            f'For a {"CPU" if on_cpu else "GPU"}, as this machine and the precision suggest; '
            f'train.device={"gpu" if on_cpu else "cpu"} checks for the other.'
        )
    return findings


def _is_for_cpu(train: TrainConfig) -> bool:
    if train.device is not None:
        return train.device == 'cpu'
    return not torch.cuda.is_available() and train.precision in (None, 'fp32')


def _build(config: RunConfig) -> Task:
    """Build model and data; only shapes are needed, so weights are left out where the recipe can do without."""
    try:
        with torch.device('meta'):
            return config.recipe.build(config.model, config.data)
    except ConfigError:
        raise
    except Exception:
        # Many models compute something while they are built.
        return _build_on_cpu(config)


def _build_on_cpu(config: RunConfig) -> Task:
    try:
        return config.recipe.build(config.model, config.data)
    except RuntimeError as error:
        if 'has not been initialized' not in str(error):
            raise
        raise ConfigError(
            f'{config.layout.task} talks to the other ranks while it builds, and none are started here; check it with '
            '-n 1'
        ) from error


def _describe(model: Any, trained: int, frozen: int, optimizer: torch.optim.Optimizer) -> str:
    groups = len(optimizer.param_groups)
    return (
        f'{type(model).__name__}, {trained:,} trained parameters'
        + (f' and {frozen:,} frozen ones' if frozen else '')
        + f', {type(optimizer).__name__} with {groups} parameter group{"s" if groups > 1 else ""}'
    )


def _length(
    train: TrainConfig, loader: Any, batch_size: int | None, world_size: int, batches_in_one_step: int
) -> RunLength:
    try:
        batches = len(loader)
        samples = len(loader.sampler) * world_size
    except (AttributeError, TypeError, NotImplementedError):
        batches = samples = None
    if train.train_subset_num_batches > 0:
        batches = min(batches or train.train_subset_num_batches, train.train_subset_num_batches)
        samples = None
    return RunLength(
        train.max_duration,
        batches,
        None if batch_size is None else batch_size * world_size,
        samples,
        train.scale_schedule_ratio,
        train.step_schedulers_every_batch,
        batches_in_one_step,
    )


def _origin(decision: str, source: ConfigFile) -> str:
    """Turn ``precision=`` or ``ds_config.bf16`` into a line of the YAML, where it stands there."""
    argument, in_ds_config = re.match(r'(\w+)=', decision), re.match(r'ds_config\.([\w.]+)', decision)
    if argument:
        name = argument.group(1)
        sections = {'optimizers': ('optimizer', 'name'), 'schedulers': ('scheduler', 'name')}
        for section, model in (('train', TrainConfig), ('deepspeed', DeepSpeedConfig)):
            sections |= {key: (section, key) for key in model.model_fields}
        path = sections.get(name)
        if path is None:
            return decision
        return _place(path, '.'.join(path), source) or "Composer's default"
    if in_ds_config:
        return _place(('deepspeed', 'ds_config', *in_ds_config.group(1).split('.')), decision, source) or decision
    return decision


def _place(path: tuple[str, ...], name: str, source: ConfigFile) -> str | None:
    if path in source.overridden:
        return f'{name}, command line'
    return f'{name}, line {source.lines[path]}' if path in source.lines else None
