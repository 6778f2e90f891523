"""What becomes of sharded checkpoints when something goes wrong, and of training meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

from composer_ds.sharded.siblings import newest_of
from tests.distributed import sharded_safety_cases as cases


@pytest.fixture(scope='module')
def whole(two_ranks) -> dict:
    """A run that nothing happens to, and that saves nothing."""
    found = two_ranks.run(cases.train)[0]
    assert all(
        not torch.equal(found['start'][name], value) for name, value in found['weights'].items() if name != 'offset'
    )
    return found


PHASES = {
    'state.pt': ('writing.write_stream', 100),
    'shards': ('writing.save', 100),
    'manifest': ('writing.finish', 100),
    'latest': ('writing.point_latest', 4),
}
NO_ROOM = [('state.pt', [0]), ('shards', [0, 1]), ('shards', [0]), ('shards', [1]), ('manifest', [0]), ('latest', [0])]
FAST = [('state.pt', [0], False), ('shards', [1], False), ('shards', [0], True), ('latest', [0], True)]
SLOW = [(*one, background) for one in NO_ROOM for background in (False, True) if (*one, background) not in FAST]


@pytest.mark.parametrize(
    ('phase', 'ranks', 'asynchronous'), [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)], ids=str
)
def test_no_room_on_the_disk(two_ranks, tmp_path, whole, phase: str, ranks: list[int], asynchronous: bool):
    place, limit_bytes = PHASES[phase]
    results = two_ranks.run(cases.no_room, str(tmp_path), place, ranks, limit_bytes, asynchronous)
    messages = {found['error'][1] for found in results}
    assert len(messages) == 1 and all(found['error'][0] == 'CheckpointError' for found in results)
    (message,) = messages
    assert (
        f'{tmp_path}/ep0-ba3' in message and 'File too large' in message and f'(Found by rank {ranks[0]}.)' in message
    )
    if phase == 'latest':
        assert 'is complete, but latest' in message
    else:
        assert 'was not saved: File too large (EFBIG); ' in message and 'bytes are free there' in message
        assert 'Older ones are intact. Make room' in message
    names = ['ep0-ba1', 'ep0-ba2', *(['ep0-ba3'] if phase == 'latest' else []), 'latest']
    # state.pt is written before the batches go on, the rest behind their back, and the next save tells.
    in_background = asynchronous and phase != 'state.pt'
    for found in results:
        assert found['error'][2] < 30
        assert found['names'] == names
        assert found['batch'] == (4 if in_background else 3)
        # Whoever catches the error can go on with the same Trainer.
        torch.testing.assert_close(found['weights'], whole['weights'], rtol=0, atol=1e-6)
        assert found['losses'] == pytest.approx(whole['losses'], abs=1e-6)
    last = 'ep1-ba6'
    assert (tmp_path / 'latest').read_text().strip() == last and newest_of(tmp_path) == tmp_path / last


@pytest.mark.slow
def test_what_could_be_saved_before_a_disk_was_full_is_resumed_from(two_ranks, tmp_path, whole):
    two_ranks.run(cases.fails_last, str(tmp_path))
    for found in two_ranks.run(cases.train, str(tmp_path), autoresume=True):
        assert found['losses'].keys() == {6}
        torch.testing.assert_close(found['weights'], whole['weights'], rtol=0, atol=1e-6)


def test_the_last_save_in_the_background_is_an_error_of_fit(two_ranks, tmp_path):
    for kind, message, after_sec in two_ranks.run(cases.fails_last, str(tmp_path)):
        assert kind == 'CheckpointError' and 'ep1-ba6 was not saved' in message and after_sec < 30


@pytest.mark.parametrize('ranks', [[0, 1], [0], [1]])
def test_an_error_in_what_a_callback_saves_reaches_every_rank(two_ranks, tmp_path, ranks: list[int]):
    for (kind, message, after_sec), names in two_ranks.run(cases.failing_state, str(tmp_path), ranks):
        assert kind == 'CheckpointError' and "ValueError('a mistake of the user')" in message and after_sec < 30
        assert names == []


@pytest.mark.parametrize('zero_stage', [1, 2, 3])
def test_asynchronous_saves_hold_the_moment_of_the_save(two_ranks, tmp_path, zero_stage: int):
    for found in two_ranks.run(cases.slow_and_fast, str(tmp_path), zero_stage):
        torch.testing.assert_close(found['weights'], found['blocking'], rtol=0, atol=0)
        # The first was written after batch 4 had been trained, and the second waited for it.
        assert found['first ended after'] > found['waited for the first'] + 0.25 and not found['overlaps']
    saved = {}
    for kind in ('asynchronous', 'blocking'):
        names = sorted(os.listdir(tmp_path / kind))
        assert names == ['ep0-ba2', 'ep1-ba4', 'ep1-ba6', 'latest']
        saved[kind] = {name: cases.stored(tmp_path / kind / name) for name in names[:-1]}
    assert any(name.startswith('exp_avg_sq of') for name in saved['blocking']['ep0-ba2'])
    torch.testing.assert_close(saved['asynchronous'], saved['blocking'], rtol=0, atol=0)
    first, second = saved['blocking']['ep0-ba2'], saved['blocking']['ep1-ba4']
    assert all(not torch.equal(first[name], second[name]) for name in first if name != 'offset')


def test_training_that_fails_during_a_save_does_not_hang(two_ranks, tmp_path):
    for (kind, message, _), closed_sec, names in two_ranks.run(cases.fails_while_saving, str(tmp_path)):
        assert (kind, message) == ('ValueError', 'a mistake of the user') and 0.2 < closed_sec < 10
        assert names == ['ep0-ba2', 'latest']
    cases.stored(tmp_path / 'ep0-ba2')


def test_saves_do_not_warn(two_ranks, tmp_path):
    assert two_ranks.run(cases.warnings_of_saves, str(tmp_path)) == [[], []]


def test_rotation_across_runs(two_ranks, tmp_path, whole):
    for keep, asynchronous in ((1, True), (2, False)):
        folder = tmp_path / f'keeps{keep}'
        saving = {'num_checkpoints_to_keep': keep, 'asynchronous': asynchronous}
        steps = [{**saving, 'max_duration': '4ba'}, {**saving, 'autoresume': True}]
        (first, first_names), (second, second_names) = two_ranks.run(cases.one_after_the_other, str(folder), steps)[0]
        names = ['ep0-ba1', 'ep0-ba2', 'ep0-ba3', 'ep1-ba4', 'ep1-ba5', 'ep1-ba6']
        assert first_names == [*names[4 - keep : 4], 'latest', '-> ep1-ba4']
        assert second_names == [*names[6 - keep :], 'latest', '-> ep1-ba6']
        assert first.keys() == {1, 2, 3, 4} and second.keys() == {5, 6}
        assert {**first, **second} == pytest.approx(whole['losses'], abs=1e-6)


def test_two_runs_are_not_mixed_in_one_folder(two_ranks, tmp_path, whole):
    short = {'max_duration': '2ba', 'num_checkpoints_to_keep': 2}
    steps = [{'interval': '3ba'}, short, {**short, 'overwrite': True}, {'autoresume': True, 'overwrite': True}]
    # What a killed save and a killed removal left is no checkpoint, and does not stay.
    for name in ('.incomplete-ep0-ba9', '.incomplete-old-ep0-ba1'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'state.pt').write_text('half')
    for rank_results in two_ranks.run(cases.one_after_the_other, str(tmp_path), steps):
        (first, names), (refused, same), (overwritten, new), (resumed, _) = rank_results
        assert first == pytest.approx(whole['losses'], abs=1e-6)
        assert names == same == ['ep0-ba3', 'ep1-ba6', 'latest', '-> ep1-ba6']
        assert refused[0] == 'ConfigError'
        for part in ('training starts at batch 0', 'ep0-ba3 (batch 3)', 'ep1-ba6 (batch 6)', 'Give autoresume=True'):
            assert part in refused[1]
        assert overwritten.keys() == {1, 2}
        # The overwritten run had gone further, and is not gone on with.
        assert new == ['ep0-ba1', 'ep0-ba2', 'latest', '-> ep0-ba2']
        assert resumed == pytest.approx({batch: whole['losses'][batch] for batch in (3, 4, 5, 6)}, abs=1e-6)


@pytest.mark.slow
def test_an_overwritten_run_that_went_further_is_not_gone_on_with(two_ranks, tmp_path):
    steps = [{'interval': '3ba'}, {'max_duration': '2ba', 'overwrite': True}, {'autoresume': True, 'overwrite': True}]
    (_, _), (_, names), (resumed, _) = two_ranks.run(cases.one_after_the_other, str(tmp_path), steps)[0]
    assert names == ['ep0-ba1', 'ep0-ba2', 'ep0-ba3', 'ep1-ba6', 'latest', '-> ep0-ba2']
    assert resumed.keys() == {3, 4, 5, 6}


def test_one_name_for_several_saves(two_ranks, tmp_path):
    steps = [{'filename': 'ep{epoch}', 'num_checkpoints_to_keep': 1}]
    ((_, names),) = two_ranks.run(cases.one_after_the_other, str(tmp_path), steps)[0]
    assert names == ['ep1', 'latest', '-> ep1']
    cases.stored(tmp_path / 'ep1')


def test_a_save_waits_for_the_end_of_an_optimizer_step(two_ranks, tmp_path):
    windows = {'batches_per_optimizer_step': 2}
    steps = [{**windows, 'interval': '3ba', 'max_duration': '5ba'}]
    ((_, names),) = two_ranks.run(cases.one_after_the_other, str(tmp_path), steps)[0]
    # After batch 3, half of the second optimizer step is done; the last one is cut short at the end of training.
    assert names == ['ep1-ba4', 'ep1-ba5', 'latest', '-> ep1-ba5']


@pytest.mark.parametrize(('ranks', 'times', 'asynchronous'), [([1], 2, True), ([0, 1], 2, False)], ids=str)
def test_sigterm(two_ranks, tmp_path, whole, ranks: list[int], times: int, asynchronous: bool):
    saving = {'autoresume': True, 'asynchronous': asynchronous}
    for found, names in two_ranks.run(cases.told_to_end, str(tmp_path), ranks, 2, times, **saving):
        # The batch at hand was the third.
        assert found['batch'] == 3 and names == ['ep0-ba3', 'latest']
    for found in two_ranks.run(cases.train, str(tmp_path), **saving):
        assert found['losses'].keys() == {4, 5, 6}
        torch.testing.assert_close(found['weights'], whole['weights'], rtol=0, atol=1e-6)


def test_sigterm_within_an_optimizer_step_of_several_batches(two_ranks, tmp_path):
    windows = {'batches_per_optimizer_step': 2}
    expected = two_ranks.run(cases.train, **windows)[0]
    for found, names in two_ranks.run(cases.told_to_end, str(tmp_path), [1], 2, **windows):
        assert found['batch'] == 4 and names == ['ep1-ba4', 'latest']
    for found in two_ranks.run(cases.train, str(tmp_path), autoresume=True, **windows):
        assert found['losses'].keys() == {5, 6}
        torch.testing.assert_close(found['weights'], expected['weights'], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('asynchronous', [False, True], ids=['blocking', 'asynchronous'])
def test_object_store(two_ranks, s3, whole, tmp_path, asynchronous: bool):
    uri = 's3://bucket/runs/one'
    for found in two_ranks.run(cases.in_object_store, s3, uri, str(tmp_path), asynchronous):
        assert found['left after saves'] == found['left'] == []
        assert found['first']['losses'].keys() == {1, 2, 3, 4}
        assert found['autoresume']['losses'].keys() == {5, 6} and found['by name']['losses'].keys() == {3, 4, 5, 6}
        for way in ('autoresume', 'by name'):
            torch.testing.assert_close(found[way]['weights'], whole['weights'], rtol=0, atol=1e-6)
        assert found['by latest']['losses'].keys() == {7}
        kind, message, _ = found['refused']
        assert kind == 'ConfigError' and f'the folder holds {uri}/ep1-ba6 (batch 6)' in message
        for name in ('s3://bucket/nothing', 's3://bucket', f'{uri}/ep9-ba9', 's3://absent/nothing'):
            kind, message, after_sec = found[name]
            assert kind == 'CheckpointError' and f'{name} holds neither a checkpoint nor latest' in message, message
            assert after_sec < 30


@pytest.mark.slow
def test_missing_objects(two_ranks, s3, s3_client):
    uri = 's3://bucket/runs/two'
    two_ranks.run(cases.train_in_object_store, s3, uri)
    s3_client.delete_object(Bucket='bucket', Key='runs/two/ep1-ba6/__1_0.distcp')
    # latest is left, and names a checkpoint that is gone.
    for kind, message, _ in two_ranks.run(cases.load_from_object_store, s3, uri):
        assert kind == 'CheckpointError' and f'{uri}/ep1-ba6/__1_0.distcp is missing' in message
    s3_client.delete_object(Bucket='bucket', Key='runs/two/ep1-ba6/manifest.json')
    for kind, message, _ in two_ranks.run(cases.load_from_object_store, s3, uri):
        assert kind == 'CheckpointError' and f'{uri}/ep1-ba6 is not a complete sharded checkpoint' in message
    s3_client.delete_object(Bucket='bucket', Key='runs/two/latest')
    for kind, message, _ in two_ranks.run(cases.load_from_object_store, s3, uri):
        assert kind == 'CheckpointError' and f'{uri} holds neither a checkpoint nor latest' in message


@pytest.mark.slow
@pytest.mark.parametrize(('rank', 'asynchronous'), [(0, False), (1, True)], ids=str)
def test_a_failing_upload_is_an_error_on_every_rank(two_ranks, s3, whole, rank: int, asynchronous: bool):
    uri = 's3://bucket/runs/three'
    for error, left, resumed in two_ranks.run(cases.failing_upload, s3, uri, rank, asynchronous):
        kind, message, after_sec = error
        assert kind == 'CheckpointError' and after_sec < 30 and left == []
        assert f'{uri}/ep0-ba3 was not uploaded' in message and 'the network is gone' in message
        assert f'(Found by rank {rank}.)' in message
        assert resumed['losses'].keys() == {3, 4, 5, 6}
        torch.testing.assert_close(resumed['weights'], whole['weights'], rtol=0, atol=1e-6)


def _wait_for_second_batch(marker: pathlib.Path, job: subprocess.Popen, output: pathlib.Path) -> None:
    deadline = time.monotonic() + 120
    while not all(marker.with_name(f'{marker.name}-rank{rank}').exists() for rank in range(2)):
        assert job.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


@pytest.mark.long
def test_sigterm_under_the_launcher(two_ranks, tmp_path, whole):
    """The launcher passes the signal on; told as a group, each rank hears it twice."""
    output, marker, folder = tmp_path / 'output', tmp_path / 'job', tmp_path / 'saves'
    command = ['composer', '-n', '2', '-m', 'tests.distributed.preempted_run', str(folder), str(marker)]
    with open(output, 'w') as file:
        job = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_for_second_batch(marker, job, output)
        os.killpg(job.pid, signal.SIGTERM)
        assert job.wait(60) == 0, output.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    # It ended as training ends, after the batch at hand or the next one, not at the sixth.
    losses = [json.loads((tmp_path / f'job-losses{rank}').read_text()) for rank in range(2)]
    assert losses[0] == losses[1] and set(losses[0]) in ({'1', '2'}, {'1', '2', '3'})
    batch = max(map(int, losses[0]))
    assert sorted(os.listdir(folder)) == [f'ep0-ba{batch}', 'latest']
    for part in ('SystemExit: 143', 'Waiting up to 30 seconds', f'SIGTERM: saved after batch {batch}'):
        assert part in output.read_text()
    for found in two_ranks.run(cases.train, str(folder), autoresume=True):
        assert min(found['losses']) == batch + 1 and max(found['losses']) == 6
        torch.testing.assert_close(found['weights'], whole['weights'], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif('COMPOSER_DS_SHARDED_KILLS' not in os.environ, reason='make kills')
def test_killed_at_random_moments(tmp_path):
    """Part of `make kills`; what is checked after each kill stands in sharded_lives.py."""
    kills = os.environ['COMPOSER_DS_SHARDED_KILLS'].split()
    arguments = [sys.executable, '-m', 'tests.distributed.sharded_lives', str(tmp_path), '--kills', *kills]
    limit_sec = 120 + 25 * sum(map(int, kills))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=limit_sec, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    for world_size, count in enumerate(map(int, kills), start=1):
        if count == 0:
            continue
        found = report[str(world_size)]
        assert found['kills'] >= count
        # The kills are of use only where they hit saves.
        assert found['within_a_save'] >= count // 5
