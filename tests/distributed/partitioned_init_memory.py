"""How much memory a partitioned construction takes. Runs inside rank processes."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

from composer.utils import dist
from torch import nn

from tests.distributed.partitioned_init_cases import built, limited


class Wide(nn.Module):
    """Layers of ``side * side`` weights each, copied from one, and initialised once more by their parent."""

    def __init__(self, layers: int, side: int):
        super().__init__()
        first = nn.Linear(side, side, bias=False)
        self.layers = nn.ModuleList(copy.deepcopy(first) for _ in range(layers))
        layer: Any
        for layer in self.layers:
            nn.init.normal_(layer.weight)


def peak_bytes(layers: int, side: int, partitioned: bool, limit_bytes: int = 0) -> int:
    """By how much the resident memory of this process grows at most while a model is built."""
    limited(limit_bytes)
    # Or else glibc keeps what is freed: M_MMAP_THRESHOLD, in bytes.
    ctypes.CDLL(None).mallopt(-3, 2**20)
    settings = {'zero_stage': 3 if partitioned else 1}
    built(lambda: Wide(2, 8), 1, **settings)  # what is loaded and allocated once
    built(lambda: Wide(2, side), 1, **settings)
    with open('/proc/self/clear_refs', 'w') as file:
        file.write('5')  # the peak starts again from here
    before = _status_bytes('VmRSS')
    model = built(lambda: Wide(layers, side), 1, **settings)
    peak = _status_bytes('VmHWM') - before
    held = sum(getattr(p, 'ds_tensor', p).numel() for p in model.parameters())
    assert held == layers * side * side // (dist.get_world_size() if partitioned else 1)
    return peak


def _status_bytes(key: str) -> int:
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f'{key}:'))
