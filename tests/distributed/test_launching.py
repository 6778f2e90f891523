"""Launchers, and two nodes: each a network namespace with an address and a disk of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_ds.testing import LAUNCHER_VARIABLES
from tests.distributed import launched_job

ROOT = Path(__file__).parents[2]
NAMES = ('composer-ds-0', 'composer-ds-1')
ADDRESSES = ('10.77.61.1', '10.77.61.2')
LIMIT_SEC = 150


def _ip(*arguments: str) -> None:
    subprocess.run(['ip', *arguments], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture(scope='module')
def nodes() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a cable; needs root, and a kernel that allows them."""
    if shutil.which('ip') is None:
        pytest.skip('the command `ip` (iproute2) is not there')
    try:
        try:
            for name in NAMES:
                _ip('netns', 'add', name)
            _ip('link', 'add', 'cable0', 'netns', NAMES[0], 'type', 'veth', 'peer', 'name', 'cable1', 'netns', NAMES[1])
            for rank, name in enumerate(NAMES):
                _ip('-n', name, 'address', 'add', f'{ADDRESSES[rank]}/24', 'dev', f'cable{rank}')
                _ip('-n', name, 'link', 'set', 'lo', 'up')
                _ip('-n', name, 'link', 'set', f'cable{rank}', 'up')
        except subprocess.CalledProcessError as error:
            pytest.skip(f'this machine does not allow network namespaces: {error.stderr.strip()}')
        yield NAMES
    finally:
        for name in NAMES:
            subprocess.run(['ip', 'netns', 'delete', name], check=False, capture_output=True, timeout=20)


def _launch(folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Run the job on both nodes, each with its disk mounted at the same path; return exit codes and outputs."""
    disk = folder / 'disk'
    disk.mkdir(exist_ok=True)
    processes = []
    for rank, name in enumerate(NAMES):
        own = folder / f'disk{rank}'
        own.mkdir(exist_ok=True)
        launcher = (
            f'{sys.executable} -m composer.cli.launcher -n 1 --world_size 2 --node_rank {rank} '
            f'--master_addr {ADDRESSES[0]} --master_port 29513 -m tests.distributed.launched_job {" ".join(arguments)}'
        )
        # `ip netns exec` makes a mount namespace, too.
        script = f'mount --bind {own} {disk} && cd {disk} && exec timeout --kill-after 5 {LIMIT_SEC} {launcher}'
        environment = {**os.environ, 'GLOO_SOCKET_IFNAME': f'cable{rank}', 'PYTHONPATH': str(ROOT)}
        command = ['ip', 'netns', 'exec', name, 'bash', '-c', script]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        )
    return [(process.wait(), output) for process in processes for output in [process.communicate()[0]]]


def _results(launched: list[tuple[int, str]]) -> list[dict[str, list[float]]]:
    results = []
    for rank, (code, output) in enumerate(launched):
        found = re.search(rf'^RESULT {rank} (.*)$', output, re.MULTILINE)
        assert code == 0 and found, output
        results.append(json.loads(found[1]))
    return results


def _assert_alike(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if name != 'began_at':
            assert found[name] == pytest.approx(values, abs=1e-6), name


LAUNCHERS = {
    'torchrun': ['torch.distributed.run', '--nproc_per_node', '2', '-m'],
    'deepspeed': ['deepspeed.launcher.runner', '--num_gpus', '2', '--master_port', '29514', '--module'],
}


@pytest.mark.long
@pytest.mark.parametrize('launcher', LAUNCHERS)
def test_other_launchers(two_ranks, launcher: str, tmp_path):
    """Autoresume needs NODE_RANK, which neither of them sets."""
    expected = two_ranks.run(launched_job.train, 'plain', '2ba')[0]
    command = [sys.executable, '-m', *LAUNCHERS[launcher], 'tests.distributed.launched_job', 'consolidated', '2ba']
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment['PYTHONPATH'] = str(ROOT)
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=LIMIT_SEC, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    for rank in range(2):
        found = re.search(rf'RESULT {rank} (\{{.*?\}})', output)
        assert found, output
        _assert_alike(json.loads(found[1]), expected)


@pytest.mark.long
@pytest.mark.timeout(6 * LIMIT_SEC)
def test_training_saving_and_resuming_with_disks_of_their_own(nodes, two_ranks, tmp_path):
    half, whole = (two_ranks.run(launched_job.train, 'plain', duration)[0] for duration in ('4ba', '6ba'))
    assert any(half[name] != values for name, values in whole.items())

    for result in _results(_launch(tmp_path, 'consolidated', '4ba')):
        assert result['began_at'] == [0]
        _assert_alike(result, half)
    shards = [{path.name for path in (tmp_path / f'disk{rank}' / 'sharded').rglob('*.distcp')} for rank in range(2)]
    assert shards == [{'__0_0.distcp'}, {'__1_0.distcp'}]  # each node has its own only
    assert (tmp_path / 'disk0/consolidated/latest-rank0.pt').exists()
    assert not list((tmp_path / 'disk1').glob('consolidated/*'))

    for kind in ('sharded', 'consolidated'):
        for rank in range(2):
            shutil.copytree(tmp_path / f'disk{rank}', tmp_path / kind / f'disk{rank}', symlinks=True)
        launched = _launch(tmp_path / kind, kind, '6ba')
        for result in _results(launched):
            assert result['began_at'] == [4]
            _assert_alike(result, whole)
        if kind == 'consolidated':
            assert 'It is copied to 1 other node' in launched[0][1]
            assert not list((tmp_path / kind / 'disk1').glob('consolidated/*'))  # and removed there

    # Disks exchanged: rank 0 would begin anew in silence.
    (tmp_path / 'disk0').rename(tmp_path / 'first')
    (tmp_path / 'disk1').rename(tmp_path / 'disk0')
    (tmp_path / 'first').rename(tmp_path / 'disk1')
    for code, output in _launch(tmp_path, 'consolidated', '6ba'):
        assert code != 0 and 'Start the nodes in the same order as before' in output, output

    # Both have one, and they differ.
    older = tmp_path / 'disk0' / 'consolidated'
    older.mkdir(exist_ok=True)
    shutil.copy(next((tmp_path / 'disk1' / 'consolidated').glob('*ba2*')), older / 'latest-rank0.pt')
    for code, output in _launch(tmp_path, 'consolidated', '6ba'):
        assert code != 0 and 'is not the same file for rank' in output, output
