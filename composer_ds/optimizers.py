"""Which optimizers ZeRO may run, and the ``optimizer`` and ``scheduler`` sections of a ds_config.

The Trainer's optimizer and schedulers are the owners. The algorithm is never swapped for another.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from composer.optim import DecoupledSGDW

from composer_ds.facts import Settings, TrainerFacts, mapping

__all__ = [
    'ELEMENTWISE',
    'is_composers_default',
    'optimizer_from_section',
    'problems_of_optimizer',
    'problems_of_scheduler',
    'problems_of_schedulers',
    'section_builds_the_optimizer',
    'use_fused_kernel',
]

ELEMENTWISE = frozenset({
    'ASGD', 'Adadelta', 'Adam', 'AdamW', 'Adamax', 'DecoupledAdamW', 'DecoupledSGDW', 'DeepSpeedCPUAdam',
    'DeepSpeedCPULion', 'FusedAdam', 'FusedLion', 'Lion', 'NAdam', 'RAdam', 'RMSprop', 'Rprop', 'SGD',
})  # fmt: skip
"""Optimizers whose update of an element depends on that element alone, so that ZeRO may flatten and cut parameters."""

_NEEDS_SHAPES = {
    'LAMB': 'scales each layer by the norms of its weights and of its update',
    'Lamb': 'scales each layer by the norms of its weights and of its update',
    'FusedLamb': 'scales each layer by the norms of its weights and of its update',
    'LARS': 'scales each layer by the norms of its weights and of its gradient',
    'Adafactor': "keeps row and column means of the squared gradient, and scales by the parameter's root mean square",
    'Shampoo': 'multiplies by matrices of the shape of the parameter',
    'SOAP': 'rotates the gradient by matrices of the shape of the parameter',
    'Muon': 'orthogonalizes the momentum as a matrix',
    'MuonWithAuxAdam': 'orthogonalizes the momentum as a matrix',
    'GaLore': 'projects the gradient as a matrix',
    'Adagrad': 'is element-wise, but DeepSpeed (0.19) builds another one in its place, which ignores the schedule',
    'DeepSpeedCPUAdagrad': 'is element-wise, but DeepSpeed (0.19) builds another one in its place',
    'LBFGS': 'calls its closure several times and takes products over all parameters',
    'SparseAdam': 'needs sparse gradients, which ZeRO has not',
    'OnebitAdam': 'compresses the communication itself, which ZeRO 2 and 3 do already',
    'ZeroOneAdam': 'compresses the communication itself, which ZeRO 2 and 3 do already',
    'OnebitLamb': 'scales each layer by the norms of its weights and of its update',
}
"""Optimizers that are refused although the user says otherwise, with what they do."""

_BUILT = {'adam': torch.optim.Adam, 'adamw': torch.optim.AdamW, 'sgd': torch.optim.SGD}
"""What an ``optimizer`` section may name, in lower case, as DeepSpeed reads it."""

_SCHEDULERS = {
    'WarmupLR': "composer.optim.ConstantWithWarmupScheduler(t_warmup='{warmup}ba')",
    'WarmupDecayLR': "composer.optim.LinearWithWarmupScheduler(t_warmup='{warmup}ba')",
    'WarmupCosineLR': "composer.optim.CosineAnnealingWithWarmupScheduler(t_warmup='{warmup}ba')",
    'OneCycle': 'torch.optim.lr_scheduler.OneCycleLR(...)',
    'LRRangeTest': 'torch.optim.lr_scheduler.LambdaLR(...)',
}
"""DeepSpeed's schedulers, with what to give to the Trainer instead."""


def is_composers_default(optimizer: Any) -> bool:
    """Say whether this is the optimizer that Composer (0.32) makes for a Trainer that was given none.

    Composer keeps no record of it, so an equal one of the user's own is taken for it, too.

    Args:
        optimizer (Any): The Trainer's optimizer.

    Returns:
        bool: Whether it is ``DecoupledSGDW(model.parameters(), lr=0.1)``.
    """
    if type(optimizer) is not DecoupledSGDW or len(optimizer.param_groups) != 1:
        return False
    default = DecoupledSGDW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return optimizer.defaults == default.defaults


def section_builds_the_optimizer(settings: Settings, facts: TrainerFacts) -> bool:
    """Say whether the ds_config's ``optimizer`` section is to be built, because the Trainer was given none.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Returns:
        bool: Whether it is.
    """
    given = settings.ds_config.get('optimizer')
    none_given = facts.optimizer_from_section or facts.optimizer is None or is_composers_default(facts.optimizer)
    return given not in (None, 'auto') and none_given


def problems_of_optimizer(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    """Find what is wrong with the optimizer, and where the ds_config disagrees with it.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One problem each.
    """
    if section_builds_the_optimizer(settings, facts):
        yield from _section_alone(settings.ds_config['optimizer'])
        return
    yield from _section_beside(settings.ds_config.get('optimizer'), facts.optimizer)
    if facts.optimizer is None:
        yield 'The Trainer has no optimizer; write Trainer(optimizers=torch.optim.AdamW(model.parameters()))'
        return
    name, kinds = type(facts.optimizer).__name__, [cls.__name__ for cls in type(facts.optimizer).__mro__]
    allowed = settings.ds_config.get('zero_allow_untested_optimizer')
    for kind in kinds:
        if kind in _NEEDS_SHAPES and kind not in ELEMENTWISE:
            yield (
                f'Trainer(optimizers={name}(...)): {kind} {_NEEDS_SHAPES[kind]}; ZeRO flattens parameters and cuts '
                'them in pieces, so it would train wrongly without a word. Use an element-wise optimizer: '
                f'{", ".join(sorted(ELEMENTWISE))}'
            )
            return
    if name not in ELEMENTWISE and allowed is not True:
        yield (
            f'Trainer(optimizers={name}(...)): ZeRO flattens parameters and cuts them in pieces, which is right for '
            'optimizers that treat every element by itself, and silently wrong for those that need the shape or the '
            'norm of a parameter (LAMB, LARS, Adafactor, Shampoo, Muon). Known to be right: '
            f'{", ".join(sorted(ELEMENTWISE))}. If yours is element-wise, too, say so with '
            "ds_config={'zero_allow_untested_optimizer': True}"
        )
    if allowed is False and not kinds[0].startswith(('Adam', 'DeepSpeedCPU', 'Fused')):
        yield (
            f'ds_config.zero_allow_untested_optimizer=False and Trainer(optimizers={name}(...)) disagree: DeepSpeed '
            'has not tested it (here it is tested against plain Composer); leave the key out'
        )
    forced = settings.ds_config.get('zero_force_ds_cpu_optimizer')
    if forced is True and settings.offload('offload_optimizer') != 'none' and not name.startswith('DeepSpeedCPU'):
        yield (
            f'ds_config.zero_force_ds_cpu_optimizer=True and Trainer(optimizers={name}(...)) disagree; write '
            'Trainer(optimizers=deepspeed.ops.adam.DeepSpeedCPUAdam(...)), or leave the key out: Adam and AdamW are '
            "run by torch's fused kernel, which is as fast"
        )


def _section_alone(section: Any) -> Iterator[str]:
    kind, parameters = mapping(section).get('type'), mapping(mapping(section).get('params'))
    if str(kind).lower() not in _BUILT:
        reason = next((why for name, why in _NEEDS_SHAPES.items() if name.lower() == str(kind).lower()), None)
        yield (
            f'ds_config.optimizer.type={kind!r}: '
            + (f'it {reason}' if reason else 'unknown here')
            + '. Allowed are Adam, AdamW and SGD; give any other to Trainer(optimizers=...)'
        )
        return
    if 'lr' not in parameters or parameters['lr'] == 'auto':
        given = "'auto', and there is nothing to take it from" if 'lr' in parameters else 'missing'
        yield f'ds_config.optimizer.params.lr is {given}: write a number, or give Trainer(optimizers=...)'
    known = {*inspect.signature(_BUILT[str(kind).lower()]).parameters} - {'params'} | {'adam_w_mode', 'torch_adam'}
    for key in parameters:
        if key not in known:
            yield f'ds_config.optimizer.params.{key}: {kind} has no such argument; it has {", ".join(sorted(known))}'


def _section_beside(section: Any, optimizer: Any) -> Iterator[str]:
    if section in (None, 'auto') or optimizer is None:
        return
    kind, ours = mapping(section).get('type', 'auto'), type(optimizer).__name__
    fixed = {key: value for key, value in mapping(mapping(section).get('params')).items() if value != 'auto'}
    if fixed:
        both = ', '.join(f'{key}={value!r} (Trainer: {optimizer.defaults.get(key)!r})' for key, value in fixed.items())
        yield (
            f"Trainer(optimizers={ours}(...)) and ds_config.optimizer.params both decide {both}; the Trainer's "
            "optimizer is the owner: leave the section out or write 'auto' for its values"
        )
    if kind != 'auto' and str(kind).lower() != ours.lower():
        yield (f'Trainer(optimizers={ours}(...)) and ds_config.optimizer.type={kind!r} disagree; leave the section out')


def optimizer_from_section(section: Any, default: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Build the optimizer that a ds_config describes. Called at ``INIT``, where the Trainer was given none.

    Args:
        section (Any): ``{'type': ..., 'params': {...}}``.
        default (torch.optim.Optimizer): Composer's default, whose parameter groups (the model's) are taken over.

    Returns:
        torch.optim.Optimizer | None: Of torch; None where the section is wrong, which :func:`problems_of_optimizer`
        explains later, with all other problems.
    """
    if any(_section_alone(section)):
        return None
    kind = str(section['type']).lower()
    arguments = {key: value for key, value in mapping(section.get('params')).items() if value != 'auto'}
    arguments.pop('torch_adam', None)
    # DeepSpeed reads type Adam as AdamW, unless adam_w_mode is false.
    if arguments.pop('adam_w_mode', True) and kind == 'adam':
        kind = 'adamw'
    if 'betas' in arguments:
        arguments['betas'] = tuple(arguments['betas'])
    groups = [{'params': group['params']} for group in default.param_groups]
    return _BUILT[kind](groups, **arguments)


def problems_of_scheduler(settings: Settings, facts: TrainerFacts) -> Iterator[str]:
    """Find a ``scheduler`` section that the Trainer's schedulers do not settle.

    Args:
        settings (Settings): What the user gave to ``DeepSpeed``.
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One problem each.
    """
    yield from problems_of_schedulers(facts)
    section = settings.ds_config.get('scheduler')
    if section in (None, 'auto'):
        return
    kind, parameters = mapping(section).get('type'), mapping(mapping(section).get('params'))
    fixed = [key for key, value in parameters.items() if value != 'auto']
    if facts.number_of_schedulers and not fixed:
        return  # everything is left to the Trainer, which has a schedule
    warmup = parameters.get('warmup_num_steps')
    instead = _SCHEDULERS.get(str(kind), 'a scheduler of composer.optim or torch').format(
        warmup=warmup if isinstance(warmup, int) else 1000
    )
    yield (
        f'ds_config.scheduler (type {kind!r}): the Trainer owns the schedule, in its own units and with its own '
        f'checkpoints; leave the section out and write Trainer(schedulers={instead})'
    )


def problems_of_schedulers(facts: TrainerFacts) -> Iterator[str]:
    """Find schedulers that Composer cannot drive.

    Args:
        facts (TrainerFacts): What the Trainer knows.

    Yields:
        str: One problem each.
    """
    if 'ReduceLROnPlateau' in facts.scheduler_classes:
        yield (
            'schedulers=ReduceLROnPlateau(...): it needs the value of a metric in each call, and Composer gives none; '
            "use another schedule, or lower the lr of trainer.state.optimizers[0].param_groups in a callback's eval_end"
        )


def use_fused_kernel(optimizer: torch.optim.Optimizer, offloaded: bool) -> bool:
    """Say whether an offloaded Adam is to be run by torch's fused CPU kernel: the same mathematics, ten times as fast.

    DeepSpeed's own CPU kernel is no faster than torch's (measured: 31 and 35 ms for 50 million elements, where AdamW
    without either takes 334 ms), and needs two minutes to compile. ``fused=False`` or ``foreach=True`` says no.

    Args:
        optimizer (torch.optim.Optimizer): The user's optimizer.
        offloaded (bool): Whether its state lives in host memory.

    Returns:
        bool: Whether it is torch's own Adam or AdamW, and the user has not chosen an implementation.
    """
    if not offloaded or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return all(
        group['fused'] is None and group['foreach'] is None and not group['differentiable'] and not group['capturable']
        and not torch.is_tensor(group['lr'])
        for group in optimizer.param_groups
    )  # fmt: skip
