"""Making the objects that a checked run names."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from composer_ds.errors import ConfigError
from composer_ds.launch.arguments import Choice
from composer_ds.launch.problems import shown
from composer_ds.launch.schema import DeepSpeedConfig
from composer_ds.launch.task import Task

if TYPE_CHECKING:
    import torch
    from composer.core import Algorithm
    from pydantic import BaseModel

__all__ = ['construction', 'make', 'make_algorithms', 'make_optimizer', 'require_samples']


def construction(
    model: BaseModel, deepspeed: DeepSpeedConfig | None, device: str | None
) -> AbstractContextManager[None]:
    """Says in which context a recipe builds its model and the launcher its optimizer.

    Args:
        model (BaseModel): The recipe's ``ModelConfig``. Where it has a field ``partitioned_init`` that is true, the
            model is built already partitioned, if the run partitions weights at all.
        deepspeed (DeepSpeedConfig | None): The section; ``None`` is plain Composer, where ranks hold whole weights.
        device (str | None): As for the Trainer.

    Returns:
        AbstractContextManager[None]: Collective where it partitions: every rank enters and leaves it.
    """
    if deepspeed is None or not getattr(model, 'partitioned_init', False):
        return nullcontext()
    from composer_ds import partitioned_init

    settings = ('zero_stage', 'offload_optimizer', 'offload_param', 'ds_config')
    return partitioned_init(**deepspeed.model_dump(include={*settings}, exclude_unset=True), device=device)


def make(choice: Choice, kind: type | None = None, **fixed: Any) -> Any:
    """Makes one object by the class or function that the YAML chose.

    Args:
        choice (Choice): The class or function and its checked arguments.
        kind (type | None): What the object must be. Default: anything.
        **fixed (Any): Arguments that do not come from the YAML.

    Returns:
        Any: The object.

    Raises:
        ConfigError: A value was refused, a package is not installed, or the object is not of the kind.
    """
    # Copied because classes keep and change what they get, and the configuration is logged afterwards.
    arguments = copy.deepcopy(choice.arguments)
    try:
        made = choice.factory(**fixed, **arguments)
    except (ImportError, TypeError, ValueError) as error:
        reason = ' '.join(str(error).split())
        raise ConfigError(f'{choice.section}: {choice.name} refused {shown(choice.arguments)}: {reason}') from error
    if kind is not None and not isinstance(made, kind):
        raise ConfigError(f'{choice.section}: {choice.name} made a {type(made).__name__}; a {kind.__name__} is needed')
    return made


def make_optimizer(choice: Choice, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Makes the optimizer of the parameters that train.

    Args:
        choice (Choice): With ``no_decay_on_norms_and_biases``, parameters of one dimension (biases, and the weights of
            norms) get a group of their own without weight decay.
        model (torch.nn.Module): The task's model.

    Returns:
        torch.optim.Optimizer: On every rank with the same groups in the same order.
    """
    arguments = dict(choice.arguments)
    separate = arguments.pop('no_decay_on_norms_and_biases', False)
    parameters: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if separate:
        groups = [
            {'params': [parameter for parameter in parameters if parameter.ndim > 1]},
            {'params': [parameter for parameter in parameters if parameter.ndim <= 1], 'weight_decay': 0.0},
        ]
        parameters = [group for group in groups if group['params']]
    import torch

    return make(Choice(choice.section, choice.factory, arguments), torch.optim.Optimizer, params=parameters)


def make_algorithms(deepspeed: DeepSpeedConfig | None) -> list[Algorithm]:
    """Makes the `DeepSpeed` algorithm, or none for training under Composer's DDP.

    Args:
        deepspeed (DeepSpeedConfig | None): The section.

    Returns:
        list[Algorithm]: At most one.
    """
    if deepspeed is None:
        return []
    from composer_ds import DeepSpeed

    return [DeepSpeed(**deepspeed.model_dump(exclude_unset=True))]


def require_samples(task: Task, world_size: int) -> None:
    """Refuses training data with fewer samples than ranks, which would leave a rank without work.

    Args:
        task (Task): The task; a dataloader without a dataset of known length passes.
        world_size (int): Number of ranks.

    Raises:
        ConfigError: On every rank alike.
    """
    loader = getattr(task.train_dataloader, 'dataloader', task.train_dataloader)
    dataset = getattr(loader, 'dataset', None)
    samples = _length(dataset)
    if samples == 0:
        raise ConfigError('data: the training data is empty: 0 samples')
    if samples is not None and samples < world_size:
        raise ConfigError(
            f'data: the training data has fewer samples ({samples}) than there are ranks ({world_size}); '
            'use more data, or start fewer ranks'
        )
    if _length(loader) == 0:
        raise ConfigError(
            f'data: the training data gives no batch on a rank ({samples} samples for {world_size} ranks); '
            'use a smaller batch, more data, or keep the incomplete last batch'
        )


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # a stream; torch's DataLoader over one raises, too
        return None
