"""Models built already partitioned. The oracle is the same code without partitioned_init, and plain Composer."""

from __future__ import annotations

import pytest
import torch

from composer_ds import construction
from tests.distributed import partitioned_init_cases as cases
from tests.distributed import partitioned_init_memory, partitioned_init_refusals
from tests.distributed.parity_cases import STRATEGIES

# Everything is cut at once; a block is whole at a time; nothing is cut before the end.
LIMITS_BYTES = (0, 300, 10**9)


@pytest.mark.parametrize('world_size', [1, 2])
@pytest.mark.parametrize('limit_bytes', LIMITS_BYTES)
def test_weights_and_buffers_are_those_of_the_plain_construction(ranks, world_size: int, limit_bytes: int):
    ranks(world_size).run(cases.equals_plain, limit_bytes)


@pytest.mark.parametrize('world_size', [1, 2])
@pytest.mark.parametrize('strategy', ['zero3', 'zero3-cut-cpu-params'])
def test_it_trains_saves_and_loads_as_plain_composer(ranks, world_size: int, strategy: str):
    ranks(world_size).run(cases.trains_and_resumes, cases.Everything, STRATEGIES[strategy])


@pytest.mark.parametrize('world_size', [1, 2])
def test_master_weights_are_not_rounded(ranks, world_size: int):
    bf16 = {'bf16': {'enabled': True}}
    for settings in ({'zero_stage': 3, 'ds_config': bf16}, {**STRATEGIES['zero3-cut-cpu-params'], 'ds_config': bf16}):
        ranks(world_size).run(cases.masters_of_16_bits, settings)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['mt5', 'mt5-tied', 'gpt2', 'llama'])
def test_hugging_face_models(two_ranks, name: str):
    two_ranks.run(cases.hugging_face, name, limit_bytes=100)


@pytest.mark.parametrize('settings', [{'zero_stage': 3}, {'zero_stage': 3, 'ds_config': {'bf16': {'enabled': True}}}])
def test_what_is_written_and_added_after_the_context(two_ranks, settings: dict):
    two_ranks.run(cases.written_by_deepspeed, settings)


WORDS = {
    'nothing': 'was not told the ZeRO stage',
    'stage': 'zero_stage=4',
    'two stages': 'zero_optimization.stage=2',
    'nvme': "offload_param='nvme'",
    'hpz': 'zero_hpz_partition_size',
    'nested': 'leave the inner one out',
    'trainer inside': 'leave the context before you build the Trainer',
    'transformers': 'HfDeepSpeedConfig',
    'zero.Init': 'deepspeed.zero.Init',
    'zero 2': 'zero_stage=2: the model was built already partitioned',
    'offload': "partitioned_init(offload_param=None), DeepSpeed has offload_param='cpu'",
    'key': 'allgather_sequential: partitioned_init has False, DeepSpeed has True',
    'in place': 'root: written to after',
    'by data': 'root: written to after',
    'plain': 'only DeepSpeed(zero_stage=3) can train them',
    'state_dict': 'make_whole(model)',
    'load_state_dict': 'make_whole(model)',
    'differing': 'The ranks do different things',
}


@pytest.mark.parametrize('world_size', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_errors(ranks, world_size: int):
    for messages in ranks(world_size).run(partitioned_init_refusals.errors):
        assert set(WORDS) - set(messages) == ({'differing'} if world_size == 1 else set())
        for case, message in messages.items():
            assert WORDS[case] in message, (case, message)
            assert 'problems:' not in message, (case, message)


def test_no_rank_holds_the_whole_model(two_ranks):
    layers, side = 16, 1024
    whole_bytes = 4 * layers * side * side
    for peak in two_ranks.run(partitioned_init_memory.peak_bytes, layers, side, partitioned=False):
        assert peak >= 0.95 * whole_bytes  # so it is measured
    for peak in two_ranks.run(partitioned_init_memory.peak_bytes, layers, side, partitioned=True):
        # Its half, and four layers: a new one, and one that is put together and its parts.
        assert peak < (1 / 2 + 4 / layers) * whole_bytes


def test_what_torch_keeps_private_is_as_it_was():
    """Who else holds the values of a parameter: see _is_held."""
    values = torch.zeros(3)
    parameter = torch.nn.Parameter(values)
    assert construction._is_held(parameter)
    del values
    assert not construction._is_held(parameter)
    array = parameter.detach().numpy()
    assert construction._is_held(parameter)
    del array
    assert not construction._is_held(parameter)
