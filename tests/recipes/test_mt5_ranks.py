"""The mT5 recipe on two ranks: the same training and the same figures as on one, under ZeRO, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.recipes.mt5_on_ranks import generate_to_different_lengths, problems_of, train_and_evaluate, weights_at_start


@pytest.fixture(scope='module')
def alone() -> dict[str, Any]:
    """Plain Composer in this process, the oracle."""
    result = train_and_evaluate()
    assert len({len(prediction.split()) for prediction in result['predictions']}) > 5  # there is something to compare
    return result


@pytest.mark.slow
def test_ranks_start_from_the_same_weights(two_ranks):
    first, second = two_ranks.run(weights_at_start)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ('zero_stage', 'microbatch_size'),
    [(None, None), (2, 3), (3, None)],
    ids=['plain Composer', 'ZeRO 2, uneven microbatches', 'ZeRO 3'],
)
def test_two_ranks_train_and_score_as_one(two_ranks, alone, zero_stage, microbatch_size):
    results = two_ranks.run(train_and_evaluate, zero_stage, device_train_microbatch_size=microbatch_size)
    for result in results:
        assert result['is_hugging_face_model']
        assert result['evaluations'] == ['validation', 'test']
        for name, tensor in alone['weights'].items():
            # Ten steps of Adam, which divides by small second moments: sums in another order show up in the 5th digit.
            torch.testing.assert_close(result['weights'][name], tensor, rtol=1e-3, atol=1e-4, msg=name)
        assert result['rates'] == pytest.approx(alone['rates'], rel=1e-6)


@pytest.mark.parametrize('zero_stage', [None, 3], ids=['plain Composer', 'ZeRO 3'])
def test_ranks_may_finish_generating_at_different_times(two_ranks, zero_stage):
    results = two_ranks.run(generate_to_different_lengths, zero_stage)
    lengths = []
    for generations in results:
        for generated, expected in generations:
            assert generated == expected
            lengths.append(max(len(prediction.split()) for prediction in generated))
    assert lengths == [3, 20, 20, 3]


def test_problems_are_the_same_on_every_rank(two_ranks):
    nowhere = 'http://127.0.0.1:9'
    too_few = two_ranks.run(problems_of, {}, {'max_words': 1, 'global_batch_size': 7}, nowhere)
    assert too_few[0] == too_few[1]
    assert len(too_few[0]) == 2 and '6 or 8' in too_few[0][0] and 'train split' in too_few[0][1]
    no_hub = two_ranks.run(problems_of, {'pretrained': 'no-such-owner/no-such-model'}, {}, nowhere)
    assert no_hub[0] == no_hub[1]
    assert 'hf download' in no_hub[0][0]
