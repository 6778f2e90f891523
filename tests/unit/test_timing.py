"""Phases of the time, with a clock that is moved by hand."""

from __future__ import annotations

import pytest
from composer.core import Event

from composer_ds import timing
from composer_ds.time_split import TimeSplit


class Now:
    """The host's clock and the device's: the device is ``behind`` the host."""

    def __init__(self):
        self.sec = 100.0
        self.device_sec = 500.0

    def __call__(self) -> float:
        return self.sec


@pytest.fixture
def now(monkeypatch) -> Now:
    clock = Now()
    monkeypatch.setattr(timing.time, 'perf_counter', clock)
    return clock


def _run(split: TimeSplit, now: Now, events: list[tuple[Event | str, float]]) -> None:
    for event, sec in events:
        if isinstance(event, Event):
            split.event(event)
        else:
            split.optimizer_step()
        now.sec += sec


def test_every_moment_belongs_to_one_phase(now: Now):
    split = TimeSplit(on_cuda=False, measures_reduction=False)
    now.sec += 1000
    _run(split, now, [
        (Event.BEFORE_DATALOADER, 1), (Event.AFTER_DATALOADER, 2), (Event.BATCH_START, 3),
        (Event.BEFORE_FORWARD, 10), (Event.AFTER_FORWARD, 20), (Event.BEFORE_LOSS, 30), (Event.AFTER_LOSS, 4),
        (Event.BEFORE_BACKWARD, 100), (Event.AFTER_BACKWARD, 5),
        (Event.BEFORE_FORWARD, 7), (Event.AFTER_LOSS, 0), (Event.BEFORE_BACKWARD, 200), (Event.AFTER_BACKWARD, 6),
        (Event.AFTER_TRAIN_BATCH, 400), ('OPTIMIZER_STEP', 8), (Event.BATCH_END, 9),
        (Event.EVAL_BEFORE_ALL, 5000), (Event.EVAL_BATCH_START, 5000), (Event.EVAL_AFTER_ALL, 11),
        (Event.BATCH_CHECKPOINT, 50), (Event.EPOCH_END, 12), (Event.EPOCH_CHECKPOINT, 60), (Event.EPOCH_START, 13),
    ])  # fmt: skip
    found = split.take()
    assert found == {
        'data_wait': 1, 'forward': 67, 'backward': 300, 'optimizer': 400, 'checkpoint': 110, 'total': 1951,
        'other': 1000 + 2 + 3 + 4 + 5 + 6 + 8 + 9 + 11 + 12 + 13,
    }  # fmt: skip
    assert split.take()['total'] == 0


def test_a_batch_without_an_update_has_no_optimizer_time(now: Now):
    split = TimeSplit(on_cuda=False, measures_reduction=False)
    _run(split, now, [(Event.AFTER_TRAIN_BATCH, 3), (Event.BATCH_END, 1), (Event.BEFORE_DATALOADER, 0)])
    assert split.take() == {
        'forward': 0, 'backward': 0, 'optimizer': 0, 'data_wait': 0, 'checkpoint': 0, 'other': 4, 'total': 4,
    }  # fmt: skip


def test_cuda_times_are_those_of_events(now: Now):
    made = []

    class FakeEvent:
        def __init__(self):
            made.append(self)

        def record(self):
            self.at, self.complete = now.device_sec, False

        def synchronize(self):
            self.complete = True

        def elapsed_time(self, end):
            assert end.complete
            return 1000 * (end.at - self.at)

    clock = timing.PhaseClock(on_cuda=True, make_event=FakeEvent)

    def passes(host_sec: float, device_sec: float) -> None:
        now.sec += host_sec
        now.device_sec += device_sec

    for _ in range(3):
        clock.switch('data_wait')
        passes(1, 0)
        clock.switch('forward')
        passes(0.25, 4)
        clock.switch('other')
        passes(0.5, 8)
        clock.switch('backward')
        passes(0.125, 16)
        clock.switch('optimizer')
        passes(0.125, 32)
        clock.switch('other', instead='other')
        seconds, total = clock.take()
        # The device's times for what computes; the host's for the rest, and for all together.
        assert seconds == {'data_wait': 1, 'other': 0.5, 'forward': 4, 'backward': 16} and total == 2
    assert len(made) < 6, 'events are used again'
