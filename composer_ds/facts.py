"""What the user gave to ``DeepSpeed`` and what the Trainer knows: the two sources of all settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ['PRECISIONS', 'Settings', 'TrainerFacts', 'mapping', 'offload_device', 'precision_of']

PRECISIONS = {'fp32': None, 'amp_bf16': 'bf16'}
"""Composer's precisions that are supported, with the section of the ds_config that each needs."""


@dataclass(frozen=True)
class Settings:
    """What the user gave to ``DeepSpeed(...)``.

    Args:
        zero_stage (int): 0 to 3.
        offload_optimizer (str | None): ``'cpu'`` or None.
        offload_param (str | None): ``'cpu'`` or None.
        ds_config (Mapping[str, Any]): The ds_config, read.
    """

    zero_stage: int
    offload_optimizer: str | None
    offload_param: str | None
    ds_config: Mapping[str, Any]


@dataclass(frozen=True)
class TrainerFacts:
    """What the Trainer knows when the engine is built.

    Args:
        precision (str): Composer's precision, such as ``'amp_bf16'``.
        on_cpu (bool): Whether the model is trained on the CPU.
        device_train_microbatch_size (int | float | str | None): As given to the Trainer; None when not given yet.
        number_of_deepspeed_algorithms (int): How often ``DeepSpeed`` stands in ``algorithms``.
        algorithms_and_callbacks (tuple[str, ...]): Names of the classes, and their bases, of all algorithms and
            callbacks.
        parallelism (tuple[str, ...]): Composer's other ways to shard that are on, such as ``('fsdp',)``.
        optimizer_class (str | None): Class name of the user's optimizer.
        trained_elements (int): Elements of all parameters that are trained.
        trained_without_optimizer (tuple[str, ...]): Names of trainable parameters that the optimizer does not hold.
        scalar_parameters (tuple[str, ...]): Names of parameters of shape ``()``.
        deepspeed_version (str): Of the installed package.
    """

    precision: str
    on_cpu: bool
    device_train_microbatch_size: int | float | str | None
    number_of_deepspeed_algorithms: int
    algorithms_and_callbacks: tuple[str, ...]
    parallelism: tuple[str, ...]
    optimizer_class: str | None
    trained_elements: int
    trained_without_optimizer: tuple[str, ...]
    scalar_parameters: tuple[str, ...]
    deepspeed_version: str


def precision_of(settings: Settings, facts: TrainerFacts) -> str:
    """Return the Trainer's precision, or amp_bf16 on a CPU, where only the ds_config can ask for it.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        str: Composer's name of the precision.
    """
    if facts.on_cpu and facts.precision == 'fp32' and mapping(settings.ds_config.get('bf16')).get('enabled') is True:
        return 'amp_bf16'
    return facts.precision


def offload_device(offload: Any) -> str:
    """Read the device of an ``offload_optimizer`` or ``offload_param`` section.

    Args:
        offload (Any): The section, or None.

    Returns:
        str: ``'none'`` when it names none.
    """
    return str(mapping(offload).get('device', 'none'))


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a section of a config, or an empty one where there is something else.

    Args:
        value (Any): A section, or None.

    Returns:
        Mapping[str, Any]: The section.
    """
    return value if isinstance(value, Mapping) else {}
