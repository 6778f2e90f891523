"""The sections of a run's YAML that are the same for every task, as pydantic models.

The keys of `train` and `checkpoint` are arguments of `composer.Trainer`, those of `deepspeed` are arguments of
`composer_ds.DeepSpeed`, so that their documentation applies. Only keys that were given are passed on, so that the
defaults are Composer's own. `model` and `data` belong to the task, and the arguments of optimizers, schedulers,
callbacks and loggers are checked against the signatures of their classes (see `composer_ds.launch.arguments`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, PositiveInt

__all__ = ['CheckpointConfig', 'DeepSpeedConfig', 'Layout', 'TrainConfig', 'time_string']


def time_string(value: Any) -> int | str:
    """Accepts what Composer's ``Time`` accepts in text form, and whole numbers, which are epochs.

    Args:
        value (Any): From the YAML.

    Returns:
        int | str: The same value.

    Raises:
        ValueError: For pydantic, which adds the path.
    """
    from composer import Time  # imported here because it takes seconds

    allowed = "a time string such as '1200ba' (batches), '2ep' (epochs), '500sp' (samples), '0.1dur' (part of the run)"
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f'must be {allowed}')
    try:
        Time.from_input(value, 'ep')
    except Exception as error:
        raise ValueError(f'must be {allowed}') from error
    return value


def _duration(value: Any) -> int | str:
    from composer import Time

    if Time.from_input(time_string(value), 'ep').value <= 0:
        raise ValueError('must be greater than zero')
    return value


def _duration_or_never(value: Any) -> int | str:
    return value if value == 0 and not isinstance(value, bool) else _duration(value)


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):  # Python takes true for 1
        raise ValueError('must be 0, 1, 2 or 3; `deepspeed: null` trains without DeepSpeed')
    return value


def _no_auto(value: Any) -> Any:
    if value == 'auto':
        raise ValueError("'auto' works under Composer's FSDP only; give a number of samples per rank, or leave it out")
    return value


def _path_alone(value: Any) -> Any:
    return {'path': value} if isinstance(value, str) else value


Duration = Annotated[int | str, PlainValidator(_duration)]
DurationOrNever = Annotated[int | str, PlainValidator(_duration_or_never)]
Microbatch = Annotated[PositiveInt, BeforeValidator(_no_auto)]
ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_switch)]
BatchCount = Annotated[int, Field(ge=-1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra='forbid', protected_namespaces=())


class Layout(_Section):
    """The top level of the file: which sections there are. What is in a section is checked by a model of its own."""

    task: str
    run_name: str | None = None
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 17
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    scheduler: dict[str, Any] | None = None
    train: dict[str, Any] = {}
    deepspeed: dict[str, Any] | None = None
    algorithms: dict[str, dict[str, Any]] = {}
    callbacks: dict[str, dict[str, Any]] = {}
    loggers: dict[str, dict[str, Any]] = {}
    checkpoint: dict[str, Any] = {}


class TrainConfig(_Section):
    """Section `train`: arguments of `composer.Trainer` about duration, evaluation, precision and the console."""

    max_duration: Duration
    eval_interval: DurationOrNever = 1
    train_subset_num_batches: BatchCount = -1
    eval_subset_num_batches: BatchCount = -1
    spin_dataloaders: bool = True
    device_train_microbatch_size: Microbatch | None = None
    accumulate_train_batch_on_tokens: bool = False
    precision: Literal['fp32', 'amp_bf16', 'amp_fp16', 'amp_fp8'] | None = None
    device: Literal['cpu', 'gpu', 'mps', 'tpu'] | None = None
    scale_schedule_ratio: Annotated[float, Field(gt=0)] = 1.0
    step_schedulers_every_batch: bool | None = None
    deterministic_mode: bool = False
    ddp_sync_strategy: Literal['single_auto_sync', 'multi_auto_sync', 'forced_sync'] | None = None
    dist_timeout: Annotated[float, Field(gt=0)] = 300.0
    progress_bar: bool = True
    log_to_console: bool = False
    console_stream: Literal['stdout', 'stderr'] = 'stderr'
    console_log_interval: Duration = '1ba'
    log_traces: bool = False
    python_log_level: Literal['debug', 'info', 'warning', 'error', 'critical'] | None = None


class LoadShardedConfig(_Section):
    """Section `deepspeed.load_sharded`: arguments of `composer_ds.LoadSharded`. A path alone will do."""

    path: str
    weights_only: bool = False
    strict: bool = True
    schedulers: bool = True
    verify: bool = True
    trusted: bool = False


class DeepSpeedConfig(_Section):
    """Section `deepspeed`: arguments of `composer_ds.DeepSpeed`. Without the section Composer trains with DDP."""

    zero_stage: ZeroStage | None = None
    offload_optimizer: Literal['cpu'] | None = None
    offload_param: Literal['cpu'] | None = None
    ds_config: dict[str, Any] | str | None = None
    max_consecutive_skipped_steps: PositiveInt | None = 50
    load_sharded: Annotated[LoadShardedConfig, BeforeValidator(_path_alone)] | None = None


class CheckpointConfig(_Section):
    """Section `checkpoint`: arguments of `composer.Trainer` about saving, loading and resuming."""

    save_folder: str | None = None
    save_filename: str = 'ep{epoch}-ba{batch}-rank{rank}.pt'
    save_latest_filename: str | None = 'latest-rank{rank}.pt'
    save_overwrite: bool = False
    save_interval: Duration = '1ep'
    save_weights_only: bool = False
    save_ignore_keys: list[str] | None = None
    save_num_checkpoints_to_keep: BatchCount = -1
    save_metrics: bool = False
    load_path: str | None = None
    load_weights_only: bool = False
    load_strict_model_weights: bool = True
    load_progress_bar: bool = True
    load_ignore_keys: list[str] | None = None
    load_exclude_algorithms: list[str] | None = None
    autoresume: bool = False
