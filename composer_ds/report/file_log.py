"""A run from the text file of Composer's ``FileLogger``, which has four decimals of each number."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from composer_ds.report.record import Row, RunRecord, joined

__all__ = ['find_file_logs', 'read_file_log']

_METRIC = re.compile(r'^\[metric\]\[batch=(\d+)\]: (.+): (\S+) *$')
_HYPERPARAMETER = re.compile(r'^\[hyperparameter\]: ([^:]+): (.*)$')
# Composer logs these with the number of batches before the one that they are of.
_BEFORE_THE_COUNT = ('loss/', 'metrics/train/')
_BEGINNING_BYTES = 1 << 20


def find_file_logs(folder: Path) -> list[Path]:
    """Find text files of Composer's FileLogger, of rank 0.

    Args:
        folder (Path): A run's folder.

    Returns:
        list[Path]: The newest comes last.
    """
    candidates = [path for pattern in ('*.txt', '*/*.txt', '*.log') for path in folder.glob(pattern) if path.is_file()]
    found = [path for path in candidates if not re.search(r'rank[1-9]', path.name) and _is_one(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def _is_one(path: Path) -> bool:
    with path.open('rb') as file:
        return b'[metric][batch=' in file.read(_BEGINNING_BYTES)


def read_file_log(path: Path) -> RunRecord:
    """Read a text file of Composer's FileLogger.

    Args:
        path (Path): The file.

    Returns:
        RunRecord: The run.
    """
    rows: list[Row] = []
    config: dict[str, Any] = {}
    with path.open(encoding='utf-8', errors='replace') as file:
        for line in file:
            metric = _METRIC.match(line)
            if metric:
                batch, key = int(metric[1]), metric[2]
                rows.append((batch + key.startswith(_BEFORE_THE_COUNT), {key: _value(metric[3])}))
                continue
            hyperparameter = _HYPERPARAMETER.match(line)
            if hyperparameter:
                config[hyperparameter[1]] = _value(hyperparameter[2].strip())
    name = str(config.get('run_name') or path.parent.name or path.stem)
    remark = "Read from the text of Composer's FileLogger, which keeps four decimals: small learning rates look like 0."
    return RunRecord(name, [path], joined([rows]), config, remarks=[remark])


def _value(text: str) -> Any:
    if text in ('nan', 'inf', '-inf'):
        return float(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # what Composer writes is not always Python
        return text
