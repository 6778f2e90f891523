"""Several batches in one optimizer step equal one batch as large; checkpoints wait for the update."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import several_batches_cases as cases
from tests.distributed.parity_cases import STAGES_AND_OFFLOAD

TOLERANCE = 1e-6


@pytest.mark.parametrize('batches', [2, 4])
@pytest.mark.parametrize('world_size', [1, 2])
def test_several_batches_in_one_optimizer_step(ranks, world_size: int, batches: int):
    # Without clipping, which would hide the weight of a batch.
    _compare(ranks(world_size), STAGES_AND_OFFLOAD, batches)


def test_clipping_sees_the_whole_optimizer_step(two_ranks):
    # The norm is clipped in some optimizer steps and not in others.
    norms = [one['norm'] for one in _compare(two_ranks, ['zero1', 'zero2-cpu', 'zero3-cut'], 4, clipping=4.5)]
    assert min(norms) < 4.5 < max(norms), norms


def _compare(pool, strategies: list[str], batches: int, **arguments) -> list[dict]:
    (expected, *_) = pool.run(cases.windows, None, batches, **arguments)
    updates, failures, seen = -(-10 // batches), [], []
    for strategy in strategies:
        for found in pool.run(cases.windows, strategy, batches, **arguments):
            difference = max(
                float((value - expected['weights'][name]).abs().max()) for name, value in found['weights'].items()
            )
            if difference > TOLERANCE:
                failures.append(f'{strategy}: {difference}')
            # 10 batches of 2 in two epochs; the last window is short where 4 do not divide 10.
            assert [one['applied'] for one in found['updates']] == list(range(1, updates + 1))
            assert found['batches'] == 10, "Composer's own clock counts batches"
            assert found['order'] == ['algorithm', 'callback'] * updates
            seen = found['updates']
    assert not failures, '\n'.join(failures)
    moved = {name: float((expected['weights'][name] - value).abs().max()) for name, value in expected['before'].items()}
    assert min(moved.values()) > 1e-4
    return seen


@pytest.mark.parametrize('strategy', ['zero2-cpu', 'zero3-cut'])
def test_checkpoints_wait_for_the_end_of_a_window(two_ranks, tmp_path, strategy: str):
    whole, _ = two_ranks.run(cases.saved_windows, f'{tmp_path}/whole', strategy)
    assert whole['saved'] == [4, 8, 10] and whole['applied'] == 3
    path = f'{tmp_path}/whole/ep0-ba4-rank0.pt'
    for found in two_ranks.run(cases.saved_windows, f'{tmp_path}/rest', 'zero1', load=path):
        torch.testing.assert_close(found['weights'], whole['weights'], rtol=0, atol=TOLERANCE)
        assert found['applied'] == 3 and found['saved'] == [8, 10]


def test_training_that_is_stopped_in_a_window_steps_it(two_ranks, tmp_path):
    stopped, _ = two_ranks.run(cases.saved_windows, f'{tmp_path}/stopped', 'zero2', stop=6)
    assert stopped['applied'] == 2 and stopped['saved'] == [4, 6]
    saved = torch.load(f'{tmp_path}/stopped/ep0-ba6-rank0.pt', weights_only=False)['state']['model']
    torch.testing.assert_close(dict(saved), stopped['weights'], rtol=0, atol=0)


def test_a_checkpoint_in_the_middle_of_a_window_says_so(one_rank, tmp_path):
    by_hand = f'{tmp_path}/by-hand.pt'
    (saving,) = one_rank.run(cases.saved_windows, f'{tmp_path}/first', 'zero2', by_hand=by_hand)
    assert '2 of 4 batches' in saving['told']
    (loading,) = one_rank.run(cases.saved_windows, f'{tmp_path}/second', 'zero2', load=by_hand)
    assert 'gradients of 2 batches are not in it' in loading['told']
    assert loading['applied'] == 2 and loading['saved'] == [10], 'batches 7 to 10 make one optimizer step'


@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
def test_several_batches_in_16_bits(two_ranks, dtype: str):
    for strategy in ('zero1', 'zero1-cpu', 'zero2', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params'):
        for found in two_ranks.run(cases.windows_in_16_bits, dtype, strategy):
            assert found['difference'] < 1e-6 and found['least_move'] > 1e-3, (strategy, found)
