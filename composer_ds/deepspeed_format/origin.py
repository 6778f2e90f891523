"""What else a checkpoint says of the run that wrote it, for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_ds.deepspeed_format.safe_loading import load
from composer_ds.errors import CheckpointError

__all__ = ['facts_of']


def facts_of(
    folder: Path, model: Mapping[str, Any], world_size: int, zero_stage: int, composer_states: Path | None
) -> dict[str, Any]:
    """Gather the facts.

    Args:
        folder (Path): The folder with DeepSpeed's files.
        model (Mapping[str, Any]): The content of the file with the module's state.
        world_size (int): Of the run.
        zero_stage (int): Of the run.
        composer_states (Path | None): Composer's file in its own archives.

    Returns:
        dict[str, Any]: In the order to show them.
    """
    facts: dict[str, Any] = {'written by': _written_by(folder, model)}
    if composer_states is not None:
        facts = {'written by': 'Composer, with a deepspeed_config', **_of_composer(composer_states)}
    else:
        facts['tag'] = folder.name
    meta = model.get('meta') if isinstance(model.get('meta'), dict) else {}
    for fact, value in (
        ('epoch', model.get('epoch', meta.get('epoch') if meta else None)),
        ('optimizer steps', model.get('global_steps')),
        ('skipped optimizer steps', model.get('skipped_steps') or None),
        ('world size', world_size),
        ('ZeRO stage', zero_stage),
        ('precision', _precision(model.get('ds_config'))),
        ('DeepSpeed', model.get('ds_version')),
    ):
        if isinstance(value, (int, str)) and fact not in facts:
            facts[fact] = value
    return facts


def _written_by(folder: Path, model: Mapping[str, Any]) -> str:
    if 'pytorch-lightning_version' in model:
        return f'Lightning {model["pytorch-lightning_version"]}'
    meta = model.get('meta')
    if isinstance(meta, dict) and 'mmengine' in meta:
        return f'MMEngine {meta["mmengine"]}'
    if (folder.parent / 'trainer_state.json').is_file():
        return 'Hugging Face Trainer'
    if folder.name.startswith('pytorch_model') and (folder.parent / 'latest').is_file():
        return 'Hugging Face Accelerate'
    return 'DeepSpeed'


def _precision(config: Any) -> str:
    if not isinstance(config, dict):
        return 'unknown'
    enabled = [
        key for key in ('bf16', 'bfloat16', 'fp16') if isinstance(config.get(key), dict) and config[key].get('enabled')
    ]
    return {'bfloat16': 'bf16'}.get(enabled[0], enabled[0]) if enabled else 'fp32'


def _of_composer(path: Path) -> dict[str, Any]:
    # Only nice to have, so classes that are not known are passed over, and a file that cannot be read, too.
    try:
        state = load(path, ignore_unknown=True)['state']
        found: dict[str, Any] = {}
        if isinstance(state.get('run_name'), str):
            found['run name'] = state['run_name']
        time = state.get('timestamp', {})
        time = time.get('Timestamp', time)
        for unit in ('epoch', 'batch', 'sample', 'token'):
            if isinstance(time.get(unit), int):
                found[unit] = time[unit]
        return found
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return {}
