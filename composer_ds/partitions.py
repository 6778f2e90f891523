"""Where each trainable parameter lives once ZeRO has partitioned it, and how to read and write it whole.

ZeRO flattens the trainable parameters of a parameter group into one long fp32 vector and gives every rank a part of
it: the *flat partition*. What this rank holds of one parameter is a run of consecutive elements of the parameter's
flattened tensor, here a :class:`Fragment`. Invariant: over all ranks the fragments of a parameter cover each of its
elements exactly once.

This is the only module that knows DeepSpeed's private attributes for the layout. Written against deepspeed
0.19.8; ``tests/distributed/test_partitions.py`` compares it with weights that were put in, and fails when it changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from composer_ds.consolidation import consolidate, consolidate_copy

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

__all__ = ['Fragment', 'Partitions', 'full_numel', 'full_shape']


def full_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Shape of the whole parameter, also where ZeRO 3 has left an empty tensor in its place.

    Args:
        parameter (torch.nn.Parameter): A parameter of the model.

    Returns:
        torch.Size: The shape that the user gave it.
    """
    return torch.Size(getattr(parameter, 'ds_shape', parameter.shape))


def full_numel(parameter: torch.nn.Parameter) -> int:
    """Number of elements of the whole parameter.

    Args:
        parameter (torch.nn.Parameter): A parameter of the model.

    Returns:
        int: The product of :func:`full_shape`.
    """
    return full_shape(parameter).numel()


@dataclass(frozen=True, eq=False)
class Fragment:
    """The run of one parameter's elements that this rank owns.

    Args:
        name (str): The parameter's name in the user's model.
        parameter (torch.nn.Parameter): The user's parameter.
        flat (torch.Tensor): This rank's flat fp32 partition that holds the run; shape ``(flat_numel,)``.
        flat_start (int): Where the run begins in ``flat``.
        start (int): Where the run begins in the parameter's flattened tensor.
        numel (int): Length of the run.
    """

    name: str
    parameter: torch.nn.Parameter
    flat: torch.Tensor
    flat_start: int
    start: int
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """View this fragment in a tensor laid out like ``self.flat`` (weights, a gradient, a moment).

        Args:
            flat (torch.Tensor): Shape ``(flat_numel,)``.

        Returns:
            torch.Tensor: A view of shape ``(numel,)``.
        """
        return flat.narrow(0, self.flat_start, self.numel)

    @property
    def master(self) -> torch.Tensor:
        """The fp32 master weights of the run; a view of shape ``(numel,)``."""
        return self.of(self.flat.detach())

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Take this fragment's run out of a whole tensor of the parameter's shape.

        Args:
            whole (torch.Tensor): A tensor with as many elements as the whole parameter.

        Returns:
            torch.Tensor: Shape ``(numel,)``; a view where the whole tensor is contiguous.
        """
        run = whole.reshape(-1).narrow(0, self.start, self.numel)
        # Of a tensor that is not contiguous, reshape has made a whole copy, which must not live on in the run.
        return run if whole.is_contiguous() else run.clone()


@dataclass(eq=False)
class Partitions:
    """The layout of all trainable parameters over the ranks.

    Collective: construction exchanges the layout, so every rank must construct it. Built once, right after the
    ``ds_engine``; the layout does not change while the engine lives.

    Args:
        ds_engine (DeepSpeedEngine): An engine with ZeRO stage 1, 2 or 3.
        names (dict[torch.nn.Parameter, str]): The user's name of each parameter that is trained.
    """

    ds_engine: DeepSpeedEngine
    names: dict[torch.nn.Parameter, str]
    fragments: list[Fragment] = field(init=False)
    parameters: dict[str, torch.nn.Parameter] = field(init=False)
    """By name."""
    runs: dict[str, list[tuple[int, int, int]]] = field(init=False)
    """For each name the runs ``(rank, start, numel)`` of all ranks."""

    def __post_init__(self):
        self.parameters = {name: parameter for parameter, name in self.names.items()}
        self.fragments = list(_fragments(self.ds_engine.optimizer, self.names))
        self._fragment_of = {fragment.name: fragment for fragment in self.fragments}
        self._in_flat: dict[int, list[Fragment]] = defaultdict(list)
        for fragment in self.fragments:
            self._in_flat[id(fragment.flat)].append(fragment)
        mine = [(fragment.name, fragment.start, fragment.numel) for fragment in self.fragments]
        everyone: list[list[tuple[str, int, int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        self.runs = {name: [] for name in self.names.values()}
        for rank, owned in enumerate(everyone):
            for name, start, numel in owned:
                self.runs[name].append((rank, start, numel))
        for parameter, name in self.names.items():
            covered = sum(numel for _, _, numel in self.runs[name])
            assert covered == full_numel(parameter), f'{name}: {covered} of {full_numel(parameter)} elements are owned'

    def in_flat(self, flat: torch.Tensor) -> list[Fragment]:
        """List the fragments that lie in one flat partition of this rank.

        Args:
            flat (torch.Tensor): A flat partition, the very object that DeepSpeed steps.

        Returns:
            list[Fragment]: Its fragments; padding belongs to none.
        """
        return self._in_flat[id(flat)]

    def fragment(self, name: str) -> Fragment | None:
        """Return this rank's fragment of a parameter.

        Args:
            name (str): A trained parameter's name.

        Returns:
            Fragment | None: None when other ranks own all of it.
        """
        return self._fragment_of.get(name)

    def assemble(self, name: str, mine: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Put a whole tensor together from the runs that the ranks own.

        Collective: every rank calls it, for the same names in the same order.

        Args:
            name (str): A trained parameter's name.
            mine (torch.Tensor | None): This rank's run, shape ``(numel,)``; None when it owns none.
            dtype (torch.dtype): The dtype of the result, alike on all ranks.

        Returns:
            torch.Tensor: Of the parameter's full shape, as :func:`~composer_ds.consolidation.consolidate` returns it.
        """
        device = torch.device(self.ds_engine.device)  # pyright: ignore[reportArgumentType]
        return consolidate(self.runs[name], mine, dtype, device, full_shape(self.parameters[name]))

    def whole_master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the fp32 master weights of one parameter, whole.

        Collective.

        Args:
            parameter (torch.nn.Parameter): A trained parameter.

        Returns:
            torch.Tensor: fp32, of the parameter's full shape; as :meth:`assemble` returns it.
        """
        name = self.names[parameter]
        if parameter.dtype == torch.float32 and not hasattr(parameter, 'ds_id'):
            # ZeRO 1 and 2 in fp32: every rank computes with all master weights.
            return consolidate_copy(parameter.detach())
        fragment = self.fragment(name)
        return self.assemble(name, None if fragment is None else fragment.master)

    def restore_masters(self, originals: dict[torch.nn.Parameter, torch.Tensor | None]) -> None:
        """Write the weights of before the engine into the master weights, which DeepSpeed has made from 16-bit weights.

        Collective: rank 0's weights are taken.

        Args:
            originals (dict[torch.nn.Parameter, torch.Tensor | None]): Whole fp32 weights, on rank 0; the other ranks
                name the same parameters in the same order.
        """
        if not originals:
            return
        with self.writing_masters():
            for parameter, original in originals.items():
                device = self.ds_engine.device
                whole = torch.empty(full_shape(parameter), device=device) if original is None else original.to(device)
                dist.broadcast(whole, src=0)
                fragment = self.fragment(self.names[parameter])
                if fragment is not None:
                    fragment.master.copy_(fragment.cut(whole))

    @contextmanager
    def writing_masters(self) -> Iterator[None]:
        """Write into the fragments' master weights inside; on leaving, the weights that the model computes with follow.

        Collective: the working weights are gathered from all ranks on leaving.
        """
        with torch.no_grad():
            yield
            _refresh_working_weights(self.ds_engine.optimizer)


def _fragments(zero_optimizer: Any, names: dict[Any, str]) -> Iterator[Fragment]:
    if hasattr(zero_optimizer, 'fp32_partitioned_groups_flat'):  # stage 3
        for parameter, name in names.items():
            if parameter.numel() == 0 and not hasattr(parameter, 'ds_id'):
                continue  # without elements, and so hidden from DeepSpeed
            group, flat_start, partition_numel = zero_optimizer.grad_position[zero_optimizer.get_param_id(parameter)]
            start = zero_optimizer._get_param_partition_rank(parameter) * partition_numel
            numel = min(partition_numel, parameter.ds_numel - start)  # the last ranks hold padding
            if numel > 0:
                flat = zero_optimizer.fp32_partitioned_groups_flat[group]
                yield Fragment(name, parameter, flat, flat_start, start, numel)
        return
    flats = flat_partitions(zero_optimizer)
    for parameter, name in names.items():
        mapping = getattr(parameter, '_hp_mapping', None)  # DeepSpeed leaves parameters without elements out
        if mapping is not None:
            flat = flats[mapping.param_group_index]
            master, working = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield Fragment(name, parameter, flat, master.start, working.start, master.numel)


def flat_partitions(zero_optimizer: Any) -> list[torch.Tensor]:
    """List this rank's flat fp32 partitions.

    Args:
        zero_optimizer (Any): ``ds_engine.optimizer``, of any of DeepSpeed's ZeRO classes.

    Returns:
        list[torch.Tensor]: One for each parameter group (stages 1 and 2) or sub-group (stage 3).
    """
    for attribute in ('fp32_partitioned_groups_flat', 'single_partition_of_fp32_groups', 'fp32_groups_flat_partition'):
        if hasattr(zero_optimizer, attribute):  # stage 3; stages 1 and 2; BF16_Optimizer, which serves bf16 stage 1
            return getattr(zero_optimizer, attribute)
    raise AssertionError(f'unknown ZeRO optimizer {type(zero_optimizer).__name__}')


def _refresh_working_weights(zero_optimizer: Any) -> None:
    if not hasattr(zero_optimizer, 'fp32_partitioned_groups_flat'):
        zero_optimizer.update_lp_params()
        return
    # As at the end of stage 3's own optimizer step: small "persistent" parameters are kept whole on every rank.
    zero_optimizer._partition_all_parameters()
    for group in range(len(zero_optimizer.fp32_partitioned_groups_flat)):
        zero_optimizer._reassign_or_swap_out_partitioned_parameters(group)
    zero_optimizer.invalidate_secondary_tensor()  # the copies that hpZ keeps on each node
    persistent = zero_optimizer.persistent_parameters
    if persistent:
        persistent[0].all_gather(persistent)
