"""Loading a checkpoint into partitions: every rank reads the runs that it owns, whatever wrote them."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from composer.core import State
from composer.loggers import Logger
from composer.utils import ensure_tuple
from composer.utils.dist import get_local_rank

from composer_ds.announcements import announce, describe_duration, describe_optimizer_steps, describe_saved_by
from composer_ds.checkpoint.agreement import agreeing
from composer_ds.checkpoint.source import CheckpointSource
from composer_ds.checkpoint.sources import open_source
from composer_ds.checkpoint.verification import take_loaded_path
from composer_ds.deepspeed_format import DeepSpeedSource
from composer_ds.errors import CheckpointError
from composer_ds.faces import OptimizerFace
from composer_ds.frozen import write_frozen
from composer_ds.partitions import Fragment, full_shape
from composer_ds.progress import bar_if_long
from composer_ds.sharded.choice import LoadSharded, chosen_path
from composer_ds.sharded.contents import named_tensors
from composer_ds.sharded.fit import names_in_checkpoint, problems_of_optimizer
from composer_ds.sharded.reading_bar import reading_bar
from composer_ds.sharded.source import ShardedSource
from composer_ds.trainer_frame import restore_random_numbers

__all__ = ['load_sharded']


def load_sharded(wanted: LoadSharded, state: State, logger: Logger) -> None:
    """Load a checkpoint into the engine and Composer's state.

    Collective: called at ``AFTER_LOAD``, on every rank. No rank holds more than its own partitions, and one run of a
    tensor beyond them.

    Args:
        wanted (LoadSharded): What to load, and how.
        state (State): Composer's state.
        logger (Logger): Composer's logger.

    Raises:
        CheckpointError: On every rank, when one cannot load it; nothing goes on with what was loaded in part.
    """
    started = time.monotonic()
    path = chosen_path(wanted.path, state)
    with _agreeing(path):
        source = open_source(path, wanted.trusted)
    with _agreeing(path):
        if not (wanted.weights_only or isinstance(source, ShardedSource | DeepSpeedSource)):
            raise CheckpointError(
                f'load_sharded: {path} is a {source.format}, which load_path of the Trainer reads; or give '
                'weights_only=True.'
            )
        if isinstance(source, ShardedSource) and source.manifest.weights_only and not wanted.weights_only:
            raise CheckpointError(f'{path} holds nothing but weights; give load_sharded weights_only=True.')
    _check_files(source, path, wanted.verify)
    with _agreeing(path):
        # An extra state of a module, or what a state_dict() of the user's own computes.
        others = source.rest['others'] if isinstance(source, ShardedSource) else {}
        named = {name: value for name, value in named_tensors(state.model).items() if name not in others}
        names = names_in_checkpoint(source, named, wanted.strict)
    with reading_bar(source, names, state, with_optimizer=not wanted.weights_only):
        _load_weights(source, names, state)
        if others:
            state.model.load_state_dict(others, strict=False)
        if not wanted.weights_only:
            optimizer: Any = ensure_tuple(state.optimizers)[0]
            _load_optimizer(source, names, optimizer, path)
    if isinstance(source, ShardedSource) and not wanted.weights_only:
        _load_rest(source, state, logger, wanted)
    take_loaded_path(state)  # What Composer has loaded before is of no account now.
    beginning = f'Loaded the weights of {path}' if wanted.weights_only else f'Resumed from {path}'
    announce(f'{beginning}: {_origin_of(source)}; loaded in {describe_duration(time.monotonic() - started)}.')


def _origin_of(source: CheckpointSource) -> str:
    """Write out where the run was that saved a checkpoint, and how it ran."""
    facts = source.facts
    if not isinstance(source, ShardedSource):
        return f'{source.format}, batch {facts["batch"]}' if 'batch' in facts else source.format
    counts = describe_optimizer_steps(**{'applied': 0, 'skipped': 0, **facts['optimizer steps']})
    return f'batch {facts["batch"]}, {counts}; saved {describe_saved_by(facts["ZeRO stage"], facts["world size"])}'


@contextmanager
def _agreeing(path: str) -> Iterator[None]:
    with agreeing(None, lambda error: _words(error, path)):
        yield


def _words(error: BaseException, path: str) -> str:
    return str(error) if isinstance(error, CheckpointError) else f'{path} cannot be loaded: {error!r}'


def _check_files(source: CheckpointSource, path: str, verify: bool) -> None:
    """Look for what is missing or damaged. Collective; the ranks share the reading."""
    missing: list[Any] = [None] * dist.get_world_size()
    with _agreeing(path):
        mine = source.missing()
    dist.all_gather_object(missing, mine)
    # On disks of the nodes' own every file is somewhere. Who needs a run that is not here says so when it is read.
    everywhere = [one for one in missing[0] if all(one in others for others in missing)]
    with _agreeing(path):
        if everywhere:
            raise CheckpointError(f'{path} is not complete: {"; ".join(everywhere)}.')
        if verify:
            if isinstance(source, ShardedSource):
                files = list(source.manifest.files)[dist.get_rank() :: dist.get_world_size()]
                with bar_if_long(f'Checking {path}') as bar:
                    bar.begin(sum(source.manifest.files[name].size_bytes for name in files))
                    found = {name: source.damage_of(name, bar.advance) for name in files}
                damaged = [f'{name} {what}' for name, what in found.items() if what is not None]
            else:
                damaged = source.damaged() if get_local_rank() == 0 else []
            if damaged:
                raise CheckpointError(f'{path} is damaged: {"; ".join(damaged)}. Load another one, or copy it again.')


@torch.no_grad()
def _load_weights(source: CheckpointSource, names: Mapping[str, str], state: State) -> None:
    """Read the weights and buffers. Collective."""
    model: Any = state.model
    partitions = model._partitions
    with partitions.writing_masters(), _agreeing(str(source.path)):
        done: set[int] = set()
        for name, tensor in named_tensors(model).items():
            if name not in names or id(tensor) in done:
                continue
            done.add(id(tensor))
            stored = names[name]

            def read(start: int, numel: int, stored: str = stored) -> torch.Tensor:
                return source.read(stored, start, numel)

            if tensor in partitions.names:
                fragment = partitions.fragment(partitions.names[tensor])
                if fragment is not None:
                    fragment.master.copy_(read(fragment.start, fragment.numel))
            elif hasattr(tensor, 'ds_id'):
                write_frozen(tensor, read)
            else:
                tensor.copy_(read(0, tensor.numel()).view(full_shape(tensor)))


@torch.no_grad()
def _load_optimizer(source: Any, names: Mapping[str, str], optimizer: OptimizerFace, path: str) -> None:
    """Read the optimizer state. Collective."""
    if isinstance(source, DeepSpeedSource) and source.state_absent_because is not None:
        announce(f'The optimizer state of {path} is not loaded: {source.state_absent_because}')
        return
    with _agreeing(path):
        saved_class, groups, scalars = _optimizer_of(source)
        problems = problems_of_optimizer(saved_class, groups, names, optimizer)
        if problems:
            raise CheckpointError(f'{path} cannot be loaded. {" ".join(problems)}')
        states: dict[str, dict[str, Any]] = {}
        for fragment in optimizer._partitions.fragments:
            stored = names.get(fragment.name)
            if stored is not None:
                states[fragment.name] = {
                    **scalars.get(stored, {}),
                    **_read_state(source, stored, fragment),
                }
        optimizer._partitioned.load_states(states)
        by_name = {name: group for group in groups for name in group['params']}
        for group in optimizer.param_groups:
            saved = next((by_name[name] for name in _stored_names(group, names, optimizer) if name in by_name), {})
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != 'params'})


def _read_state(source: CheckpointSource, stored: str, fragment: Fragment) -> dict[str, Callable[[], torch.Tensor]]:
    # Read one after the other, when there is a place for it.
    keys = source.tensors[stored].state
    return {key: functools.partial(source.read, stored, fragment.start, fragment.numel, key) for key in keys}


def _stored_names(group: dict[str, Any], names: Mapping[str, str], optimizer: OptimizerFace) -> list[str]:
    own = optimizer._partitions.names
    return [names[own[parameter]] for parameter in group['params'] if own.get(parameter) in names]


def _optimizer_of(source: Any) -> tuple[str | None, list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the class, the parameter groups with names as ``params``, and by name what is not a tensor."""
    if isinstance(source, ShardedSource):
        saved = source.rest['optimizer']
        groups = zip(saved['param_groups'], source.manifest.param_groups, strict=True)
        return source.manifest.optimizer, [{**group, 'params': params} for group, params in groups], saved['scalars']
    return None, source.param_groups, source.scalar_state


def _load_rest(source: ShardedSource, state: State, logger: Logger, wanted: LoadSharded) -> None:
    """Load Composer's state without model and optimizer. Collective."""
    run_name = state.run_name
    composers = dict(source.rest['state'])
    if not wanted.schedulers:
        composers.pop('schedulers', None)
    state.load_state_dict(composers, logger)
    state.run_name = run_name
    restore_random_numbers(source.rest['rng'])
