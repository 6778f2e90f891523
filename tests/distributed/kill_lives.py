"""Training that is killed again and again, at random moments, and resumes: ``python -m tests.distributed.kill_lives``.

Every life is forked from this process, which has imported Composer and DeepSpeed already and has no process group. A
life trains with ZeRO 2, saves after every batch, and writes down what it does; nearly all of its time goes into saves.
The oracle is a life that is never killed and never saves.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 # before the forks, as the other one
import torch
import torch.utils.cpp_extension
from composer import Callback, ComposerModel, Trainer
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from composer_ds.checkpoint.damage import damage

LIFE_LIMIT_SEC = 60.0
PATTERN = 'ep*-ba*-rank0.pt'


class Wide(ComposerModel):
    """A million parameters: a checkpoint of 12 MB, and little to compute."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 3))

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


class Diary(Callback):
    """Writes down every loss, and every batch whose checkpoint is saved, before it goes on."""

    def __init__(self, path: pathlib.Path):
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _write(self, line: str) -> None:
        if dist.get_global_rank() == 0:
            os.write(self.file, f'{line}\n'.encode())

    def before_load(self, state, logger):
        self._write('built 0')

    def batch_start(self, state, logger):
        self._write(f'saved {int(state.timestamp.batch)}')

    def batch_end(self, state, logger):
        self._write(f'loss {int(state.timestamp.batch)} {float(state.total_loss_dict["loss/train/total"])!r}')


def live(diary: pathlib.Path, folder: pathlib.Path | None, batches: int) -> None:
    """Train to the given number of batches, resuming from the folder."""
    generator = torch.Generator().manual_seed(1)
    count = 20 * dist.get_world_size()
    dataset = TensorDataset(
        torch.randn(count, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )
    torch.manual_seed(2)
    model = Wide()
    saving: dict[str, Any] = {}
    if folder is not None:
        saving = {'save_folder': str(folder), 'save_interval': '1ba', 'save_num_checkpoints_to_keep': 2}
        saving |= {'autoresume': True}
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False)),
        max_duration=f'{batches}ba',
        run_name='lives',
        device='cpu',
        algorithms=[DeepSpeed(zero_stage=2)],
        callbacks=[Diary(diary)],
        progress_bar=False,
        seed=3,
        **saving,
    )
    trainer.fit()
    trainer.close()


def fork_ranks(world_size: int, log: pathlib.Path, function: Callable[..., None], *arguments: Any) -> list[int]:
    """Fork a process for each rank, which calls the function; the process ids."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR')
                values = (rank, rank, world_size, world_size, 0, '127.0.0.1')
                os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
                os.environ['MASTER_PORT'] = str(port)
                function(*arguments)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def end(pids: list[int], kill: bool) -> list[int]:
    """Kill the ranks, or wait for them; their exit codes."""
    if kill:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def read(diary: pathlib.Path) -> tuple[dict[int, float], int]:
    """The losses by batch, and the last batch that was known to be saved."""
    losses, saved = {}, 0
    for line in diary.read_text().splitlines() if diary.exists() else []:
        kind, batch, *rest = line.split()
        if kind == 'loss':
            losses[int(batch)] = float(rest[0])
        else:
            saved = int(batch)
    return losses, saved


def has_built(diary: pathlib.Path) -> bool:
    """Whether the engine of a life stands, and so whether it may be killed."""
    return diary.exists() and diary.read_text().startswith('built')


def newest_complete(folder: pathlib.Path) -> int:
    """The number of batches in the newest file that is whole; 0 without one. Every file must be."""
    batches = [0]
    for path in folder.glob(PATTERN):
        assert damage(str(path)) is None, path
        batches.append(int(path.name.split('-')[1].removeprefix('ba')))
    return max(batches)


def chain(folder: pathlib.Path, world_size: int, kills: int, oracle: dict[int, float], seed: int) -> dict[str, int]:
    """Kill so many lives, one after the other in one folder, checking everything after each."""
    generator, saves = random.Random(seed), folder / 'saves'
    counts = {'kills': 0, 'within a save': 0, 'within the start': 0, 'latest behind': 0, 'saves': 0}
    announced = resumes_from = 0
    for life in range(kills + 1):
        last = life == kills
        diary, log = folder / f'diary{life}', folder / f'log{life}'
        batches = resumes_from + 3 if last else len(oracle)
        pids = fork_ranks(world_size, log, live, diary, saves, batches)
        started = time.monotonic()
        if last:
            assert end(pids, kill=False) == [0] * world_size, log.read_text()
        else:
            # One in six is killed while it loads or begins to train, the others after a save or some. None earlier:
            # who is killed while torch opens a compiled extension leaves a lock, for which all others wait forever.
            early = generator.random() < 1 / 6
            while not (read(diary)[0] or (early and has_built(diary))):
                alive = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in pids]
                assert all(alive) and time.monotonic() - started < LIFE_LIMIT_SEC, log.read_text()
                time.sleep(0.002)
            time.sleep(generator.uniform(0.0, 0.3))
            codes = end(pids, kill=True)
            assert codes == [-signal.SIGKILL] * world_size, (life, codes, log.read_text())
            counts['kills'] += 1
        losses, saved = read(diary)
        # It went on where the newest complete checkpoint was, and as if nothing had happened.
        assert not losses or min(losses) == resumes_from + 1, (life, min(losses), resumes_from)
        for batch, loss in losses.items():
            assert abs(loss - oracle[batch]) < 1e-6, (life, batch, loss, oracle[batch])
        announced = max(announced, saved)
        counts['saves'] += max(saved - resumes_from, 0)
        counts['within the start'] += not losses
        leftovers = list(saves.glob('.incomplete-*'))
        counts['within a save'] += bool(leftovers) and bool(losses)
        latest = saves / 'latest-rank0.pt'
        assert latest.exists() or announced == 0
        resumes_from = newest_complete(saves)
        if latest.exists():
            named = torch.load(latest, weights_only=False)['state']['timestamp']['Timestamp']['batch']
            assert announced <= named <= resumes_from <= named + 1, (life, announced, named, resumes_from)
            counts['latest behind'] += named < resumes_from
        if last:
            assert not leftovers and resumes_from == batches
    return counts


def main() -> None:
    """Run the chains of lives, and print what happened as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--kills', type=int, nargs='+', default=[6, 2], help='on 1 rank, on 2 ranks, ...')
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    report = {}
    for world_size, kills in enumerate(arguments.kills, start=1):
        folder = arguments.folder / f'{world_size}ranks'
        folder.mkdir(parents=True)
        oracle = folder / 'oracle'
        codes = end(fork_ranks(world_size, folder / 'log', live, oracle, None, 20 + 8 * kills), kill=False)
        assert codes == [0] * world_size, (folder / 'log').read_text()
        losses, _ = read(oracle)
        report[world_size] = chain(folder, world_size, kills, losses, arguments.seed)
    print(json.dumps(report))


if __name__ == '__main__':
    main()
