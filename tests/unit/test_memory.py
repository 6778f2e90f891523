"""Predictions of memory, worked out by hand; tests/distributed/test_memory.py measures engines."""

from __future__ import annotations

import pytest
import torch
from composer.optim import DecoupledSGDW

from composer_ds.memory import rank_memory
from composer_ds.memory_plan import MemoryPlan
from composer_ds.model_sizes import GroupSizes, ModelSizes, sizes_of, state_bytes_per_element


def test_zero_2_with_two_small_parameters():
    # 3 + 4 elements are padded to 8, of which each rank updates 4. Of rank 0's four, one is the second parameter's.
    model = ModelSizes((GroupSizes((3, 4), 0),), buffer_bytes=10)
    memory = rank_memory(model, MemoryPlan(2, 2, reduce_bucket_size=7))
    assert memory.reduction.device == {
        'weights': 8 * 4 + 10,
        'gradients': 7 * 4,  # of the microbatches before: whole parameters
        'optimizer': 4 * 4,  # master weights
        'buffers': 7 * 4 + 7 * 4,  # the bucket, and its copy
    }
    assert memory.optimizer_step.device == {
        'weights': 8 * 4 + 10,
        'gradients': 7 * 4 + 4 * 4,
        'optimizer': 4 * 4,
        'buffers': 0,
    }
    assert memory.host_bytes == 0
    assert memory.device_bytes == 42 + 28 + 16 + 56 == memory.total_bytes


def test_zero_1_with_offload_of_adam():
    model = ModelSizes((GroupSizes((3, 4), 8),))
    memory = rank_memory(model, MemoryPlan(1, 2, offload_optimizer=True, reduce_bucket_size=7))
    assert memory.reduction.device == {
        'weights': 8 * 4,
        'gradients': 7 * 4,  # param.grad, whole
        'optimizer': 0,
        'buffers': 7 * 4 + 4 * 4,  # the bucket; a buffer for the largest parameter's gradient
    }
    assert memory.host == {
        'weights': 0,
        'gradients': 4 * 4,
        'optimizer': 4 * (4 + 8),
        'buffers': 4 * 4 + 4 * 4,
    }


def test_zero_3_cuts_each_parameter_and_keeps_small_ones_whole():
    # 3 -> 2 elements for each rank, 4 -> 2, frozen 5 -> 3.
    model = ModelSizes((GroupSizes((3, 4), 0),), frozen_numels=(5,))
    plan = MemoryPlan(3, 2, weights='bf16', communication='bf16', reduce_bucket_size=7, persistence_threshold=3)
    memory = rank_memory(model, plan)
    assert memory.reduction.device == {
        'weights': (2 + 2 + 3) * 2 + 3 * 2 + 5 * 2,  # parts; the small one whole; the largest one whole, in use
        'gradients': 4 * 4,
        'optimizer': 4 * 4,
        'buffers': 7 * 2 + 7 * 2,
    }
    assert memory.optimizer_step.device['gradients'] == 4 * 4 + 4 * 4
    assert memory.gathered_bytes == (4 + 5) * 2
    both = rank_memory(model, MemoryPlan(3, 2, 'bf16', True, True, 'fp32', 'bf16', 7, persistence_threshold=3))
    assert both.host == {'weights': 14, 'gradients': 4 * 4 + 4 * 4, 'optimizer': 16, 'buffers': 0}
    assert both.reduction.device == {'weights': 16, 'gradients': 0, 'optimizer': 0, 'buffers': 28}


def test_bf16_with_zero_1_keeps_whole_fp32_gradients():
    model = ModelSizes((GroupSizes((400,), 8), GroupSizes((40,), 8)))
    memory = rank_memory(model, MemoryPlan(1, 4, weights='bf16', accumulation='fp32'))
    assert memory.reduction.device == {
        'weights': 440 * 2,
        'gradients': 440 * 4 + 440 * 2,
        'optimizer': 110 * 12,
        'buffers': 440 * 4,  # both groups are flattened together to be reduced; one alone would not be copied
    }


@pytest.mark.parametrize(('stage', 'bytes_per_parameter'), [(1, 2 + 12 / 64), (2, 2 + 12 / 64), (3, (2 + 12) / 64)])
def test_the_formulas_of_the_zero_paper(stage: int, bytes_per_parameter: float):
    """Weights and optimizer of 7.5 billion parameters on 64 ranks, arXiv:1910.02054, figure 1 (gradients differ)."""
    model = ModelSizes((GroupSizes((7_500_000,) * 1000, 8),))
    memory = rank_memory(model, MemoryPlan(stage, 64, weights='bf16', accumulation='fp32'))
    device = memory.optimizer_step.device
    assert device['weights'] + device['optimizer'] == pytest.approx(7.5e9 * bytes_per_parameter, rel=1e-3)


@pytest.mark.parametrize(
    ('optimizer', 'arguments', 'expected'),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {'momentum': 0.9}, 4),
        (torch.optim.AdamW, {}, 8),
        (torch.optim.Adam, {'amsgrad': True}, 12),
        (torch.optim.RMSprop, {'momentum': 0.9, 'centered': True}, 12),
        (DecoupledSGDW, {'momentum': 0.9}, 4),
    ],
)
def test_the_state_of_optimizers(optimizer, arguments, expected):
    parameter = torch.nn.Parameter(torch.ones(3))
    client = optimizer([parameter], lr=0.1, **arguments)
    assert state_bytes_per_element(client, client.param_groups[0]) == expected
    assert not client.state and torch.equal(parameter, torch.ones(3))


def test_sizes_are_read_from_a_model_on_the_meta_device():
    with torch.device('meta'):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
    model[0].bias.requires_grad_(False)
    groups = [
        {'params': [model[0].weight, model[0].bias]},
        {'params': [model[1].weight, model[1].bias, model[2].weight]},
    ]
    sizes = sizes_of(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    assert sizes.groups == (GroupSizes((12,), 4), GroupSizes((4, 4, 8), 4))
    assert sizes.frozen_numels == (4,)
    assert sizes.buffer_bytes == 4 * 4 + 4 * 4 + 8  # running mean and variance, number of batches (int64)


def test_settings_are_read_from_a_ds_config():
    ds_config = {
        'zero_optimization': {
            'stage': 3,
            'offload_param': {'device': 'cpu'},
            'reduce_bucket_size': 5e8,
            'stage3_param_persistence_threshold': 10,
            'overlap_comm': True,
        },
        'data_types': {'grad_accum_dtype': 'fp32'},
    }
    plan = MemoryPlan.of_ds_config(ds_config, world_size=4, weights='bf16')
    assert plan == MemoryPlan(
        3, 4, 'bf16', False, True, 'fp32', 'bf16', 500_000_000, overlap_comm=True, persistence_threshold=10
    )
