"""What stands on the pages about migration trains alike before and after, and brings in what was saved before."""

from __future__ import annotations

import os
import shlex
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Time, Timestamp
from composer.optim import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from typer.testing import CliRunner

from composer_ds.cli import app
from composer_ds.facts import Settings
from composer_ds.ownership import problems_of
from composer_ds.testing import RankPool
from tests.distributed import migration_cases
from tests.pages import ROOT, blocks, commands
from tests.unit.test_ownership import FACTS

FOLDER = ROOT / 'docs' / 'migration'
PAGES = {
    # What the names of the weights have before them, after the migration.
    'composer_0_27': '',
    'lightning': '',
    'mmengine': '',
    'deepspeed_loop': 'model.',
    'hugging_face': 'model.',
}
CLOSE = 1e-6


def marked(page: str) -> dict[str, str]:
    """The blocks of a page by the comment above each."""
    path = FOLDER / f'{page}.md'
    lines, found = path.read_text().splitlines(), {}
    for block in blocks(path, 'python', 'bash', 'json'):
        mark = lines[block.line - 3]
        assert mark.startswith('<!-- ') and mark.endswith(' -->'), (page, block.line)
        found[mark[5:-4]] = block.text
    return found


def beginning(page: str) -> str:
    """What the second block has up to its Trainer."""
    return marked(page)['after'].partition('\ntrainer = Trainer(')[0]


def test_pages():
    assert {path.stem for path in FOLDER.glob('*.md')} == {*PAGES, 'index'}
    for page in PAGES:
        assert {'before', 'after', 'consolidate', 'load', 'resume'} <= set(marked(page))


class Saved:
    """A page whose first block has run, in a folder."""

    def __init__(self, page: str, pool: RankPool, folder: Path):
        self.page, self.folder, self.blocks = page, folder, marked(page)
        if 'ds_config.json' in self.blocks:
            (folder / 'ds_config.json').write_text(self.blocks['ds_config.json'])
            pool.run(migration_cases.make_language_model, str(folder))
        found = pool.run(migration_cases.run_before, self.blocks['before'], str(folder))[0]
        self.weights = {PAGES[page] + name: value for name, value in found.items()}

    def run(self, pool: RankPool, block: str) -> Any:
        return pool.run(migration_cases.run_after, beginning(self.page), self.blocks[block], str(self.folder))[0]

    def assert_weights(self, found: dict[str, torch.Tensor], atol: float) -> None:
        assert self.weights and self.weights.keys() <= found.keys()
        for name, expected in self.weights.items():
            torch.testing.assert_close(
                found[name], expected, rtol=0.0, atol=atol, msg=lambda text, name=name: f'{name}: {text}'
            )


def check(saved: Saved, pool: RankPool) -> None:
    """Compare the second block, the resumed run and the weights that were brought in."""
    first, trained = saved.run(pool, 'after')
    saved.assert_weights(trained, CLOSE)
    for name in saved.weights:
        assert not torch.allclose(first[name], trained[name], atol=1e-3), name
    saved.assert_weights(saved.run(pool, 'resume')[1], CLOSE)
    before = Path.cwd()
    os.chdir(saved.folder)
    try:
        (block,) = blocks(FOLDER / f'{saved.page}.md', 'bash')
        for command in commands(block):
            program, *arguments = shlex.split(command)
            if program == 'composer-ds':
                result = CliRunner().invoke(app, arguments)
                assert result.exit_code == 0, (result.output, result.exception)
            else:
                assert program == 'cp'
                shutil.copy(*arguments)
    finally:
        os.chdir(before)
    loaded = saved.run(pool, 'load')[1]
    saved.assert_weights(loaded, 0.0)


@pytest.mark.parametrize('page', [page for page in PAGES if page != 'hugging_face'])
def test_page(two_ranks, tmp_path, page):
    check(Saved(page, two_ranks, tmp_path), two_ranks)


def test_who_clips_when_nobody_asks(two_ranks, tmp_path):
    """DeepSpeed by itself clips at 1.0; here nothing is clipped."""
    page, key = marked('deepspeed_loop'), "'gradient_clipping': 1.0,"
    assert key in page['before'] and key in page['after']
    asked = two_ranks.run(migration_cases.run_before, page['before'], str(tmp_path))[0]
    unasked = two_ranks.run(migration_cases.run_before, page['before'].replace(key, ''), str(tmp_path))[0]
    after = page['after'].replace(key, '')
    found = two_ranks.run(migration_cases.run_after, beginning('deepspeed_loop'), after, str(tmp_path))[0][1]
    for name, expected in asked.items():
        assert torch.equal(unasked[name], expected), name
        assert not torch.allclose(found[f'model.{name}'], expected, atol=1e-3), name


def ours(scheduler: Any, updates: int, length: int) -> list[float]:
    """The factors of a scheduler of Composer's, which moves before the batch is counted."""
    state: Any = types.SimpleNamespace(max_duration=Time.from_batch(length), dataloader_len=None)
    factors = []
    for update in range(updates):
        state.timestamp = Timestamp(batch=max(0, update - 1))
        factors.append(scheduler(state))
    return factors


def theirs(scheduler: Any, optimizer: torch.optim.Optimizer, updates: int) -> list[float]:
    """The learning rates of a scheduler of DeepSpeed's, which moves after each update."""
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]['lr'])
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ('there', 'arguments', 'here', 'later'),
    [
        ('WarmupLR', {}, ConstantWithWarmupScheduler('4ba'), 0),
        ('WarmupDecayLR', {'total_num_steps': 12}, LinearWithWarmupScheduler('4ba', t_max='12ba'), 0),
        (
            'WarmupCosineLR',
            {'total_num_steps': 12, 'cos_min_ratio': 0.1, 'warmup_min_ratio': 0.0},
            CosineAnnealingWithWarmupScheduler('4ba', t_max='12ba', alpha_f=0.1),
            1,
        ),
    ],
)
def test_schedules_of_deepspeed(there, arguments, here, later):
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if there != 'WarmupCosineLR':
        arguments = {'warmup_min_lr': 0.0, 'warmup_max_lr': 1.0, **arguments}
    scheduler = getattr(lr_schedules, there)(optimizer, warmup_num_steps=4, warmup_type='linear', **arguments)
    expected = theirs(scheduler, optimizer, 12)
    assert expected[:5] == pytest.approx([0.0, 0.0, 0.25, 0.5, 0.75]) and len({*expected[5:]}) == (
        1 if there == 'WarmupLR' else 7
    )
    found = ours(here, 12, 12)
    assert found[:5] == pytest.approx(expected[:5]) and found[5 + later :] == pytest.approx(expected[5 : 12 - later])
    assert type(here).__name__ in page_text('deepspeed_loop')


def page_text(page: str) -> str:
    """All of a page."""
    return (FOLDER / f'{page}.md').read_text()


_ZERO = 'zero_optimization'
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    # page, what the page says, what somebody brings, what the error says
    ('deepspeed_loop', '`aio`', {'aio': {'queue_depth': 8}}, 'NVMe offload'),
    ('deepspeed_loop', 'device: nvme', {_ZERO: {'offload_optimizer': {'device': 'nvme'}}}, "write 'cpu'"),
    ('deepspeed_loop', 'Trainer(optimizers=...)', {'optimizer': {'type': 'AdamW', 'params': {'lr': 1}}}, 'both decide'),
    ('deepspeed_loop', 'section `scheduler`', {'scheduler': {'type': 'WarmupLR', 'params': {'warmup_num_steps': 7}}},
     "ConstantWithWarmupScheduler(t_warmup='7ba')"),
    ('deepspeed_loop', 'overlap_comm', {_ZERO: {'stage': 1, 'overlap_comm': True}}, 'works with ZeRO 2 and 3'),
    ('deepspeed_loop', '`tensorboard`', {'tensorboard': {'enabled': True}}, 'TensorboardLogger'),
    ('deepspeed_loop', '`wandb`', {'wandb': {'enabled': True}}, 'WandBLogger'),
    ('deepspeed_loop', '`comms_logger`', {'comms_logger': {'enabled': True}}, 'CommunicationMonitor'),
    ('deepspeed_loop', '`activation_checkpointing`', {'activation_checkpointing': {'partition_activations': True}},
     'deepspeed.checkpointing.configure'),
    ('deepspeed_loop', '`elasticity`', {'elasticity': {'enabled': True}}, 'does not have it any more'),
    ('deepspeed_loop', '`tensor_parallel`', {'tensor_parallel': {'autotp_size': 2}}, 'data-parallel'),
    ('composer_0_27', '`amp`', {'amp': {'enabled': True}}, 'does not have it any more'),
    ('composer_0_27', 'must agree', {'train_batch_size': 12}, 'train_batch_size=12'),
    ('hugging_face', 'without one it is an error', {'scheduler': {'params': {'warmup_num_steps': 'auto'}}},
     'ds_config.scheduler'),
    ('hugging_face', 'round_robin_gradients', {_ZERO: {'round_robin_gradients': True}}, 'wrong weights'),
    ('hugging_face', 'use_node_local_storage', {'checkpoint': {'use_node_local_storage': True}}, 'save_folder'),
    ('lightning', '`aio`', {'aio': {'block_size': 1048576}}, 'NVMe offload'),
    ('lightning', '`nvme_path`', {_ZERO: {'offload_optimizer': {'device': 'cpu', 'nvme_path': '/local_nvme'}}},
     'NVMe offload'),
    ('mmengine', 'cpu_offload=True', {_ZERO: {'cpu_offload': True}}, 'offload_optimizer'),
    ('mmengine', '`False` is an error', {_ZERO: {'allgather_partitions': False}}, 'reads it nowhere'),
    ('mmengine', 'fp16_master_weights_and_grads=True',
     {'fp16': {'enabled': False, 'fp16_master_weights_and_grads': True}}, 'master weights are fp32'),
]  # fmt: skip


@pytest.mark.parametrize(('page', 'said', 'given', 'error'), REFUSED)
def test_errors(page, said, given, error):
    assert said in page_text(page)
    settings = Settings(None, None, None, {_ZERO: {'stage': 2}, **given})
    found = problems_of(settings, FACTS)
    assert len(found) == 1 and error in found[0], found


ACCEPTED: list[dict[str, Any]] = [
    # DeepSpeed's defaults and what does nothing, as files and strategies bring them
    {_ZERO: {'stage': 2, 'allgather_partitions': True, 'cpu_offload': False}},
    {_ZERO: {'stage': 3, 'overlap_comm': True, 'sub_group_size': 1e9, 'offload_optimizer': {'device': 'none'}}},
    {'activation_checkpointing': {'partition_activations': False, 'cpu_checkpointing': False}},
    {'train_batch_size': 16, 'train_micro_batch_size_per_gpu': 4, 'gradient_accumulation_steps': 2},
    {'train_batch_size': 'auto', 'gradient_clipping': 'auto', 'bf16': {'enabled': 'auto'}, 'fp16': {'enabled': 'auto'}},
    {'optimizer': {'type': 'AdamW', 'params': {'lr': 'auto', 'betas': 'auto', 'eps': 'auto', 'weight_decay': 'auto'}}},
    {'fp16': {'enabled': False, 'fp16_master_weights_and_grads': False, 'loss_scale': 0, 'hysteresis': 2}},
    {'steps_per_print': 10**13, 'wall_clock_breakdown': False, 'zero_allow_untested_optimizer': True},
]


@pytest.mark.parametrize('given', ACCEPTED)
def test_what_may_stay(given):
    assert problems_of(Settings(None, None, None, given), FACTS) == []


@pytest.fixture
def processes_of_their_own() -> Iterator[RankPool]:
    # Accelerate sets variables and keeps a state in its classes.
    with RankPool(2, timeout_sec=100) as pool:
        yield pool


@pytest.mark.slow
def test_hugging_face(processes_of_their_own, two_ranks, tmp_path):
    check(Saved('hugging_face', processes_of_their_own, tmp_path), two_ranks)
