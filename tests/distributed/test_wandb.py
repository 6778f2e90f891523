"""W&B, offline: what is in the ``.wandb`` files after a job that was resumed. Composer's own numbers are the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import wandb

from composer_ds.report.command import read_run
from composer_ds.wandb_files import lives_of_run, read_records, wait_for_own_folder
from tests.distributed import wandb_cases


def _of_type(file: Path, kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in read_records(file) if record['type'] == kind]


def _lives(folder: Path) -> list[Path]:
    """The files of the one run that must be there."""
    ids = {path.stem.removeprefix('run-') for path in (folder / 'wandb').glob('*run-*/*.wandb')}
    assert len(ids) == 1, ids
    return lives_of_run(folder / 'wandb', ids.pop())


@pytest.mark.slow
def test_a_resumed_job_is_one_run_without_holes_or_repeated_points(two_ranks, tmp_path):
    expected = two_ranks.run(wandb_cases.train, None, '8ba')[0]
    assert list(expected) == [str(batch) for batch in range(1, 9)]

    two_ranks.run(wandb_cases.train, str(tmp_path), '4ba')  # ends
    two_ranks.run(wandb_cases.train, str(tmp_path), '8ba', 7)  # breaks, a batch after a checkpoint
    two_ranks.run(wandb_cases.train, str(tmp_path), '8ba')
    files = _lives(tmp_path)
    assert len(files) == 3  # one for each start, and not for each rank

    losses: dict[str, float] = {}
    applied: dict[int, int] = {}
    for file in files:
        for item in _of_type(file, 'history'):
            row = item['item']
            if 'loss/train/total' in row:
                assert str(row['_step']) not in losses, 'repeated'
                losses[str(row['_step'])] = row['loss/train/total']
            if 'time_split/total_sec' in row:
                assert row['_step'] not in applied, 'repeated'
                applied[row['_step']] = row['optimizer_steps/applied']
    assert losses == pytest.approx(expected, rel=1e-5)
    assert applied == {batch: batch for batch in range(1, 9)}

    record = read_run(tmp_path)
    assert record.name == 'job' and len(record.sources) == 3
    series = record.series()['loss/train/total']
    assert dict(zip(map(str, series.steps), series.values, strict=True)) == pytest.approx(expected, rel=1e-5)


def test_x_axis_plan_and_checkpoints_are_in_the_run(two_ranks, tmp_path):
    two_ranks.run(wandb_cases.train, str(tmp_path), '4ba', 0, True)
    (file,) = _lives(tmp_path)

    axes = {
        metric['glob_name']: metric.get('step_metric') for metric in _of_type(file, 'metric') if 'glob_name' in metric
    }
    logged = {key for item in _of_type(file, 'history') for key in item['item'] if key.startswith(('zero_', 'time_s'))}
    assert logged
    for key in (*logged, 'l2_norm/grad/global', 'gradient/clip_factor', 'learning_rate/group0'):
        assert axes[f'{key.split("/")[0]}/*'] == 'optimizer_steps/applied'
    assert not any(name.startswith(('loss', 'metrics', 'time/')) for name in axes)  # Composer's keep theirs

    config = {key: value for item in _of_type(file, 'config') for key, value in item['update'].items()}
    plan = config['deepspeed_plan']
    assert (plan['zero_stage'], plan['precision'], plan['ds_config']['gradient_clipping']) == (2, 'fp32', 0.5)
    clipping = plan['decisions']['gradient clipping']
    assert (clipping['value'], clipping['source']) == ('norm 0.5', 'ds_config.gradient_clipping')
    assert config['deepspeed_environment']['world_size'] == 2

    artifacts = _of_type(file, 'artifact')
    found = {json.loads(one['metadata'])['path']: one for one in artifacts}
    saved = [tmp_path / 'checkpoints' / f'ep{batch // 5}-ba{batch}-rank0.pt' for batch in (2, 4)]
    files = sorted((tmp_path / 'checkpoints').glob('ep*.pt'))
    assert len(files) == len(saved) == 2
    (sharded,) = (tmp_path / 'sharded').glob('ep*-ba4')
    assert sorted(found) == sorted(map(str, [*files, sharded]))
    for path, one in found.items():
        contents = one['manifest']['contents']
        assert all(entry['ref'].startswith(Path(path).as_uri()) for entry in contents)  # where it is; no copy
        assert json.loads(one['metadata'])['batch'] == (2 if '-ba2' in path else 4)
        assert 'latest' in one['aliases']
    assert {entry['path'] for entry in found[str(sharded)]['manifest']['contents']} == {
        str(inner.relative_to(sharded)) for inner in sharded.rglob('*') if inner.is_file()
    }


@pytest.mark.long
def test_checkpoints_in_an_object_store_are_referenced_there(two_ranks, tmp_path, s3, s3_client):
    two_ranks.run(wandb_cases.train_into_object_store, s3, str(tmp_path), 's3://bucket/job')
    (file,) = _lives(tmp_path)
    referenced = [entry['ref'] for one in _of_type(file, 'artifact') for entry in one['manifest']['contents']]
    keys = [f's3://bucket/{one["Key"]}' for one in s3_client.list_objects_v2(Bucket='bucket')['Contents']]
    files = [key for key in keys if '/checkpoints/ep' in key and key.endswith('.pt')]
    assert len(files) == 2
    (sharded,) = {key.rpartition('/')[0] for key in keys if key.endswith('.distcp')}
    assert sorted(referenced) == sorted([*files, sharded])


def test_two_starts_in_one_second_are_two_files(tmp_path):
    """W&B names folders by the second, and would write over the first."""
    for value in range(3):
        wait_for_own_folder(tmp_path, 'same')
        settings = wandb.Settings(console='off', silent=True)
        with wandb.init(project='p', id='same', resume='allow', mode='offline', dir=tmp_path, settings=settings) as run:
            run.log({'value': value})
    assert [item['item']['value'] for file in _lives(tmp_path) for item in _of_type(file, 'history')] == [0, 1, 2]
