"""The checkpoints of a run, where they can be found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_ds.report.record import RunRecord

__all__ = ['checkpoints_of']


def checkpoints_of(record: RunRecord, folder: Path, given: Path | None) -> list[dict[str, str]]:
    """List the checkpoints of a run.

    Looks into the folder that is given, or into those that the run's configuration names, and ``checkpoints`` in the
    run's folder. Those that were logged as artifacts come with them, also when they are elsewhere by now.

    Args:
        record (RunRecord): The run.
        folder (Path): Where the run was found.
        given (Path | None): A folder of checkpoints.

    Returns:
        list[dict[str, str]]: Cells of a table, by column.
    """
    # Imports torch.
    from composer_ds.inspect.findings import list_folder

    listed: dict[Path, dict[str, str]] = {}
    for place in [given] if given else _places(record, folder):
        if place.is_dir():
            for one in list_folder(place):
                facts = one.findings.source.facts if one.findings else {}
                listed[one.path.resolve()] = {
                    'Checkpoint': str(one.path),
                    'Batch': _count(facts, 'batch'),
                    'Epoch': _count(facts, 'epoch'),
                    'Size': _size(one.size_bytes),
                    'State': one.problem or ('complete, latest' if one.is_latest else 'complete'),
                }
    for reference in record.references:
        path = Path(reference['path'])
        if path.resolve() not in listed:
            listed[path.resolve()] = {
                'Checkpoint': reference['path'],
                'Batch': str(reference.get('batch', '')),
                'Epoch': str(reference.get('epoch', '')),
                'Size': '',
                'State': 'logged as an artifact; not here any more',
            }
    return list(listed.values())


def _places(record: RunRecord, folder: Path) -> Iterator[Path]:
    sections: list[Any] = [record.config.get('checkpoint')]
    callbacks = record.config.get('callbacks')
    if isinstance(callbacks, dict):
        sections.append(callbacks.get('sharded_checkpoint_saver'))
    for section in sections:
        if isinstance(section, dict):
            named = section.get('save_folder') or section.get('folder')
            if isinstance(named, str) and '://' not in named:
                yield Path(named.replace('{run_name}', record.name))
    yield folder / 'checkpoints'


def _count(facts: dict[str, Any], unit: str) -> str:
    time = facts.get('time')
    value = time.get(unit) if isinstance(time, dict) else facts.get(unit)
    return '' if value is None else str(value)


def _size(size_bytes: float) -> str:
    for unit in ('B', 'kB', 'MB', 'GB'):
        if size_bytes < 1000:
            return f'{size_bytes:.0f} {unit}' if unit == 'B' else f'{size_bytes:.1f} {unit}'
        size_bytes /= 1000
    return f'{size_bytes:.1f} TB'
