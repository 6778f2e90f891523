"""A run from the ``.wandb`` files of W&B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer_ds.report.record import Row, RunRecord, joined
from composer_ds.wandb_files import lives_of_run, read_records

__all__ = ['find_wandb_files', 'read_wandb']


def find_wandb_files(folder: Path) -> list[Path]:
    """Find ``.wandb`` files.

    Args:
        folder (Path): A run's folder, W&B's folder ``wandb``, or the folder that it is in.

    Returns:
        list[Path]: The one that was started last comes last.
    """
    for pattern in ('*.wandb', '*run-*/*.wandb', 'wandb/*run-*/*.wandb', '*/wandb/*run-*/*.wandb'):
        # latest-run is a link to one of the others.
        found = [path for path in folder.glob(pattern) if not path.parent.is_symlink()]
        if found:
            return sorted(found, key=lambda path: path.parent.name.removeprefix('offline-'))
    return []


def read_wandb(path: Path) -> RunRecord:
    """Read a run with all its lives.

    Args:
        path (Path): One of its ``run-ID.wandb`` files.

    Returns:
        RunRecord: The run.
    """
    run_id = path.stem.removeprefix('run-')
    files = lives_of_run(path.parent.parent, run_id)
    if path not in files:  # moved out of W&B's folders
        files = [path]
    record = RunRecord(run_id, files, [])
    lives: list[list[Row]] = []
    for file in files:
        lives.append([])
        ended = False
        for one in read_records(file):
            _take(one, record, lives[-1])
            ended = ended or one['type'] == 'exit'
        if not ended and file == files[-1]:
            record.remarks.append('The run has not ended: it goes on, or was killed.')
    record.rows = joined(lives)
    if len(files) > 1:
        record.remarks.append(f'The run was started {len(files)} times.')
    return record


def _take(one: dict[str, Any], record: RunRecord, life: list[Row]) -> None:
    kind = one['type']
    content = one.get(kind) or {}
    if kind == 'run':
        record.name = content.get('display_name') or record.name
        record.facts.setdefault('started', content.get('start_time', '').replace('T', ' ')[:16] + ' UTC')
        record.facts['W&B project'] = content.get('project', '')
        record.facts['W&B run'] = content.get('run_id', '')
    if kind in ('run', 'config'):
        config = content.get('config', {}) if kind == 'run' else content
        for key, value in config.get('update', {}).items():
            if not key.startswith('_'):
                record.config[key] = value
    elif kind == 'environment':
        for key, name in (('host', 'host'), ('os', 'OS'), ('python', 'Python')):
            if content.get(key):
                record.facts[name] = str(content[key])
        if content.get('cpu_count'):
            record.facts['CPU'] = f'{content["cpu_count"]} cores, {content.get("cpu", {}).get("model", "")}'
        if content.get('gpu_count') or content.get('gpu_type'):
            record.facts['GPU'] = f'{content.get("gpu_count", "")} {content.get("gpu_type", "")}'.strip()
    elif kind == 'history':
        row = content.get('item', {})
        step = content.get('step', {}).get('num', row.get('_step'))
        if step is not None:
            life.append((int(step), row))
    elif kind == 'artifact':
        _take_artifact(content, record)


def _take_artifact(content: dict[str, Any], record: RunRecord) -> None:
    import json

    try:
        metadata = json.loads(content.get('metadata') or '{}')
    except ValueError:
        return
    if 'path' in metadata and metadata not in record.references:
        record.references.append(metadata)
