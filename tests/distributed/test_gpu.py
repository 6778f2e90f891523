"""What only a GPU can show: bf16 under autocast with fp32 inputs, and fp32 parity on the device."""

from __future__ import annotations

import pytest
import torch

from composer_ds.testing import run_on_ranks
from tests.distributed.gpu_cases import compare_on_gpu, fp16_on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='there is no GPU')]


@pytest.mark.parametrize('strategy', ['zero1', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params'])
@pytest.mark.parametrize(('precision', 'tolerance'), [('fp32', 1e-5), ('amp_bf16', 0.05)])
def test_weights_equal_plain_composer_on_a_gpu(strategy: str, precision: str, tolerance: float):
    # bf16: plain Composer keeps fp32 weights and rounds them in every matmul; here they are rounded once for each
    # optimizer step. Both round to 2^-9, so after a few optimizer steps of size 0.1 they agree to a few percent of
    # that.
    (result,) = run_on_ranks(
        compare_on_gpu, strategy, precision, world_size=1, timeout_sec=300, env={'DS_ACCELERATOR': 'cuda'}
    )
    assert result['difference'] < tolerance
    assert result['least_move'] > 1e-3


@pytest.mark.parametrize('strategy', ['zero1', 'zero2-cpu', 'zero3-cut', 'zero3-cut-cpu-params'])
def test_fp16_on_a_gpu(strategy: str):
    # Kernels of the GPU add up in another order and round to 2^-11 in other places than those of the CPU.
    (result,) = run_on_ranks(fp16_on_gpu, strategy, world_size=1, timeout_sec=300, env={'DS_ACCELERATOR': 'cuda'})
    assert result['difference'] < 0.02 and result['least_move'] > 1e-2
    assert result['scale'] == 256.0
