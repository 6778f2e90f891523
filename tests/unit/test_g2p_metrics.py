"""The error rates, against values worked out by hand and an edit distance by plain recursion."""

from __future__ import annotations

import random

import pytest

from recipes.g2p_metrics import PhonemeErrorRate, WordErrorRate, closest_pronunciation
from tests.recipes.g2p_oracle import expected_rates


def rates(predictions: list[str], references: list[list[str]]) -> tuple[float, float]:
    per, wer = PhonemeErrorRate(), WordErrorRate()
    for metric in (per, wer):
        metric.update(predictions, references)
    return float(per.compute()), float(wer.compute())


def random_words(seed: int, count: int) -> tuple[list[str], list[list[str]]]:
    """Predictions (some right, some empty) and one to four references of each word, over three phonemes."""
    draw = random.Random(seed)

    def pronunciation(shortest: int) -> str:
        return ' '.join(draw.choices(['AH', 'K', 'T'], k=draw.randint(shortest, 7)))

    references = [[pronunciation(1) for _ in range(draw.randint(1, 4))] for _ in range(count)]
    predictions = [draw.choice(listed) if draw.random() < 0.3 else pronunciation(0) for listed in references]
    return predictions, references


class TestByHand:
    def test_one_substitution_in_three_phonemes(self):
        assert rates(['K AH T'], [['K AE T']]) == (pytest.approx(1 / 3), 1.0)

    def test_rates_are_summed_over_words_before_the_division(self):
        # distances 1 of 3 and 0 of 1: 1/4, not the mean of 1/3 and 0
        assert rates(['K AH T', 'AH'], [['K AE T'], ['AH']]) == (0.25, 0.5)

    def test_any_listed_pronunciation_is_right(self):
        assert rates(['B'], [['A A A', 'B']]) == (0.0, 0.0)

    def test_the_divisor_is_the_length_of_the_closest_pronunciation(self):
        # distance 1 to 'K AE T S' (4 phonemes), 2 to 'AE T' with one wrong
        assert rates(['K AE T'], [['EH T', 'K AE T S']]) == (0.25, 1.0)

    def test_the_first_of_equally_close_pronunciations_is_the_reference(self):
        # distance 1 to both; the first has 2 phonemes
        assert closest_pronunciation('K AE T', ['K AE', 'K AE T S']) == 'K AE'
        assert rates(['K AE T'], [['K AE', 'K AE T S']]) == (0.5, 1.0)

    def test_insertions_can_exceed_one(self):
        assert rates(['A B C'], [['A']]) == (2.0, 1.0)

    def test_an_empty_prediction_deletes_everything(self):
        assert rates([''], [['K AE T']]) == (1.0, 1.0)

    def test_phonemes_count_as_wholes(self):
        # one phoneme is wrong, although the two differ in two characters of one
        assert rates(['CH AE T'], [['JH AE T']]) == (pytest.approx(1 / 3), 1.0)

    def test_different_numbers_of_predictions_and_words_are_an_error(self):
        for metric in (PhonemeErrorRate(), WordErrorRate()):
            with pytest.raises(ValueError, match='zip'):
                metric.update(['A'], [['A'], ['B']])


@pytest.mark.parametrize('seed', range(5))
def test_random_words_match_the_definition(seed):
    predictions, references = random_words(seed, count=200)
    assert rates(predictions, references) == pytest.approx(expected_rates(predictions, references), rel=1e-6)


def test_batches_of_different_sizes_add_up():
    predictions, references = random_words(seed=7, count=100)
    per, wer = PhonemeErrorRate(), WordErrorRate()
    for start, end in ((0, 3), (3, 90), (90, 100)):
        per.update(predictions[start:end], references[start:end])
        wer.update(predictions[start:end], references[start:end])
    expected = expected_rates(predictions, references)
    assert (float(per.compute()), float(wer.compute())) == pytest.approx(expected, rel=1e-6)


def test_ranks_weigh_by_their_words():
    # What torchmetrics does over ranks: stack the states of all ranks and reduce each as its metric declared.
    predictions, references = random_words(seed=8, count=50)
    expected = expected_rates(predictions, references)
    for metric_class, rate in zip((PhonemeErrorRate, WordErrorRate), expected, strict=True):
        ranks = [metric_class() for _ in range(2)]
        ranks[0].update(predictions[:7], references[:7])
        ranks[1].update(predictions[7:], references[7:])
        ranks[0]._reduce_states({name: getattr(ranks[1], name) for name in ranks[1]._defaults})
        assert float(ranks[0].compute()) == pytest.approx(rate, rel=1e-6)


def test_reset_forgets():
    metric = PhonemeErrorRate()
    metric.update(['A'], [['B']])
    metric.reset()
    metric.update(['A B'], [['A B']])
    assert float(metric.compute()) == 0.0
