"""What the user is told unasked: notes on the plan, and at the start of ``fit`` the block of what will be run."""

from __future__ import annotations

import logging
import math
import sys

import torch
from composer.core import State
from composer.utils import dist, ensure_tuple

from composer_ds.ownership import Plan

__all__ = ['announce', 'block_of', 'describe_batch']

log = logging.getLogger(__name__)


def announce(text: str) -> None:
    """Log what the user should see, once; print it where nobody has configured logging for INFO.

    Args:
        text (str): Alike on all ranks; rank 0 speaks.
    """
    if dist.get_global_rank() != 0:
        return
    if log.isEnabledFor(logging.INFO):
        log.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


def describe_batch(microbatch_size: int | float | None, batch_sizes: list[int | None], batches: int = 1) -> str:
    """Write out the batch arithmetic.

    Args:
        microbatch_size (int | float | None): Largest number of samples of a microbatch.
        batch_sizes (list[int | None]): What each rank draws from its dataloader; None where the dataloader does not
            say.
        batches (int): How many batches of the dataloader make one optimizer step. Default: 1.

    Returns:
        str: Such as ``microbatch 4 x accumulation 8 x world size 2 = global batch 64``.
    """
    world_size = len(batch_sizes)
    several_batches = f' x {batches} batches' if batches > 1 else ''
    sizes = [size for size in batch_sizes if size is not None]
    if len(sizes) < world_size or microbatch_size is None:
        return f'microbatch {microbatch_size} x world size {world_size}; the dataloader does not say its batch size'
    whole = f'global batch {sum(sizes) * batches}'
    if len(set(sizes)) > 1:
        together = ' + '.join(map(str, sizes))
        return f'microbatch {microbatch_size}; batches of the ranks {together}{several_batches} = {whole}'
    batch = sizes[0]
    accumulation = math.ceil(batch / microbatch_size)
    if accumulation * microbatch_size == batch or accumulation == 1:
        size = min(microbatch_size, batch)
        return f'microbatch {size} x accumulation {accumulation} x world size {world_size}{several_batches} = {whole}'
    last = batch - (accumulation - 1) * microbatch_size
    several = 'es' if accumulation > 2 else ''
    return (
        f'({accumulation - 1} microbatch{several} of {microbatch_size} + 1 of {last} = batch {batch}) '
        f'x world size {world_size}{several_batches} = {whole}'
    )


def block_of(plan: Plan, state: State, batches: int = 1) -> str:
    """Describe the plan in one block of text. Called at ``FIT_START``.

    Collective: the batch sizes of all ranks are gathered.

    Args:
        plan (Plan): What will be run.
        state (State): Composer's state.
        batches (int): How many batches make one optimizer step. Default: 1.

    Returns:
        str: The block, alike on all ranks.
    """
    batch_sizes = dist.all_gather_object(getattr(state.dataloader, 'batch_size', None))
    precision = plan.precision
    if plan.weights != 'fp32':
        accumulation = plan.ds_config['data_types']['grad_accum_dtype']
        precision += f' ({plan.weights} weights, fp32 master weights, gradients added up in {accumulation})'
    elif plan.autocast_dtype is not None:
        precision += ' (fp32 weights, forward under autocast)'
    offloaded = [name for name, on in (('optimizer', plan.offload_optimizer), ('parameters', plan.offload_param)) if on]
    clipping = plan.ds_config['gradient_clipping']
    optimizer = ensure_tuple(state.optimizers)[0]
    groups = len(optimizer.param_groups)
    kernel = ", by torch's fused CPU kernel (fused=False keeps it away)" if plan.fused_adam else ''
    lines = [
        ('ZeRO stage', str(plan.zero_stage)),
        ('offload', f'{" and ".join(offloaded)} to CPU' if offloaded else 'none'),
        ('precision', precision),
        ('optimizer', f'{type(optimizer).__name__}, {groups} parameter group{"s" if groups > 1 else ""}{kernel}'),
        ('clipping', f'norm {clipping}' if clipping else 'none'),
        ('batch', describe_batch(state.device_train_microbatch_size, batch_sizes, batches)),
        ('device', f'{torch.cuda.get_device_name()}' if torch.cuda.is_available() else 'CPU'),
    ]
    return '\n'.join(['DeepSpeed:', *(f'  {name:<11} {value}' for name, value in lines)])
