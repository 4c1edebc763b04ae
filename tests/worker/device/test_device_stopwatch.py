"""Stopwatches: on a host that waits for each call, and on a device that works on by itself."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from pipeworker.worker.device.stopwatch import EventStopwatch, HostStopwatch, stopwatch_for


class Device:
    """Takes a second for each piece of work, and is behind the host until it is waited for."""

    def __init__(self) -> None:
        self.given = 0.0
        self.done = 0.0
        self.events: list[Event] = []

    def work(self, seconds: float) -> None:
        self.given += seconds

    def event(self) -> Event:
        made = Event(self)
        self.events.append(made)
        return made


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._at = device, -1.0

    def record(self) -> None:
        self._at = self._device.given

    def synchronize(self) -> None:
        self._device.done = max(self._device.done, self._at)

    def elapsed_time(self, other: Event) -> float:
        if max(self._at, other._at) > self._device.done:
            raise RuntimeError("the device has not come to the event")
        return 1e3 * (other._at - self._at)


def test_a_device_is_asked_when_it_is_done() -> None:
    device = Device()
    watch = EventStopwatch(device.event)
    for _ in range(3):
        marks: list[Any] = []
        for piece in (1.0, 0.25, 2.0):
            device.work(5.0)  # what does not count
            marks.append(watch.mark())
            device.work(piece)
            marks.append(watch.mark())
        assert device.done < device.given
        assert watch.seconds(marks) == pytest.approx(3.25)
        assert device.done == device.given
    assert len(device.events) == 6  # used again from step to step


def test_no_work_takes_no_time() -> None:
    device = Device()
    assert EventStopwatch(device.event).seconds([]) == 0.0
    assert HostStopwatch().seconds([]) == 0.0


def test_a_start_without_a_stop_is_a_defect() -> None:
    watch = EventStopwatch(Device().event)
    with pytest.raises(ValueError, match="shorter"):
        watch.seconds([watch.mark()])


def test_on_the_host() -> None:
    watch = HostStopwatch()
    before = time.perf_counter()
    marks = [watch.mark(), watch.mark()]
    time.sleep(0.02)
    marks.append(watch.mark())
    time.sleep(0.02)
    marks.append(watch.mark())
    whole = time.perf_counter() - before
    assert 0.02 <= watch.seconds(marks) < whole
    assert watch.seconds([1.0, 3.0, 10.0, 10.5]) == 2.5


def test_the_cpu_is_measured_by_the_host() -> None:
    assert isinstance(stopwatch_for(torch.device("cpu")), HostStopwatch)
