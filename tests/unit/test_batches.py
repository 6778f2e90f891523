"""The batch arithmetic; numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from composer_ds.batches import accumulation_of, batches_per_optimizer_step, global_batch_of, problems_of_batches
from tests.unit.test_ownership import FACTS  # two ranks, batches of 8, microbatches of 4


def problems(ds_config: dict, **facts) -> list[str]:
    return list(problems_of_batches(ds_config, dataclasses.replace(FACTS, **facts)))


def test_sizes():
    assert (accumulation_of(FACTS), global_batch_of(FACTS)) == (2, 16)
    uneven = dataclasses.replace(FACTS, batch_sizes=(5, 9), device_train_microbatch_size=4)
    assert (accumulation_of(uneven), global_batch_of(uneven)) == (3, 14)
    silent = dataclasses.replace(FACTS, batch_sizes=(8, None))
    assert (accumulation_of(silent), global_batch_of(silent)) == (2, None)
    before_fit = dataclasses.replace(FACTS, batch_sizes=None, device_train_microbatch_size=None)
    assert (accumulation_of(before_fit), global_batch_of(before_fit)) == (None, None)


@pytest.mark.parametrize(
    'ds_config',
    [
        {},
        {'train_batch_size': 16},
        {'train_batch_size': 16, 'train_micro_batch_size_per_gpu': 4, 'gradient_accumulation_steps': 2},
        {'train_batch_size': 'auto', 'train_micro_batch_size_per_gpu': 'auto', 'gradient_accumulation_steps': 'auto'},
    ],
)
def test_sizes_that_agree(ds_config: dict):
    assert problems(ds_config) == []


@pytest.mark.parametrize(
    ('ds_config', 'facts', 'words'),
    [
        ({'train_batch_size': 60}, {}, ['=60', 'batch 8 of the dataloader x world size 2 = 16', 'Write 16']),
        ({'train_batch_size': 24}, {}, ['=24', 'Write 16']),
        ({'train_batch_size': 24}, {'batch_sizes': (5, 6)}, ['=24', '5 + 6 = 11', 'Write 11']),
        ({'gradient_accumulation_steps': 7}, {}, ['=7', '8 samples in microbatches of 4 makes 2', 'Write 2']),
        (
            {'gradient_accumulation_steps': 4, 'train_batch_size': 64},
            {},
            ['gradient_accumulation_steps=4 makes 2', 'train_batch_size=64 makes 4'],
        ),
        ({'gradient_accumulation_steps': 3}, {}, ['=3', 'makes 2', 'Write 2']),
        ({'gradient_accumulation_steps': 1}, {}, ['=1', 'makes 2', 'Write 2']),
        ({'train_micro_batch_size_per_gpu': 2}, {}, ['microbatch_size=4', '=2', 'device_train_microbatch_size=2']),
        ({'train_batch_size': 16}, {'batch_sizes': (8, None)}, ['=16', 'does not say']),
        ({'gradient_accumulation_steps': 2}, {'batch_sizes': (None, None)}, ['=2', 'does not say']),
        ({'train_batch_size': 0}, {}, ['=0', 'whole number']),
        ({'train_batch_size': True}, {}, ['=True', 'whole number']),
        ({'gradient_accumulation_steps': 2.0}, {}, ['=2.0', 'whole number']),
    ],
)
def test_sizes_that_disagree(ds_config: dict, facts: dict, words: list[str]):
    (problem,) = problems(ds_config, **facts)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ('ds_config', 'facts', 'batches'),
    [
        ({}, {}, 1),
        ({'train_batch_size': 16}, {}, 1),
        ({'train_batch_size': 64}, {}, 4),
        ({'gradient_accumulation_steps': 8}, {}, 4),
        ({'gradient_accumulation_steps': 8, 'train_batch_size': 64, 'train_micro_batch_size_per_gpu': 4}, {}, 4),
        # 9 samples in microbatches of 4 are 4 + 4 + 1.
        ({'gradient_accumulation_steps': 6}, {'batch_sizes': (9, 9)}, 2),
        ({'gradient_accumulation_steps': 64}, {'batch_sizes': (1, 1), 'device_train_microbatch_size': 1}, 64),
    ],
)
def test_batches_in_one_optimizer_step(ds_config: dict, facts: dict, batches: int):
    assert problems(ds_config, **facts) == []
    assert batches_per_optimizer_step(ds_config, dataclasses.replace(FACTS, **facts)) == batches


def test_a_job_that_was_started_with_too_few_ranks():
    sizes = {'train_batch_size': 64, 'train_micro_batch_size_per_gpu': 4, 'gradient_accumulation_steps': 2}
    (problem,) = problems(sizes)
    assert 'composer -n 8' in problem


def test_without_a_dataloader_nothing_can_be_compared_yet():
    later = {'batch_sizes': None, 'device_train_microbatch_size': None}
    assert problems({'train_batch_size': 64, 'train_micro_batch_size_per_gpu': 4}, **later) == []
    assert len(problems({'train_batch_size': -1}, **later)) == 1
