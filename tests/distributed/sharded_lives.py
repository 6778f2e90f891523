"""Training with sharded checkpoints that is killed again and again: ``python -m tests.distributed.sharded_lives``.

As in kill_lives.py, every life is forked from this process. A life trains with ZeRO 1, 2 or 3, in turn, saves after
every batch, blocking or in the background, and is killed at a random moment: all ranks or one, after which the others
must end by themselves. The next life resumes. The oracle is a life that is never killed and never saves.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import signal
import time
from typing import Any

import torch
from composer import Trainer
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

from composer_ds import DeepSpeed
from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver
from composer_ds.sharded.manifest import MANIFEST
from composer_ds.sharded.source import ShardedSource
from tests.distributed.kill_lives import LIFE_LIMIT_SEC, Diary, Wide, fork_ranks, has_built, read

BATCHES, BATCHES_PER_EPOCH = 30, 11
SURVIVORS_LIMIT_SEC = 30.0


class ShardedDiary(Diary):
    """Writes down, at the start of every batch, the newest checkpoint that the saver says is complete."""

    def __init__(self, path: pathlib.Path, saver: ShardedCheckpointSaver | None):
        super().__init__(path)
        self.saver = saver

    def batch_start(self, state, logger):
        if self.saver is not None and self.saver._saved_at >= 0:
            writing = self.saver._writing
            if writing is None or (writing.done() and writing.exception() is None):
                self._write(f'saved {self.saver._saved_at}')


def live(folder: pathlib.Path, name: str, zero_stage: int, asynchronous: bool, saves: pathlib.Path | None) -> None:
    """Train to the end, resuming from the folder; write down the weights then."""
    generator = torch.Generator().manual_seed(1)
    count = 4 * BATCHES_PER_EPOCH * dist.get_world_size()
    dataset = TensorDataset(
        torch.randn(count, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )
    torch.manual_seed(2)
    model = Wide()
    saver = None
    if saves is not None:
        saver = ShardedCheckpointSaver(
            str(saves), '1ba', num_checkpoints_to_keep=2, asynchronous=asynchronous, autoresume=True
        )
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        train_dataloader=DataLoader(dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=False)),
        max_duration=f'{BATCHES}ba',
        run_name='lives',
        device='cpu',
        algorithms=[DeepSpeed(zero_stage=zero_stage)],
        callbacks=[*([] if saver is None else [saver]), ShardedDiary(folder / f'diary-{name}', saver)],
        progress_bar=False,
        seed=3,
    )
    trainer.fit()
    weights = {key: value.clone() for key, value in trainer.state.model.state_dict().items()}
    if dist.get_global_rank() == 0:
        torch.save(weights, folder / f'weights-{name}.pt')
    trainer.close()


def wait_for(pids: list[int], limit_sec: float) -> list[int] | None:
    """Wait until all processes have ended; their exit codes, or None when one is left."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit_sec
    while time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        if len(codes) == len(pids):
            return [codes[pid] for pid in pids]
        time.sleep(0.01)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return None


def batch_of(path: pathlib.Path) -> int:
    """The batch of a checkpoint, which must be complete and undamaged."""
    source = ShardedSource(path)
    assert not source.missing() and not source.damaged(), path
    assert all(source.read(name, 0, one.shape.numel()).isfinite().all() for name, one in source.tensors.items())
    return source.manifest.time['batch']


@dataclasses.dataclass
class Counts:
    """What the kills hit."""

    kills: int = 0
    of_one_rank: int = 0
    asynchronous: int = 0
    within_a_save: int = 0
    within_the_start: int = 0
    recovered: int = 0
    """Checkpoints that were complete, but had no name yet."""
    latest_behind: int = 0
    slowest_end_of_survivors_sec: float = 0.0


def one_life(
    generator: random.Random, folder: pathlib.Path, number: int, world_size: int, is_last: bool, counts: Counts
) -> tuple[dict[int, float], int, bool]:
    """Let a life begin, and kill it unless it is the last; its losses, what it said was saved, and if it was killed."""
    name, asynchronous = str(number), generator.random() < 0.5
    log, diary = folder / f'log-{name}', folder / f'diary-{name}'
    pids = fork_ranks(world_size, log, live, folder, name, number % 3 + 1, asynchronous, folder / 'saves')
    started = time.monotonic()
    if not is_last:
        early = generator.random() < 1 / 8  # while it loads, or begins to train
        while not (read(diary)[0] or (early and has_built(diary))):
            assert time.monotonic() - started < LIFE_LIMIT_SEC and not one_is_dead(pids), log.read_text()
            time.sleep(0.002)
        time.sleep(generator.uniform(0.0, 0.4))
        victims = pids if generator.random() < 0.5 else [generator.choice(pids)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        codes = wait_for(pids, SURVIVORS_LIMIT_SEC)
        assert codes is not None, f'the others did not end: {log.read_text()}'
        if len(victims) < len(pids):
            counts.of_one_rank += 1
            seconds = round(time.monotonic() - killed_at, 1)
            counts.slowest_end_of_survivors_sec = max(counts.slowest_end_of_survivors_sec, seconds)
    else:
        codes = wait_for(pids, LIFE_LIMIT_SEC)
        assert codes is not None, log.read_text()
    losses, saved = read(diary)
    finished = codes == [0] * world_size
    assert finished or not is_last, log.read_text()
    if not finished:
        assert -signal.SIGKILL in codes and 0 not in codes, (codes, log.read_text())
        counts.kills += 1
        counts.asynchronous += asynchronous
        counts.within_the_start += not losses
    return losses, saved, not finished


def one_is_dead(pids: list[int]) -> bool:
    """Whether a process has ended; it is not waited for."""
    return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None for pid in pids)


def chain(
    generator: random.Random, folder: pathlib.Path, world_size: int, kills: int, oracle: Any, counts: Counts
) -> None:
    """Kill lives in one folder until there were enough kills, or training is through; check everything after each."""
    saves, losses_of_oracle = folder / 'saves', oracle[0]
    announced, expected, number = 0, 0, 0
    while True:
        enough = counts.kills >= kills
        losses, saved, killed = one_life(generator, folder, number, world_size, enough, counts)
        # It went on where the newest complete checkpoint was, and as if nothing had happened.
        assert not losses or min(losses) == expected + 1, (number, min(losses), expected)
        for batch, loss in losses.items():
            assert abs(loss - losses_of_oracle[batch]) < 1e-5, (number, batch, loss, losses_of_oracle[batch])
        announced = max(announced, saved)
        hidden = [path for path in saves.glob('.incomplete-*') if path.is_dir()]
        named = [batch_of(path) for path in saves.glob('[!.]*') if path.is_dir()]
        complete = [path for path in hidden if (path / MANIFEST).exists() and 'old-' not in path.name]
        nameless = [batch_of(path) for path in complete]
        counts.within_a_save += bool(hidden) and bool(losses)
        newest = max([0, *named, *nameless])
        assert newest >= announced, (number, newest, announced)
        counts.recovered += newest > max([0, *named])
        if (saves / 'latest').exists():
            latest = batch_of(saves / (saves / 'latest').read_text().strip())
            assert announced - 1 <= latest <= newest, (number, announced, latest, newest)
            counts.latest_behind += latest < max(named)
        else:
            assert announced == 0
        expected = newest
        if not killed:
            break
        number += 1
    assert not hidden and newest == BATCHES and sorted(named) == [BATCHES - 1, BATCHES]
    weights = torch.load(folder / f'weights-{number}.pt')
    torch.testing.assert_close(weights, oracle[1], rtol=0, atol=1e-5)


def main() -> None:
    """Kill so often, and print what happened as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--kills', type=int, nargs='+', default=[2, 4], help='on 1 rank, on 2 ranks, ...')
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    report, started = {}, time.monotonic()
    generator = random.Random(arguments.seed)
    for world_size, kills in enumerate(arguments.kills, start=1):
        if kills == 0:
            continue
        folder = arguments.folder / f'{world_size}ranks'
        folder.mkdir(parents=True)
        codes = wait_for(fork_ranks(world_size, folder / 'log', live, folder, 'oracle', 2, False, None), LIFE_LIMIT_SEC)
        assert codes == [0] * world_size, (folder / 'log').read_text()
        losses, weights = read(folder / 'diary-oracle')[0], torch.load(folder / 'weights-oracle.pt')
        # A batch too many or too few would show.
        assert all(abs(losses[batch] - losses[batch + 1]) > 1e-4 for batch in range(1, BATCHES))
        counts, chains = Counts(), 0
        while counts.kills < kills:
            (folder / str(chains)).mkdir()
            chain(generator, folder / str(chains), world_size, kills, (losses, weights), counts)
            chains += 1
        report[world_size] = {**dataclasses.asdict(counts), 'chains': chains}
    print(json.dumps({**report, 'seconds': round(time.monotonic() - started)}))


if __name__ == '__main__':
    main()
