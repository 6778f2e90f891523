"""Random combinations of Trainer arguments and a ds_config, some with conflicts planted in them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from composer import Trainer
from composer.algorithms import SAM, GradientClipping
from hypothesis import strategies as st

from composer_ds import ConfigError, DeepSpeed
from tests.distributed.parity_cases import Regression, _loader, _vectors, weights_of

BATCH = 4
"""Of each rank's dataloader; with 28 samples on two ranks the last batch of an epoch has 2."""


@dataclasses.dataclass(frozen=True)
class Combination:
    """What is given to ``DeepSpeed`` and to the Trainer, and the words by which each planted conflict is known."""

    deepspeed: dict[str, Any]
    microbatch_size: int
    clipping: tuple[str, float] | None = None
    norm: float = 0.0
    optimizer: str = 'SGD'
    sam: bool = False
    planted: tuple[tuple[str, ...], ...] = ()


@st.composite
def combinations(draw: st.DrawFn, world_size: int) -> Combination:
    """Draw a combination for a number of ranks; half of them without a conflict."""
    sound = draw(st.booleans())
    planted: list[tuple[str, ...]] = []
    ds_config: dict[str, Any] = {}
    zero: dict[str, Any] = {}
    arguments: dict[str, Any] = {'ds_config': ds_config}

    def plant(*words: str) -> None:
        assert not sound
        planted.append(words)

    def tempted(one_in: int = 3) -> bool:
        return not sound and draw(st.integers(1, one_in)) == 1

    stage = draw(st.integers(0, 3))
    in_argument, in_config = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    if in_argument:
        arguments['zero_stage'] = stage
    if in_config:
        zero['stage'] = stage
    if in_argument and in_config and tempted():
        zero['stage'] = (stage + 1) % 4
        plant(f'zero_stage={stage}', f'stage={zero["stage"]}', 'disagree')

    for place in ('offload_optimizer', 'offload_param'):
        possible = place == 'offload_optimizer' or stage == 3 or tempted()
        where = draw(st.sampled_from(['nowhere', 'argument', 'config', 'both'] if possible else ['nowhere']))
        if where in ('argument', 'both'):
            arguments[place] = 'cpu'
        if where in ('config', 'both'):
            zero[place] = {'device': 'cpu'}
        if where == 'both' and tempted():
            zero[place]['device'] = 'none'
            plant(f"{place}='cpu'", "device='none'")
        if where != 'nowhere' and place == 'offload_param' and stage < 3:
            plant('offload_param', f'stage {stage}', 'zero_stage=3')

    microbatch_size = draw(st.integers(1, BATCH))
    accumulation = -(-BATCH // microbatch_size)
    right = {
        'train_micro_batch_size_per_gpu': microbatch_size,
        'gradient_accumulation_steps': accumulation,
        'train_batch_size': BATCH * world_size,
    }
    for key, value in right.items():
        given = 'wrong' if tempted(6) else draw(st.sampled_from(['absent', 'auto', 'right']))
        if given == 'auto':
            ds_config[key] = 'auto'
        elif given == 'right':
            ds_config[key] = value
        elif given == 'wrong':
            # No multiple: that would be several batches in one optimizer step.
            ds_config[key] = value + 1 if value > 1 else draw(st.sampled_from([0, -1]))
            plant(f'ds_config.{key}={ds_config[key]}')

    kinds = ['conflict', 'value'] if tempted() else ['none', 'auto', 'config', 'algorithm', 'both']
    clipping, norm = _clipping(draw(st.sampled_from(kinds)), ds_config, plant)
    optimizer = 'Adagrad' if tempted(6) else 'SGD'
    if optimizer == 'Adagrad':
        plant('Adagrad')
    if draw(st.booleans()):
        zero.update(
            draw(
                st.fixed_dictionaries(
                    {},
                    optional={
                        'reduce_bucket_size': st.sampled_from(['auto', 50, 1000]),
                        'stage3_prefetch_bucket_size': st.sampled_from(['auto', 0, 40]),
                        'stage3_param_persistence_threshold': st.sampled_from(['auto', 0, 10]),
                        'contiguous_gradients': st.booleans(),
                        'overlap_comm': st.just(False),
                    },
                )
            )
        )
    if tempted(5):
        ds_config['gradient_acumulation_steps'] = 3
        plant('gradient_acumulation_steps', "'gradient_accumulation_steps'")
    if tempted(5):
        zero['sub_group_size'] = 'auto'
        plant('sub_group_size', "'auto'")
    if tempted(5):
        ds_config['scheduler'] = {'type': 'WarmupLR', 'params': {'warmup_num_steps': 10}}
        plant('WarmupLR', 'Trainer(schedulers=')
    for section in ('fp16', 'bf16'):
        ds_config |= draw(st.sampled_from([{}, {section: {'enabled': False}}, {section: {'enabled': 'auto'}}]))
    sam = tempted(6)
    if sam:
        plant('SAM')
    if zero or draw(st.booleans()):
        ds_config['zero_optimization'] = zero
    return Combination(arguments, microbatch_size, clipping, norm, optimizer, sam, tuple(planted))


def _clipping(kind: str, ds_config: dict[str, Any], plant) -> tuple[tuple[str, float] | None, float]:
    if kind == 'auto':
        ds_config['gradient_clipping'] = 'auto'
    if kind in ('config', 'both'):
        ds_config['gradient_clipping'] = 0.7
    if kind == 'conflict':
        ds_config['gradient_clipping'] = 0.3
        plant("'norm', 0.7", 'gradient_clipping=0.3')
    if kind == 'value':
        plant("'value', 0.7", "'norm'")
        return ('value', 0.7), 0.0
    return (('norm', 0.7) if kind in ('algorithm', 'both', 'conflict') else None), 0.0 if kind in (
        'none',
        'auto',
    ) else 0.7


def run(combination: Combination) -> dict[str, Any]:
    """Train on this rank; return the problems, or the largest difference to plain Composer and the least move."""
    torch.manual_seed(17)
    before = {name: value.clone() for name, value in Regression().state_dict().items()}
    try:
        ours = _train(combination, [DeepSpeed(**combination.deepspeed)])
    except ConfigError as error:
        return {'problems': error.problems}
    clipping = [GradientClipping('norm', combination.norm)] if combination.norm else []
    oracle = _train(dataclasses.replace(combination, clipping=None, sam=False), clipping)
    return {
        'problems': [],
        'difference': max(float((ours[name] - oracle[name]).abs().max()) for name in oracle),
        'least_move': min(float((ours[name] - before[name]).abs().max()) for name in oracle),
    }


def _train(combination: Combination, algorithms: list[Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(17)
    model = Regression()
    optimizers = {
        'SGD': lambda: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        'Adagrad': lambda: torch.optim.Adagrad(model.parameters()),
    }
    if combination.clipping is not None:
        algorithms = [*algorithms, GradientClipping(*combination.clipping)]
    if combination.sam:
        algorithms = [*algorithms, SAM()]
    trainer = Trainer(
        model=model,
        optimizers=optimizers[combination.optimizer](),
        train_dataloader=_loader(_vectors()),
        max_duration='5ba',
        device='cpu',
        device_train_microbatch_size=combination.microbatch_size,
        algorithms=algorithms,
        seed=5,
        progress_bar=False,
    )
    trainer.fit()
    weights = weights_of(trainer)
    trainer.close()
    return weights
