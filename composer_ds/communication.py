"""How many bytes each rank sends: what the ZeRO stage asks for, and what DeepSpeed really sends.

**In theory.** The ZeRO paper (arXiv:1910.02054, section 7) counts, for Ψ parameters: an all-reduce of the gradients in
plain data parallelism is a reduce-scatter and an all-gather, 2Ψ. ZeRO 1 and 2 reduce-scatter gradients and all-gather
updated weights, 2Ψ as well. ZeRO 3 all-gathers weights for the forward and for the backward pass and reduce-scatters
gradients, 3Ψ. The paper has one backward pass in an optimizer step. With m microbatches ZeRO 1 reduces once, ZeRO 2 in
each backward pass, and ZeRO 3 does everything for each: Ψ + Ψ, mΨ + Ψ, and mΨ + 2mΨ.

**Measured.** DeepSpeed's own record of collectives (``deepspeed.comm.configure``) knows their messages. It can be
switched on and off at any time. While it is on, DeepSpeed waits for the device after each collective, so on a GPU it
should be on for few optimizer steps only.

Both count what a rank sends when a collective runs around a ring of N ranks: the factor (N - 1) / N, which the paper
leaves out, and twice that for an all-reduce (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_ds.memory_plan import MemoryPlan

__all__ = ['COLLECTIVES', 'REDUCTIONS', 'Traffic', 'collectives', 'expected_bytes', 'sent_bytes']

REDUCTIONS = frozenset(
    {'all_reduce', 'all_reduce_coalesced', 'reduce', 'reduce_scatter', 'reduce_scatter_tensor', 'all_to_all_single'}
)
"""Collectives that reduce gradients; that of quantized gradients (ZeRO++) is an all-to-all."""
_GATHERS = frozenset({'all_gather', 'all_gather_into_tensor', 'broadcast'})
COLLECTIVES = REDUCTIONS | _GATHERS
"""Those that are recorded. DeepSpeed (0.19.8) ends the process when its record meets one that it does not know."""

_BYTES = {'fp32': 4, 'bf16': 2, 'bfp16': 2, 'fp16': 2}


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective has done.

    Args:
        count (int): How often it was called.
        message_bytes (int): Of the tensors that this rank gave to it.
        sec (float): How long the calls took, waiting for other ranks included. Where DeepSpeed does not wait for a
            collective at once (ZeRO 3 gathers ahead of time), on a CPU: how long it took to start it.
    """

    count: int = 0
    message_bytes: int = 0
    sec: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        """Add up.

        Args:
            other (Traffic): What came after.

        Returns:
            Traffic: Both together.
        """
        return Traffic(self.count + other.count, self.message_bytes + other.message_bytes, self.sec + other.sec)

    def since(self, earlier: Traffic) -> Traffic:
        """Take away what was there before.

        Args:
            earlier (Traffic): A part of this.

        Returns:
            Traffic: The rest.
        """
        return Traffic(self.count - earlier.count, self.message_bytes - earlier.message_bytes, self.sec - earlier.sec)


def sent_bytes(collective: str, message_bytes: int, world_size: int) -> float:
    """Say what each rank sends for a collective, around a ring; on average, where the ranks differ.

    Args:
        collective (str): One of :data:`COLLECTIVES`.
        message_bytes (int): Of the tensors that each rank gave to it: its own part for a gather, all for the others.
        world_size (int): Number of ranks.

    Returns:
        float: Bytes.
    """
    if collective in ('all_gather', 'all_gather_into_tensor'):
        return message_bytes * (world_size - 1)
    around = message_bytes * (world_size - 1) / world_size
    return 2 * around if collective.startswith('all_reduce') else around


def expected_bytes(plan: MemoryPlan, trained: int, frozen: int, microbatches: int) -> tuple[float, float]:
    """Say what each rank sends in an optimizer step, in theory: see the top of this module.

    Args:
        plan (MemoryPlan): The settings.
        trained (int): Elements of all trained parameters.
        frozen (int): Elements of all others, which ZeRO 3 gathers, too.
        microbatches (int): Backward passes in the optimizer step.

    Returns:
        tuple[float, float]: Bytes of gradients, and bytes of weights.
    """
    around = (plan.world_size - 1) / plan.world_size
    gradients = trained * _BYTES[plan.communication] * around
    weights = _BYTES[plan.weights] * around
    if plan.zero_stage == 3:
        return microbatches * gradients, 2 * microbatches * (trained + frozen) * weights
    return (microbatches if plan.zero_stage == 2 else 1) * gradients, trained * weights


class _Collectives:
    """DeepSpeed's record of collectives, of which there is one in each process, shared by those who ask for it."""

    def __init__(self):
        self._users: dict[int, frozenset[str]] = {}
        self._totals: dict[str, Traffic] = {}

    def record(self, user: object, names: frozenset[str] = COLLECTIVES) -> None:
        """Record collectives from now on. Each costs some 50 microseconds of the host's time.

        Args:
            user (object): Who wants it.
            names (frozenset[str]): Those that count, a part of :data:`COLLECTIVES`. Default: all.
        """
        if not self._users:
            self._drain(keep=False)
        self._users[id(user)] = names
        self._configure()

    def stop(self, user: object) -> None:
        """Switch the record off when nobody else wants it.

        Args:
            user (object): Who wanted it, or did not.
        """
        if id(user) in self._users:
            self._drain(keep=True)
            del self._users[id(user)]
            self._configure()

    def totals(self) -> Mapping[str, Traffic]:
        """Tell what was recorded so far; take the difference of two calls.

        Returns:
            Mapping[str, Traffic]: By the collective's name.
        """
        if self._users:
            self._drain(keep=True)
        return dict(self._totals)

    def _configure(self) -> None:
        import deepspeed.comm as ds_comm

        names = sorted(frozenset().union(*self._users.values()))
        ds_comm.configure(enabled=bool(names), prof_all=False, prof_ops=names, verbose=False, debug=False)

    def _drain(self, keep: bool) -> None:
        import deepspeed.comm as ds_comm

        data: dict[str, Any] = ds_comm.comms_logger.get_raw_data()
        for name, sizes in data.items():
            # Not the latencies in the record: DeepSpeed (0.19.8) never resets its timers, so each is the sum of all so
            # far, and each takes longer to add up. Here the timer is read, and reset.
            sec = ds_comm.timers(name).elapsed(reset=True) / 1000
            count = sum(entry[0] for entry in sizes.values())
            message_bytes = sum(size * entry[0] for size, entry in sizes.items())
            if keep:
                self._totals[name] = self._totals.get(name, Traffic()).plus(Traffic(count, message_bytes, sec))
        ds_comm.comms_logger.reset_data()


collectives = _Collectives()
"""The one of this process."""
