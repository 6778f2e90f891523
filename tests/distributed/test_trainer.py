"""What a user does with a Trainer: everything besides the parity of one fit. The oracle is plain Composer."""

from __future__ import annotations

import pytest
import torch

from composer_ds.testing import RankPool
from tests.distributed import trainer_cases

SOME = ['zero1', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params']


@pytest.mark.parametrize('strategy', SOME)
def test_faces_are_what_the_user_gave(ranks, strategy: str):
    for world_size in (1, 2):
        ranks(world_size).run(trainer_cases.identity_of_faces, strategy)


@pytest.mark.parametrize('world_size', [1, 2])
def test_evaluation_and_prediction_with_and_without_fit(ranks, world_size: int):
    oracle = ranks(world_size).run(trainer_cases.evaluation_and_prediction, None)
    for strategy in SOME:
        ours = ranks(world_size).run(trainer_cases.evaluation_and_prediction, strategy)
        for expected, found in zip(oracle, ours, strict=True):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=f'{strategy}: {name}')
            assert (found['before outputs'] - found['after outputs']).abs().max() > 1e-2


@pytest.mark.parametrize('world_size', [1, 2])
def test_fit_twice(ranks, world_size: int):
    expected = ranks(world_size).run(trainer_cases.fit_twice, None)[0]
    for strategy in SOME:
        for found in ranks(world_size).run(trainer_cases.fit_twice, strategy):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=strategy)


@pytest.mark.parametrize('world_size', [1, 2])
def test_trainers_one_after_the_other_on_one_model(ranks, world_size: int):
    chain = ['zero1', 'zero2', 'zero3', 'zero3-cut-cpu', 'zero2-cpu', 'zero3-cut', None, 'zero3-cut-params']
    expected = ranks(world_size).run(trainer_cases.trainers_in_a_row, [None] * len(chain))[0]
    for found in ranks(world_size).run(trainer_cases.trainers_in_a_row, chain):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_runs_with_a_process_group_of_their_own():
    with RankPool(world_size=1, timeout_sec=120) as pool:
        for strategy in ('zero2', 'zero3-cut'):
            ((first, second),) = pool.run(trainer_cases.in_a_process_group_after_another, strategy)
            torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_every_mistake_is_a_clear_error(ranks):
    for world_size in (1, 2):
        for messages in ranks(world_size).run(trainer_cases.bad_input):
            assert '2 DeepSpeed instances' in messages['twice']
            assert 'parallelism_config' in messages['parallelism'] and "'fsdp'" in messages['parallelism']
            assert 'Adagrad' in messages['adagrad'] and 'ignores the schedule' in messages['adagrad']
            assert 'scale' in messages['left out'] and 'requires_grad=False' in messages['left out']
            assert 'HidesItsOutput' in messages['opaque'] and '_Opaque' in messages['opaque']
            assert 'compile_config' in messages['compile']
            assert 'make a new one' in messages['shared']
            assert 'scale' in messages['unfrozen'] and 'build a new Trainer' in messages['unfrozen']


def test_an_optimizer_step_that_deepspeed_skips_is_told(two_ranks):
    for strategy in SOME:
        (moved, text), (moved_too, silence) = two_ranks.run(trainer_cases.non_finite_gradient, strategy)
        assert moved == moved_too == 0.0
        assert text.count('Optimizer step 1 skipped') == 1 and 'NaN' in text
        assert 'skipped' not in silence, 'told once, by rank 0'


def test_the_block_at_the_start_of_fit(ranks):
    text = ranks(2).run(trainer_cases.logged_block, 2, 4, 8)
    assert 'microbatch 4 x accumulation 2 x world size 2 = global batch 16' in text[0]
    for piece in ('ZeRO stage  2', 'optimizer to CPU', 'fp32', 'AdamW'):
        assert piece in text[0]
    assert 'global batch' not in text[1], 'one block, on rank 0'
    assert 'zero_stage=0' in ranks(1).run(trainer_cases.logged_block, 0, 3, 8)[0]


@pytest.mark.slow
def test_hugging_face_model(ranks):
    for world_size in (1, 2):
        expected = ranks(world_size).run(trainer_cases.hugging_face, None)[0]
        assert any((expected['weights'][name] - value).abs().max() > 0.01 for name, value in expected['before'].items())
        for strategy in SOME:
            for found in ranks(world_size).run(trainer_cases.hugging_face, strategy):
                torch.testing.assert_close(found['weights'], expected['weights'], rtol=0, atol=1e-6, msg=strategy)
