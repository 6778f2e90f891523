"""Which callbacks' saves wait for the end of an optimizer step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from composer_ds.clock import Clock
from composer_ds.counts import OptimizerSteps


def test_only_functions_that_say_when_to_save_are_wrapped():
    function, text = SimpleNamespace(save_interval=lambda state, event: True), SimpleNamespace(save_interval='1ba')
    clock: Any = object.__new__(Clock)
    clock.steps, clock.window = OptimizerSteps(), SimpleNamespace(size=1, batches=1)
    time = SimpleNamespace(batch=SimpleNamespace(value=3))
    clock.state = SimpleNamespace(callbacks=[function, text, SimpleNamespace()], schedulers=[], timestamp=time)
    clock.fit_start(2)
    assert text.save_interval == '1ba'
    assert not function.save_interval(None, None)  # in the middle of an optimizer step
    clock.window.batches = 0
    assert function.save_interval(None, None)
