"""Whatever is combined: the weights of plain Composer, or one error that names every conflict; no hang, nothing else.

``make soak`` runs many more examples than ``make test``.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.distributed.random_settings import Combination, combinations, run

EXAMPLES = int(os.environ.get('COMPOSER_DS_EXAMPLES', '24'))


@pytest.mark.parametrize('world_size', [1, 2])
def test_right_weights_or_every_conflict(ranks, world_size: int):
    pool = ranks(world_size)
    seen = {'trained': 0, 'refused': 0}

    @settings(
        max_examples=EXAMPLES // world_size, deadline=None, database=None, derandomize=EXAMPLES < 100,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )  # fmt: skip
    @given(combinations(world_size))
    def check(combination: Combination) -> None:
        for result in pool.run(run, combination):
            problems = result['problems']
            assert len(problems) == len(combination.planted), (problems, combination.planted)
            for words in combination.planted:
                assert any(all(word in problem for word in words) for problem in problems), (words, problems)
            if not combination.planted:
                assert result['difference'] < 1e-6 and result['least_move'] > 1e-4, result
        seen['refused' if combination.planted else 'trained'] += 1

    check()
    assert min(seen.values()) > EXAMPLES // world_size // 5, f'both outcomes must be seen: {seen}'
