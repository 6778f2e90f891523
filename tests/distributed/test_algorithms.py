"""Composer's algorithms and callbacks that are said to work do what they do in plain Composer, which is the oracle."""

from __future__ import annotations

import pytest
import torch

from composer_ds.composer_parts import ALGORITHMS
from tests.distributed import algorithm_cases, callback_cases
from tests.distributed.algorithm_cases import CASES, ONE_RANK, STRATEGIES_OF

ZERO_2_AND_3 = ['zero2', 'zero3-cut']
# Two ranks add up gradients in another order; standardised weights divide by a small standard deviation, which
# magnifies the last digit.
TOLERANCE = {'WeightStandardization': 1e-5}


@pytest.mark.slow
@pytest.mark.parametrize('world_size', [1, 2])
def test_weights_equal_plain_composer(ranks, world_size: int):
    names = sorted(ONE_RANK) if world_size == 1 else [name for name in CASES if name not in ONE_RANK]
    for rank, results in enumerate(ranks(world_size).run(algorithm_cases.compare, names)):
        assert list(results) == names
        for name, result in results.items():
            assert result['moved'] > 1e-3, f'{name} trains nothing'
            assert result['effect'] is None or result['effect'] > 1e-3, f'{name} has no effect'
            for strategy in STRATEGIES_OF.get(name, ZERO_2_AND_3):
                assert result[strategy] < TOLERANCE.get(name, 1e-6), f'rank {rank}, {strategy}, {name}: {result}'


def test_what_works_is_trained_here():
    trained = {name.partition(' ')[0] for name in CASES}
    elsewhere = {
        'Alibi',  # fails in plain Composer with the installed transformers
        'LowPrecisionGroupNorm',  # below: no effect in fp32
        'LowPrecisionLayerNorm',
    }
    assert trained | elsewhere == {name for name, decision in ALGORITHMS.items() if decision.verdict == 'works'}


def test_gyro_dropout_on_two_ranks(two_ranks):
    found = [two_ranks.run(algorithm_cases.gyro_dropout, strategy)[0] for strategy in ZERO_2_AND_3]
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_low_precision_norms(two_ranks):
    for strategy in ZERO_2_AND_3:
        found = two_ranks.run(algorithm_cases.low_precision_norms, strategy, True)[0]
        # On a CPU they compute what the layers that they replace do.
        torch.testing.assert_close(found, two_ranks.run(algorithm_cases.low_precision_norms, strategy, False)[0])


def test_layer_freezing_and_checkpoints(two_ranks, tmp_path):
    for strategy in ZERO_2_AND_3:
        two_ranks.run(algorithm_cases.freeze_and_save, strategy, str(tmp_path / strategy))


def test_monitors_log_what_they_log_in_plain_composer(two_ranks, tmp_path):
    (expected, _) = two_ranks.run(callback_cases.monitors, None, str(tmp_path / 'plain'))
    assert any(key.startswith('activations/') for key in expected['logged'])
    measured = ('cpu_', 'disk_', 'network_', 'throughput/', 'time/train', 'time/val', 'time/total', 'time/remaining')
    (found, _) = two_ranks.run(callback_cases.monitors, 'zero3-cut', str(tmp_path / 'zero3'))
    torch.testing.assert_close(found['weights'], expected['weights'], rtol=0, atol=1e-6)
    assert found['norms'] == pytest.approx(expected['norms'], rel=1e-5)
    assert found['traced'] == expected['traced'] and 'event/batch' in found['traced']
    # The root module has another name in DistributedDataParallel, which passes its inputs on.
    logged, plain = (
        {key: values for key, values in one['logged'].items() if '/_' not in key} for one in (found, expected)
    )
    assert logged.keys() == plain.keys()
    for key, values in plain.items():
        assert len(logged[key]) == len(values), key
        if not key.startswith(measured):
            assert logged[key] == pytest.approx(values, rel=1e-4, abs=1e-6, nan_ok=True), key


def test_callbacks_that_stop(two_ranks):
    expected = two_ranks.run(callback_cases.stoppers, None)
    assert expected[0]['early'] == 4 and expected[0]['threshold'] == 2 and 'NaN' in expected[0]['nan raises']
    assert two_ranks.run(callback_cases.stoppers, 'zero3-cut') == expected


def test_load_checkpoint(two_ranks, tmp_path):
    expected = two_ranks.run(callback_cases.load_checkpoint, None, str(tmp_path))[0]
    assert (expected['INIT']['net.0.weight'] - expected['AFTER_LOAD']['net.0.weight']).abs().max() > 1e-3
    found = two_ranks.run(callback_cases.load_checkpoint, 'zero3-cut', str(tmp_path))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_layers_that_are_replaced_while_loading(two_ranks, tmp_path):
    for message in two_ranks.run(algorithm_cases.surgery_while_loading, 'zero2', str(tmp_path)):
        assert 'net.0.conv.weight' in message and 'give that algorithm to the Trainer' in message


def test_generate(two_ranks):
    expected = two_ranks.run(callback_cases.generate, None)
    assert any(text for table in expected[0]['tables'] for _, text in table), 'nothing was generated'
    for found, plain in zip(two_ranks.run(callback_cases.generate, 'zero3-cut'), expected, strict=True):
        assert found['tables'] == plain['tables']
        torch.testing.assert_close(found['weights'], plain['weights'], rtol=0, atol=1e-6)


def test_compiled_parts(two_ranks):
    """What the docs name instead of ``compile_config``."""
    expected = two_ranks.run(algorithm_cases.compiled_parts, None)[0]
    found = two_ranks.run(algorithm_cases.compiled_parts, 'zero3-cut')[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_trainer_refuses_what_is_refused(two_ranks):
    messages, others = two_ranks.run(algorithm_cases.refused)
    assert messages == others
    for name in (
        'ChannelsLast', 'ExportForInferenceCallback', 'LowPrecisionLayerNorm', 'OptimizerMonitor', 'SAM', 'SWA',
        'StochasticDepth',
    ):  # fmt: skip
        assert f'{name} does not work with DeepSpeed' in messages[name]
