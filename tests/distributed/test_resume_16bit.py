"""Checkpoints of runs in bf16 and fp16 hold fp32 masters and moments: a run that resumes is exact to the last bit.

So is one in fp32 that resumes in the same place.

``make matrix`` runs more of the strategies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import resume_16bit_cases
from tests.distributed.matrix_cases import LAST, SAVED_AFTER, checkpoint_in, sharded_checkpoint_in
from tests.distributed.parity_cases import STAGES_AND_OFFLOAD
from tests.distributed.test_matrix import HOW_MUCH

# By world size.
STRATEGIES = {1: ['zero2-cpu', 'zero3-cut'], 2: ['zero1', 'zero1-cpu', 'zero2', 'zero3-cut', 'zero3-cut-cpu-params']}
if HOW_MUCH != 'some':
    STRATEGIES = {1: STAGES_AND_OFFLOAD, 2: STAGES_AND_OFFLOAD}
FP16_STRATEGIES = ['zero1', 'zero2-cpu', 'zero3-cut-cpu-params'] if HOW_MUCH == 'some' else STAGES_AND_OFFLOAD
BF16 = {'bf16': {'enabled': True}}


def _fp16(**settings: int) -> dict[str, Any]:
    return {'fp16': {'enabled': True, 'initial_scale_power': 8, 'hysteresis': 1, **settings}}


def _check_exact(whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    for name in ('losses', 'learning_rates', 'samples', 'loss_scales'):
        found, expected = torch.tensor(resumed[name]), torch.tensor(whole[name][SAVED_AFTER:])
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=name)
    for name in ('timestamp', 'counts', 'scaler'):
        assert resumed[name] == whole[name], name
    _check_same(resumed, whole)
    for name, value in whole['weights'].items():
        assert (value - resumed['loaded']['weights'][name]).abs().max() > 1e-3, name


def _check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights and optimizer state are the same to the last bit."""
    torch.testing.assert_close(found['weights'], expected['weights'], rtol=0, atol=0)
    torch.testing.assert_close(found['optimizer']['state'], expected['optimizer']['state'], rtol=0, atol=0)


def _saved(path: str) -> dict[str, Any]:
    """What a checkpoint holds; asserts that it is fp32, with more digits than bf16 or fp16 have."""
    state = torch.load(path, weights_only=False)['state']
    (optimizer,) = state['optimizers'].values()
    moments = {f'{name} {key}': value for name, one in optimizer['state'].items() for key, value in one.items()}
    for name, value in {**state['model'], **moments}.items():
        if not name.endswith('step'):
            assert value.dtype == torch.float32, name
            for dtype in (torch.bfloat16, torch.float16):
                assert (value.to(dtype).float() != value).any(), f'{name} is rounded to {dtype}'
    return {'weights': dict(state['model']), 'optimizer': optimizer, 'scaler': state['scaler']}


@pytest.mark.parametrize(
    ('world_size', 'strategy'), [(size, one) for size, several in STRATEGIES.items() for one in several]
)
@pytest.mark.parametrize('sections', [BF16, pytest.param({}, marks=pytest.mark.slow)], ids=['bf16', 'fp32'])
def test_a_run_resumes_exactly(ranks, tmp_path, world_size: int, strategy: str, sections: dict[str, Any]):
    pool = ranks(world_size)
    whole, *both = pool.run(resume_16bit_cases.cut_in_two, strategy, 'adamw', sections, str(tmp_path))[0]
    saved = _saved(checkpoint_in(tmp_path))
    for resumed in both:
        _check_same(resumed['loaded'], saved)
        _check_exact(whole, resumed)


@pytest.mark.slow
def test_masters_and_moments_pass_unrounded_from_any_strategy_and_precision_to_any_other(ranks, tmp_path):
    places = [(1, 'zero1'), (2, 'zero2-cpu'), (2, 'zero3-cut')]
    folders = [str(tmp_path / str(number)) for number in range(len(places))]
    for (world_size, strategy), folder in zip(places, folders, strict=True):
        ranks(world_size).run(resume_16bit_cases.run, strategy, 'adamw', BF16, folder=folder, ending='stopped')
    checkpoints = [checkpoint_in(folder) for folder in folders]
    saved = [_saved(checkpoint) for checkpoint in checkpoints]
    sharded = [sharded_checkpoint_in(folder) for folder in folders]
    for (world_size, strategy), sections in zip(places, (BF16, {}, _fp16()), strict=True):
        arguments = (strategy, 'adamw', sections, checkpoints + sharded)
        found = ranks(world_size).run(resume_16bit_cases.loaded, *arguments)[0]
        for one, expected in zip(found, saved + saved, strict=True):
            _check_same(one, expected)
    for one, expected in zip(
        ranks(1).run(resume_16bit_cases.loaded, 'plain', 'adamw', {}, checkpoints)[0], saved, strict=True
    ):
        _check_same(one, expected)


# DeepSpeed's scale doubles after `loss_scale_window` + 1 optimizer steps without overflow. So it does right after the
# checkpoint, or one batch later. Batches 2 and 6 overflow where a sample is poisoned: with patience (hysteresis 2) the
# first overflow only uses that up, and the second halves the scale.
@pytest.mark.parametrize('strategy', FP16_STRATEGIES)
@pytest.mark.parametrize(
    ('case', 'settings', 'scales', 'skipped'),
    [
        ('sgd', {'loss_scale_window': 4}, [256] * 5 + [512] * 2, 0),
        ('sgd', {'loss_scale_window': 5}, [256] * 6 + [512], 0),
        ('skipped', {'loss_scale_window': 2}, [256] * 2 + [128] * 3 + [256, 128], 2),
        ('skipped', {'hysteresis': 2}, [256] * 6 + [128], 2),
    ],
    ids=['grows-at-once', 'grows-later', 'skips-and-grows', 'hysteresis'],
)
def test_an_fp16_run_resumes_exactly(two_ranks, tmp_path, strategy, case, settings, scales, skipped):
    arguments = (strategy, case, _fp16(**settings), str(tmp_path))
    whole, *both = two_ranks.run(resume_16bit_cases.cut_in_two, *arguments)[0]
    assert whole['loss_scales'] == scales
    assert whole['counts'] == (LAST, LAST - skipped, skipped, LAST - skipped)
    saved = _saved(checkpoint_in(tmp_path))
    for resumed in both:
        _check_same(resumed['loaded'], saved)
        assert [resumed['loaded']['scaler']] == list(saved['scaler'].values())
        _check_exact(whole, resumed)


def test_the_loss_scale_of_plain_composer_is_taken_over(two_ranks, tmp_path):
    for strategy in ('zero1', 'zero3-cut-cpu'):
        folder = str(tmp_path / strategy)
        section = _fp16(loss_scale_window=3)
        found = two_ranks.run(resume_16bit_cases.written_by_plain_composer, strategy, section, folder)[0]
        assert found['loss_scales'] == [512, 1024, 1024], 'two of three optimizer steps without overflow were made'
        assert found['counts'] == (LAST, LAST, 0, LAST)
