"""Features of a ds_config at work: what each does to the weights, and what else it does. Runs inside rank processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from composer import Callback, ComposerModel, Trainer
from composer.core import State
from composer.optim import LinearWithWarmupScheduler
from torch import nn

from composer_ds import DeepSpeed
from tests.distributed.bf16_cases import half_trainer
from tests.distributed.parity_cases import CASES, OPTIMIZERS, Case, weights_of

_CUT = {'stage3_param_persistence_threshold': 0, 'sub_group_size': 70, 'reduce_bucket_size': 60}


class Block(nn.Module):
    """Too fine-grained for ZeRO 3 to gather its layers one by one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.outer = nn.Linear(4, 5)

    def forward(self, hidden):
        return self.outer(torch.tanh(self.inner(hidden)))


class WithBlock(ComposerModel):
    """A wide layer, a block and a narrow one."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 100)
        self.narrow = nn.Linear(100, 5)
        self.block = Block()
        self.head = nn.Linear(5, 2)

    def forward(self, batch):
        return self.head(self.block(torch.tanh(self.narrow(torch.tanh(self.wide(batch[0]))))))

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


class Slow(WithBlock):
    """Takes ``PAUSE_SEC`` for each forward pass."""

    PAUSE_SEC = 0.03

    def forward(self, batch):
        time.sleep(self.PAUSE_SEC)
        return super().forward(batch)


_CASES = CASES | {'block': Case(WithBlock), 'slow': Case(Slow)}


def _trainer(case_name: str, settings: dict[str, Any] | None, duration: str = '3ba', **arguments: Any) -> Trainer:
    case = _CASES[case_name]
    torch.manual_seed(17)
    model = case.model()
    return Trainer(
        model=model,
        optimizers=OPTIMIZERS['sgd'](list(model.parameters())),
        schedulers=LinearWithWarmupScheduler(t_warmup='3ba', alpha_f=0.1),
        train_dataloader=case.loader(case.dataset()),
        max_duration=duration,
        device='cpu',
        algorithms=[] if settings is None else [DeepSpeed(**settings)],
        seed=5,
        progress_bar=False,
        **{'device_train_microbatch_size': 3, **arguments},
    )


def _engine(trainer: Trainer) -> Any:
    return trainer.state.algorithms[0].ds_engine  # pyright: ignore[reportAttributeAccessIssue]


def _settings(stage: int, ds_config: dict[str, Any], offload: str | None = None) -> dict[str, Any]:
    ds_config = {**ds_config, 'zero_optimization': {'stage': stage, **ds_config.get('zero_optimization', {})}}
    return {'ds_config': ds_config, 'offload_optimizer': offload}


class _Watch(Callback):
    """Calls a function with Composer's state on one event and keeps what it says."""

    def __init__(self, event: str, look: Callable[[Any], Any]):
        self.seen: list[Any] = []
        setattr(self, event, lambda state, logger: self.seen.append(look(state)))


def _engine_of(state: State) -> Any:
    return next(part.ds_engine for part in state.algorithms if isinstance(part, DeepSpeed))


def _watch(stage: int, zero: dict[str, Any], event: str, look: Callable[[Any], Any], case: str = 'block') -> list[Any]:
    watch = _Watch(event, lambda state: look(_engine_of(state)))
    trainer = _trainer(case, _settings(stage, {'zero_optimization': zero}), '1ba', callbacks=[watch])
    trainer.fit()
    trainer.close()
    return watch.seen


@functools.cache
def _weights(case: str) -> dict[str, torch.Tensor]:
    trainer = _trainer(case, None)
    trainer.fit()
    weights = weights_of(trainer)
    trainer.close()
    return weights


def differences(stage: int, offload: str | None, ds_configs: list[dict[str, Any]], case: str) -> list[float]:
    """Return for each ds_config the largest difference of the weights to plain Composer."""
    found = []
    for ds_config in ds_configs:
        trainer = _trainer(case, _settings(stage, ds_config, offload))
        trainer.fit()
        ours = weights_of(trainer)
        trainer.close()
        found.append(max(float((ours[name] - value).abs().max()) for name, value in _weights(case).items()))
    return found


def least_move(case: str) -> float:
    """Return how far plain Composer moved the weights at least, in any parameter."""
    torch.manual_seed(17)
    before = _CASES[case].model().state_dict()
    return min(float((value - before[name]).abs().max()) for name, value in _weights(case).items())


def learning_rates() -> list[float]:
    """Return the learning rate of each batch in plain Composer."""
    watch = _Watch('before_train_batch', lambda state: state.optimizers[0].param_groups[0]['lr'])
    trainer = _trainer('block', None, '5ba', callbacks=[watch])
    trainer.fit()
    trainer.close()
    return watch.seen


def log_level(level: str) -> int:
    """Return the level of DeepSpeed's logger while there is an engine."""
    from deepspeed.utils import logger

    trainer = _trainer('block', _settings(2, {'log_level': level}))
    found = logger.level
    trainer.close()
    return found


def output_of(stage: int, ds_config: dict[str, Any], case: str = 'block', **arguments: Any) -> tuple[str, str]:
    """Train for three batches and return what was printed and what DeepSpeed's logger let through."""
    from deepspeed.utils import logger

    printed, logged = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed), _as_without_zero_3():
            trainer = _trainer(case, _settings(stage, ds_config), **arguments)
            trainer.fit()
            trainer.close()
    finally:
        logger.removeHandler(handler)
    return printed.getvalue(), logged.getvalue()


def _as_without_zero_3():
    """Undo inside what DeepSpeed leaves behind in a process that has trained with ZeRO 3."""
    return mock.patch('torch.nn.functional.linear', torch._C._nn.linear)


@contextlib.contextmanager
def _without_refusal():
    """Let everything in the ds_config through, to see whether the reason of a refusal still holds."""

    def all_of_it(settings):
        return {key: value for key, value in settings.ds_config.items() if key != 'zero_optimization'}

    with (
        mock.patch('composer_ds.conflicts.problems_of_features', return_value=()),
        mock.patch('composer_ds.conflicts.problems_of_features_with_trainer', return_value=(), create=True),
        mock.patch('composer_ds.ownership.passed_on', all_of_it),
    ):
        yield


def output_without_refusal(stage: int, ds_config: dict[str, Any], **arguments: Any) -> tuple[str, str]:
    """As ``output_of``, for what is refused."""
    with _without_refusal():
        return output_of(stage, ds_config, **arguments)


def round_robin(stage: int) -> dict[str, float]:
    """Train with round_robin_gradients; compare the model's own parameters, and the partitions."""
    with _without_refusal():
        trainer = _trainer('divides', _settings(stage, {'zero_optimization': {'round_robin_gradients': True}}))
        trainer.fit()
        trained = {name: parameter.detach() for name, parameter in _engine(trainer).module.named_parameters()}
        oracle = _weights('divides')
        # Put together by DeepSpeed's record of where each lies, as optimizer state and 16-bit weights are.
        face: Any = trainer.state.model
        partitions = face._partitions
        owned = {fragment.name: fragment.master for fragment in partitions.fragments}
        saved = {name: partitions.assemble(name, owned.get(name)) for name in oracle}
        trainer.close()
    return {
        'trained': max(float((trained[name] - value).abs().max()) for name, value in oracle.items()),
        'saved': max(float((saved[name] - value).abs().max()) for name, value in oracle.items()),
    }


def communications(stage: int) -> dict[str, dict[int, tuple[int, list[float]]]]:
    """Return what the comms logger notes of one batch of two microbatches: by operation and bytes, how often; times."""
    from deepspeed.comm import comm

    comm.comms_logger.reset_data()
    try:
        output_without_refusal(stage, {'comms_logger': {'enabled': True, 'prof_all': True}}, duration='2ba')
        noted = comm.comms_logger.get_raw_data()
    finally:
        comm.comms_logger.enabled = False
    return {name: {size: (one[0], one[1]) for size, one in by_size.items()} for name, by_size in noted.items()}


def python_gc() -> list[bool]:
    """Return whether Python's garbage collector is on before, while and after training."""
    seen = [gc.isenabled()]
    watch = _Watch('batch_end', lambda _: gc.isenabled())
    trainer = _trainer('block', _settings(2, {'disable_python_gc': True}), '1ba', callbacks=[watch])
    trainer.fit()
    trainer.close()
    return [*seen, *watch.seen, gc.isenabled()]


def gradient_norm(stage: int, compute: bool) -> Any:
    """Return the norm that the engine tells after a batch."""
    zero = {'compute_grad_norm': compute}
    return _watch(stage, zero, 'batch_end', lambda ds_engine: ds_engine.get_global_grad_norm())[0]


def unused_parameters(stage: int) -> str:
    """Train a model that does not use all of its parameters and return the error."""
    zero = {'zero_optimization': {'ignore_unused_parameters': False}}
    trainer = _trainer('sometimes', _settings(stage, zero, 'cpu'), device_train_microbatch_size=2)
    with contextlib.closing(trainer):
        try:
            trainer.fit()
        except AssertionError as error:
            return str(error)
    return ''


def padded_elements(stage: int, alignment: bool) -> int:
    """Return the elements of this rank's flat partitions."""
    found = _watch(stage, {'parameter_alignment': alignment}, 'batch_end', _flat_elements)
    return found[0]


def _flat_elements(ds_engine: Any) -> int:
    return sum(flat.numel() for flat in ds_engine.optimizer.single_partition_of_fp32_groups)


def immediate_gradients(immediate: bool) -> tuple[bool, dict[str, torch.Tensor]]:
    """Train in bf16 with ZeRO 1 and return what the optimizer was told, and the weights."""
    section = {'enabled': True, 'immediate_grad_update': immediate}
    trainer = half_trainer('zero1', {'bf16': section}, max_duration='2ba')
    trainer.fit()
    told = _engine(trainer).optimizer.immediate_grad_update
    weights = weights_of(trainer)
    trainer.close()
    return told, weights


@contextlib.contextmanager
def fresh_groups():
    """Forget the ranks' groups of hpZ afterwards: DeepSpeed keeps them for all later engines of the process."""
    from deepspeed.utils import groups

    assert groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is None
    try:
        yield
    finally:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def second_copies(partition_size: int) -> list[tuple[int, int | None]]:
    """Return after a forward pass each parameter's elements and those of its second copy on this rank."""

    def look(ds_engine):
        parameters = ds_engine.module.parameters()
        copies = [(p.ds_numel, p.ds_secondary_tensor) for p in parameters]
        return [(numel, None if copy is None else copy.numel()) for numel, copy in copies]

    zero = {'zero_hpz_partition_size': partition_size, 'stage3_param_persistence_threshold': 0}
    with fresh_groups():
        return _watch(3, zero, 'after_forward', look)[0]


def hpz_differences(partition_size: int) -> list[float]:
    """Return the differences to plain Composer with hpZ, with and without offload."""
    zero = {'zero_hpz_partition_size': partition_size, **_CUT}
    with fresh_groups():
        return [
            *differences(3, None, [{'zero_optimization': zero}], 'divides'),
            *differences(3, 'cpu', [{'zero_optimization': {**zero, 'offload_param': {'device': 'cpu'}}}], 'divides'),
        ]


def hpz_loads(pending: bool) -> float:
    """Load other weights after training with hpZ and return how far the outputs are from those of the weights loaded.

    ``pending``: after a forward pass whose gradients nobody has asked for, when there are second copies of the weights.
    """
    zero = {'zero_hpz_partition_size': 2, 'stage3_param_persistence_threshold': 0}
    with fresh_groups():
        trainer = _trainer('block', _settings(3, {'zero_optimization': zero}))
        trainer.fit()
        torch.manual_seed(99)
        other, batch = WithBlock(), (torch.randn(3, 6), torch.randn(3, 2))
        model = trainer.state.model
        if pending:
            model(batch)
        model.load_state_dict(other.state_dict())
        with torch.no_grad():
            difference = float((model(batch) - other(batch)).abs().max())
        trainer.close()
    return difference


def leaves(zero: dict[str, Any]) -> list[str]:
    """Return the classes of the modules that ZeRO 3 gathers as a whole."""
    from deepspeed.utils import get_z3_leaf_modules

    def look(ds_engine):
        return [type(module).__name__ for module in get_z3_leaf_modules(ds_engine.module)]

    return _watch(3, zero, 'batch_end', look)[0]


def saved_shapes(folder: str, gather: bool) -> dict[str, tuple[int, ...]] | None:
    """Let DeepSpeed write the weights under ZeRO 3 and return their shapes, if it does."""

    def look(ds_engine):
        return ds_engine.save_16bit_model(folder)

    zero = {'stage3_gather_16bit_weights_on_model_save': gather, 'stage3_param_persistence_threshold': 0}
    if not _watch(3, zero, 'batch_end', look)[0]:
        return None
    saved = torch.load(Path(folder) / 'pytorch_model.bin', weights_only=True)
    return {name: tuple(value.shape) for name, value in saved.items()}


def linear_while_training(memory_efficient: bool) -> str:
    """Return the module of ``torch.nn.functional.linear`` while ZeRO 3 trains, as in a process that never did."""
    zero = {'memory_efficient_linear': memory_efficient}
    with _as_without_zero_3():
        return _watch(3, zero, 'after_forward', lambda _: torch.nn.functional.linear.__module__)[0]


def sanity_checks(on: bool) -> bool:
    """Return whether the ZeRO 3 optimizer checks."""
    zero = {'enable_sanity_checks': on}
    return _watch(3, zero, 'batch_end', lambda ds_engine: ds_engine.optimizer.enable_sanity_checks)[0]


def checkpointing_is_configured() -> bool:
    """Return whether DeepSpeed's activation checkpointing follows the ds_config."""
    import deepspeed

    output_without_refusal(2, {'activation_checkpointing': {'partition_activations': True}}, duration='1ba')
    return deepspeed.checkpointing.is_configured()
