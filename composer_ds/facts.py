"""What the user gave to ``DeepSpeed`` and what the Trainer knows: the two sources of all settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ['DEFAULT_ZERO_STAGE', 'Settings', 'TrainerFacts', 'mapping', 'offload_device']

DEFAULT_ZERO_STAGE = 2


@dataclass(frozen=True)
class Settings:
    """What the user gave to ``DeepSpeed(...)``.

    Args:
        zero_stage (int | None): 0 to 3; None where the ds_config says it, or nobody.
        offload_optimizer (str | None): ``'cpu'`` or None.
        offload_param (str | None): ``'cpu'`` or None.
        ds_config (Mapping[str, Any]): The ds_config, read.
    """

    zero_stage: int | None
    offload_optimizer: str | None
    offload_param: str | None
    ds_config: Mapping[str, Any]

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section ``zero_optimization`` of the ds_config."""
        return mapping(self.ds_config.get('zero_optimization'))

    @property
    def stage(self) -> Any:
        """The ZeRO stage that was asked for, in whichever place."""
        if self.zero_stage is not None:
            return self.zero_stage
        stage = self.zero.get('stage', 'auto')
        return DEFAULT_ZERO_STAGE if stage == 'auto' else stage

    def offload(self, place: str) -> str:
        """Say where something is to be kept.

        Args:
            place (str): ``'offload_optimizer'`` or ``'offload_param'``.

        Returns:
            str: ``'cpu'``, ``'nvme'`` or ``'none'``.
        """
        return getattr(self, place) or offload_device(self.zero.get(place))


@dataclass(frozen=True)
class TrainerFacts:
    """What the Trainer knows when the engine is built. Alike on all ranks.

    Args:
        precision (str): Composer's precision, such as ``'amp_bf16'``.
        on_cpu (bool): Whether the model is trained on the CPU.
        fp16_supported (bool): Whether this device computes in fp16.
        world_size (int): Number of ranks.
        batch_sizes (tuple[int | None, ...] | None): Samples that each rank draws from its dataloader at a time; None
            for a dataloader that does not say. The whole is None when there is no dataloader yet.
        device_train_microbatch_size (int | float | str | None): As given to the Trainer, or the dataloader's batch
            size; None when nothing is known yet.
        number_of_deepspeed_algorithms (int): How often ``DeepSpeed`` stands in ``algorithms``.
        parts (tuple[Any, ...]): All algorithms and callbacks.
        parallelism (tuple[str, ...]): Composer's other ways to shard that are on, such as ``('fsdp',)``.
        optimizer (Any): The user's ``torch.optim.Optimizer``, or None.
        optimizer_from_section (bool): Whether it was built from the ds_config, because the Trainer was given none.
        hidden_size (int | None): Of the model, where its config names one.
        trained_elements (int): Elements of all parameters that are trained.
        trained_without_optimizer (tuple[str, ...]): Names of trainable parameters that the optimizer does not hold.
        frozen_parameters (tuple[str, ...]): Names of the floating-point parameters that are not trained.
        float_buffers (tuple[str, ...]): Names of the model's floating-point buffers.
        scheduler_classes (tuple[str, ...]): The names of the schedulers' classes.
        strided_parameters (tuple[str, ...]): Names of parameters whose elements do not lie in order.
    """

    precision: str
    on_cpu: bool
    fp16_supported: bool
    world_size: int
    batch_sizes: tuple[int | None, ...] | None
    device_train_microbatch_size: int | float | str | None
    number_of_deepspeed_algorithms: int
    parts: tuple[Any, ...]
    parallelism: tuple[str, ...]
    optimizer: Any
    optimizer_from_section: bool
    hidden_size: int | None
    trained_elements: int
    trained_without_optimizer: tuple[str, ...]
    frozen_parameters: tuple[str, ...]
    float_buffers: tuple[str, ...]
    scheduler_classes: tuple[str, ...] = ()
    strided_parameters: tuple[str, ...] = ()

    @property
    def number_of_schedulers(self) -> int:
        """How many learning-rate schedulers the Trainer has."""
        return len(self.scheduler_classes)


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
