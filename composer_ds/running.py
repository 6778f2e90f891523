"""Finds the ``DeepSpeed`` that a Trainer runs with, for callbacks and functions that are given Composer's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer.core import State

from composer_ds.errors import ComposerDSError

if TYPE_CHECKING:
    from composer_ds.algorithm import DeepSpeed

__all__ = ['running_deepspeed']


def running_deepspeed(state: State, wanted_by: str) -> DeepSpeed:
    """Return the algorithm.

    Args:
        state (State): Composer's state.
        wanted_by (str): Who asks, for the error.

    Returns:
        DeepSpeed: The live object.

    Raises:
        ComposerDSError: When there is no ``DeepSpeed`` among the algorithms.
    """
    from composer_ds.algorithm import DeepSpeed  # not above: it imports those who ask

    for algorithm in state.algorithms:
        if isinstance(algorithm, DeepSpeed):
            return algorithm
    raise ComposerDSError(f'{wanted_by}: the Trainer has no DeepSpeed among its algorithms')
