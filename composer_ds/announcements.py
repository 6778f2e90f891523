"""What the user is told unasked: notes on the plan, a line for each event that matters, blocks of text."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from composer.core import State
from composer.utils import dist, ensure_tuple
from rich.filesize import decimal
from tqdm import tqdm

from composer_ds.ownership import Plan

__all__ = [
    'announce',
    'announce_saved',
    'beside_bars',
    'block',
    'block_of',
    'describe_batch',
    'describe_duration',
    'describe_optimizer_steps',
    'describe_saved_by',
]

log = logging.getLogger(__name__)


def announce(text: str) -> None:
    """Log what the user should see, once; print it where logging is not configured.

    Args:
        text (str): Alike on all ranks; rank 0 speaks.
    """
    if dist.get_global_rank() != 0:
        return
    with beside_bars():
        if log.isEnabledFor(logging.INFO) and log.hasHandlers():
            log.info('%s', text)
        # WARNING, the level of Python's root logger, is nobody's decision; one of 'composer_ds' is, and is respected.
        elif log.isEnabledFor(logging.INFO) or logging.getLogger('composer_ds').level == logging.NOTSET:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def beside_bars() -> Iterator[None]:
    """Take tqdm's bars, such as Composer's, off the terminal while something is written there, and put them back."""
    writing = tqdm.external_write_mode(sys.stderr, nolock=True)
    # tqdm's lock is not held in between: a handler of logging may want it while another thread waits for the handler.
    with tqdm.get_lock():
        writing.__enter__()
    if sys.stderr.isatty():
        # Composer's bar of an epoch that has ended stands on this line, and tqdm leaves its last letter.
        print(end='\r\x1b[2K', file=sys.stderr, flush=True)
    try:
        yield
    finally:
        with tqdm.get_lock():
            writing.__exit__(None, None, None)


def announce_saved(what: str, place: object, state_batch: int, size_bytes: int, since: float, note: str = '') -> None:
    """Say that a checkpoint, or anything like it, is complete. Rank 0 speaks.

    Args:
        what (str): Such as ``the checkpoint``.
        place (object): Its path or URI.
        state_batch (int): The number of batches at that time.
        size_bytes (int): Of all its files.
        since (float): When it was begun, by ``time.monotonic()``.
        note (str): The end of the sentence. Default: none.
    """
    taken = describe_duration(time.monotonic() - since)
    announce(f'Saved {what} {place} (batch {state_batch}): {decimal(size_bytes)} in {taken}{note}')


def describe_duration(duration_sec: float) -> str:
    """Write out a duration.

    Args:
        duration_sec (float): In seconds.

    Returns:
        str: Such as ``0.4 s``, ``2 min 5 s`` or ``3 h 7 min``.
    """
    if duration_sec < 59.95:
        return f'{duration_sec:.1f} s'
    minutes, seconds = divmod(round(duration_sec), 60)
    if minutes < 60:
        return f'{minutes} min {seconds} s'
    return f'{minutes // 60} h {minutes % 60} min'


def describe_optimizer_steps(applied: int, skipped: int) -> str:
    """Write out counts of optimizer steps.

    Args:
        applied (int): That changed the weights.
        skipped (int): That did not.

    Returns:
        str: Such as ``7 optimizer steps applied, 1 skipped``.
    """
    words = f'{applied:,} optimizer step{"" if applied == 1 else "s"} applied'
    return f'{words}, {skipped} skipped' if skipped else words


def describe_saved_by(zero_stage: int, world_size: int) -> str:
    """Write out who has saved a checkpoint.

    Args:
        zero_stage (int): Of the run.
        world_size (int): Of the run.

    Returns:
        str: Such as ``under ZeRO 2 by 8 ranks``.
    """
    return f'under ZeRO {zero_stage} by {world_size} rank{"" if world_size == 1 else "s"}'


def block(title: str, lines: Sequence[tuple[str, str]]) -> str:
    """Lay out a block of text.

    Args:
        title (str): Its first line.
        lines (Sequence[tuple[str, str]]): Names, of at most 11 letters, and values.

    Returns:
        str: Several lines.
    """
    return '\n'.join([f'{title}:', *(f'  {name:<11} {value}' for name, value in lines)])


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
    return block('DeepSpeed', lines)
