"""What is known of a run, wherever it was read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_ds.panels import OPTIMIZER_STEPS

__all__ = ['Row', 'RunRecord', 'Series', 'is_number', 'joined']

Row = tuple[int, dict[str, Any]]
"""W&B's step, or the number of batches; and what was logged there, by key."""


@dataclass
class Series:
    """One key over the run.

    Args:
        steps (list[int]): The number of batches at each point.
        values (list[float | None]): None where the value is infinite or NaN.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)


@dataclass
class RunRecord:
    """A run.

    Args:
        name (str): Of the run.
        sources (list[Path]): The files that were read.
        rows (list[Row]): In the order of batches.
        config (dict[str, Any]): Hyperparameters, the plan and the environment among them.
        facts (dict[str, str]): What else the source says, by name: when it started, on which host.
        references (list[dict[str, Any]]): Checkpoints that were logged as artifacts: ``path``, ``batch``, ``epoch``.
        remarks (list[str]): What the reader should know.
    """

    name: str
    sources: list[Path]
    rows: list[Row]
    config: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    references: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def series(self) -> dict[str, Series]:
        """Sort the values by key.

        Returns:
            dict[str, Series]: All keys with numbers, but for W&B's own.
        """
        found: dict[str, Series] = {}
        for step, row in self.rows:
            for key, value in row.items():
                if not key.startswith('_') and is_number(value):
                    series = found.setdefault(key, Series())
                    series.steps.append(step)
                    series.values.append(float(value) if math.isfinite(float(value)) else None)
        return found

    def optimizer_steps(self) -> dict[int, int]:
        """Say how many optimizer steps were applied, where that was logged.

        Returns:
            dict[int, int]: By the number of batches.
        """
        return {step: int(row[OPTIMIZER_STEPS]) for step, row in self.rows if is_number(row.get(OPTIMIZER_STEPS))}


def is_number(value: Any) -> bool:
    """Say whether a logged value can be drawn.

    Args:
        value (Any): As it was read; W&B writes infinite values and NaN as text.

    Returns:
        bool: Whether ``float(value)`` works.
    """
    if isinstance(value, str):
        return value in ('NaN', 'Infinity', '-Infinity')
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def joined(lives: Iterable[list[Row]]) -> list[Row]:
    """Join what a run has logged each time that it was started.

    Where a later life begins before an earlier one has ended, because it went on from a checkpoint, the later one
    counts.

    Args:
        lives (Iterable[list[Row]]): In the order in which they were started.

    Returns:
        list[Row]: One for each step.
    """
    rows: list[Row] = []
    for life in lives:
        if life:
            first = min(step for step, _ in life)
            rows = [row for row in rows if row[0] < first]
        by_step: dict[int, dict[str, Any]] = {}
        for step, row in life:
            by_step.setdefault(step, {}).update(row)
        rows += sorted(by_step.items())
    return rows
