"""Checking a ds_config by itself: what is not in it is told by options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from omegaconf import OmegaConf

from composer_ds.announcements import describe_batch
from composer_ds.batches import batches_per_optimizer_step
from composer_ds.check.facts import expected_facts
from composer_ds.check.findings import Findings, memory_rows
from composer_ds.ds_config import read_ds_config
from composer_ds.errors import ConfigError
from composer_ds.facts import Settings
from composer_ds.launch import registry
from composer_ds.launch.imports import load
from composer_ds.launch.problems import suggestion
from composer_ds.model_sizes import GroupSizes, ModelSizes, state_bytes_per_element
from composer_ds.ownership import make_plan

__all__ = ['Told', 'check_ds_config_file', 'number_of_parameters']

# Of the same size each: how many parameters a model has matters little.
_PARAMETERS_OF_A_MODEL = 200


@dataclass(frozen=True)
class Told:
    """What the options say in place of a Trainer.

    Args:
        parameters (int | None): Elements of all parameters of the model.
        hidden_size (int | None): Width of the model.
        optimizer (str): A name of the launcher's registry.
        precision (str | None): Composer's precision.
        batch_size (int | None): Samples that each rank draws from its dataloader at a time.
        microbatch_size (int | None): Largest number of samples of a microbatch.
    """

    parameters: int | None
    hidden_size: int | None
    optimizer: str
    precision: str | None
    batch_size: int | None
    microbatch_size: int | None


def check_ds_config_file(
    file: str, overrides: Sequence[str], world_size: int, told: Told, tell: Callable[[str], None]
) -> Findings:
    """Find out what a ds_config would do.

    Args:
        file (str): Path of a JSON or YAML file.
        overrides (Sequence[str]): ``key=value`` items.
        world_size (int): Number of ranks.
        told (Told): What the options say.
        tell (Callable[[str], None]): Called with what is being done.

    Returns:
        Findings: What was found.

    Raises:
        ConfigError: With all problems.
    """
    tell('Comparing the settings')
    ds_config = read_ds_config(file)
    if overrides:
        merged = OmegaConf.merge(OmegaConf.create(ds_config), OmegaConf.from_dotlist(list(overrides)))
        ds_config = OmegaConf.to_container(merged)
        assert isinstance(ds_config, dict)
    precision = told.precision or _precision_asked_for(ds_config)
    optimizer = _optimizer(told.optimizer)
    facts = expected_facts(
        world_size=world_size,
        precision=precision,
        on_cpu=False,
        batch_size=told.batch_size or told.microbatch_size,
        microbatch_size=told.microbatch_size,
        optimizer=optimizer,
        trained_elements=told.parameters or 1_000_000_000,
        hidden_size=told.hidden_size,
    )
    settings = Settings(None, None, None, {str(key): value for key, value in ds_config.items()})
    plan = make_plan(settings, facts)
    findings = Findings(title=file, world_size=world_size, plan=plan, batch='', remarks=list(plan.notes))
    if facts.batch_sizes is None:
        findings.batch = 'not known; --batch-size and --microbatch-size tell what each rank takes'
    else:
        findings.batch = describe_batch(
            facts.device_train_microbatch_size,  # type: ignore[arg-type]
            list(facts.batch_sizes),
            batches_per_optimizer_step(settings.ds_config, facts),
        )
    if told.precision is None:
        findings.remarks.append(f'Checked for {precision}; --precision checks for another.')
    if told.parameters is None:
        findings.remarks.append(
            'No memory table: the model is not known. --parameters 1.3B says how large it is (with --optimizer).'
        )
        return findings
    share, rest = divmod(told.parameters, _PARAMETERS_OF_A_MODEL)
    numels = (*[share] * (_PARAMETERS_OF_A_MODEL - 1), share + rest) if share else (told.parameters,)
    sizes = ModelSizes((GroupSizes(numels, state_bytes_per_element(optimizer, optimizer.param_groups[0])),))
    findings.model = f'{told.parameters:,} parameters in {len(numels)} equal ones, {type(optimizer).__name__}'
    findings.memory = list(memory_rows(settings, facts, sizes, plan))
    return findings


def number_of_parameters(text: str) -> int:
    """Read a number such as ``1.3B``, ``350M`` or ``1e9``.

    Args:
        text (str): From the command line.

    Returns:
        int: The number.

    Raises:
        ConfigError: For anything else.
    """
    factors = {'K': 1e3, 'M': 1e6, 'B': 1e9, 'G': 1e9, 'T': 1e12}
    factor = factors.get(text[-1:].upper(), 1)
    try:
        number = round(float(text[:-1] if factor != 1 else text) * factor)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise ConfigError(f'--parameters {text}: write a number such as 1.3B, 350M or 1300000000')
    return number


def _precision_asked_for(ds_config: dict) -> str:
    for section, precision in (('bf16', 'amp_bf16'), ('fp16', 'amp_fp16')):
        values = ds_config.get(section)
        if isinstance(values, dict) and values.get('enabled') is True:
            return precision
    return 'amp_bf16' if 'bf16' in ds_config else 'amp_fp16' if 'fp16' in ds_config else 'fp32'


def _optimizer(name: str) -> torch.optim.Optimizer:
    if name not in registry.OPTIMIZERS:
        raise ConfigError(f'--optimizer {name}: unknown name{suggestion(name, registry.OPTIMIZERS)}')
    return load(registry.OPTIMIZERS[name])([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
