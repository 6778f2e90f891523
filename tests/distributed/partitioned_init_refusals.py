"""What partitioned_init refuses. Runs inside rank processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composer.utils import dist
from torch import nn

from composer_ds import ComposerDSError, DeepSpeed, partitioned_init
from tests.distributed.partitioned_init_cases import Everything, built, limited, trainer


def _message(function: Callable[[], Any]) -> str:
    try:
        function()
    except ComposerDSError as error:
        return str(error)
    raise AssertionError('no error')


def _nested() -> None:
    with partitioned_init(zero_stage=3, device='cpu'), partitioned_init(zero_stage=3, device='cpu'):
        pass


def _differing() -> None:
    with partitioned_init(zero_stage=3, device='cpu'):
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        chosen: Any = layers[dist.get_global_rank()]
        chosen.weight.data.zero_()


def _trainer_inside() -> None:
    with partitioned_init(zero_stage=3, device='cpu'):
        trainer(Everything(), DeepSpeed(zero_stage=3), max_duration='1ba')


def _beside_others(what: str) -> None:
    import deepspeed
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    if what == 'transformers':
        alive = HfDeepSpeedConfig({'zero_optimization': {'stage': 3}})
        _nested()
        del alive
    with deepspeed.zero.Init(config_dict_or_path={'train_batch_size': dist.get_world_size()}), partitioned_init(3):
        pass


def _given(settings: dict[str, Any], change: Callable[[Any], Any] | None = None) -> str:
    """Build a model, change it after the context, and give it to a Trainer."""
    model = built(Everything, 11)
    if change is not None:
        change(model)
    algorithms = [DeepSpeed(**settings)] if settings else []
    return _message(lambda: trainer(model, *algorithms, max_duration='1ba').fit())


def _by_data(model: Any) -> None:
    model.root.data = torch.ones(3)


def errors() -> dict[str, str]:
    """What is refused, and how."""
    limited(300)
    messages = {
        'nothing': _message(lambda: partitioned_init().__enter__()),
        'stage': _message(lambda: partitioned_init(zero_stage=4).__enter__()),
        'two stages': _message(
            lambda: partitioned_init(3, ds_config={'zero_optimization': {'stage': 2}}).__enter__(),
        ),
        'nvme': _message(lambda: partitioned_init(zero_stage=3, offload_param='nvme').__enter__()),
        'hpz': _message(
            lambda: partitioned_init(3, ds_config={'zero_optimization': {'zero_hpz_partition_size': 2}}).__enter__()
        ),
        'nested': _message(_nested),
        'trainer inside': _message(_trainer_inside),
        'transformers': _message(lambda: _beside_others('transformers')),
        'zero.Init': _message(lambda: _beside_others('zero.Init')),
        'zero 2': _given({'zero_stage': 2}),
        'offload': _given({'zero_stage': 3, 'offload_param': 'cpu'}),
        'key': _given({'zero_stage': 3, 'ds_config': {'zero_optimization': {'allgather_sequential': True}}}),
        'in place': _given({'zero_stage': 3}, lambda model: nn.init.normal_(model.root)),
        'by data': _given({'zero_stage': 3}, _by_data),
        'plain': _given({}),
        'state_dict': _message(built(Everything, 11).state_dict),
        'load_state_dict': _message(lambda: built(Everything, 11).load_state_dict({}, strict=False)),
    }
    if dist.get_world_size() > 1:
        messages['differing'] = _message(_differing)
    for stage in (1, 2):
        with partitioned_init(zero_stage=stage, device='cpu'):
            assert nn.Linear(2, 3).weight.shape == (3, 2)  # as usual
    return messages
