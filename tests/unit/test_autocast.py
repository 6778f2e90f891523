"""Autocast inside the engine; torch tells the dtype of what comes out."""

from __future__ import annotations

import pytest
import torch

from composer_ds.autocast import autocast_inside


class Doubles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, inputs, fail=False):
        if fail:
            raise ValueError('on purpose')
        return self.layer(inputs)


def test_forward_runs_under_autocast_and_leaves_it():
    model = Doubles()
    handles = autocast_inside(model, 'cpu', torch.bfloat16)
    assert model(torch.ones(1, 3)).dtype == torch.bfloat16
    with torch.autocast('cpu', enabled=False):  # as DeepSpeed does around the module
        assert model(torch.ones(1, 3)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled('cpu')
    with pytest.raises(ValueError, match='on purpose'):
        model(torch.ones(1, 3), fail=True)
    assert not torch.is_autocast_enabled('cpu')
    for handle in handles:
        handle.remove()
    assert model(torch.ones(1, 3)).dtype == torch.float32
