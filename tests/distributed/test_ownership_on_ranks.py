"""One owner for each setting, in a real Trainer on several ranks."""

from __future__ import annotations

import torch

from tests.distributed import ownership_cases


def test_the_optimizer_of_the_ds_config(two_ranks):
    (expected, _) = two_ranks.run(ownership_cases.optimizer_of_section, None)
    for strategy in ('zero1', 'zero2-cpu', 'zero3-cut'):
        for found in two_ranks.run(ownership_cases.optimizer_of_section, strategy):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=strategy)


def test_torchs_fused_kernel_is_the_same_mathematics(one_rank):
    (by_default,) = one_rank.run(ownership_cases.fused_kernel, None)
    (refused,) = one_rank.run(ownership_cases.fused_kernel, False)
    assert by_default['run as'] is True and refused['run as'] is False
    assert by_default['user'] is by_default['checkpoint'] is None, 'the choice must not leak'
    torch.testing.assert_close(by_default['weights'], refused['weights'], rtol=0, atol=1e-6)


def test_a_conflict_that_one_rank_sees_is_told_to_all(two_ranks):
    first, second = two_ranks.run(ownership_cases.conflict_on_one_rank)
    assert first[0] == second[0] and 'train_batch_size=99' in first[0][0]


def test_all_conflicts_come_at_once_within_a_second(two_ranks):
    two_ranks.run(ownership_cases.every_kind_of_conflict)  # imports
    for problems, seconds in two_ranks.run(ownership_cases.every_kind_of_conflict):
        assert len(problems) == 4, problems
        for word, problem in zip(('gradient_cliping', '=77', 'Adagrad', 'WarmupLR'), problems, strict=True):
            assert word in problem
        assert seconds < 1


def test_a_dataloader_that_comes_with_fit(two_ranks):
    for problems in two_ranks.run(ownership_cases.conflict_at_fit):
        assert len(problems) == 1 and 'train_batch_size=9' in problems[0] and 'world size 2 = 8' in problems[0]


def test_buffers_are_not_rounded_in_silence(one_rank):
    (by_default,) = one_rank.run(ownership_cases.buffers_in_16_bits, {})
    assert by_default['same'] and set(by_default['dtypes'].values()) == {'torch.float32'}
    assert 'inv_freq' not in by_default['notes']
    (rounded,) = one_rank.run(ownership_cases.buffers_in_16_bits, {'buffer_dtype': 'bf16'})
    assert not rounded['same'] and 'inv_freq' in rounded['notes']
    kept_names = {'buffer_dtype': 'bf16', 'keep_in_fp32_modules': ['inv_freq']}
    (kept,) = one_rank.run(ownership_cases.buffers_in_16_bits, kept_names)
    assert kept['same'] and kept['dtypes'] == {'inv_freq': 'torch.float32', 'total': 'torch.bfloat16'}
