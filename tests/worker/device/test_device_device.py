"""Which device a worker has, and values on it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import closing
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeworker.errors import UsageError
from pipeworker.worker.device.device import (
    EventStopwatch,
    MemoryGauge,
    Stopwatch,
    accelerator_type,
    device_for,
    peak_memory,
    peak_resident,
    stopwatch_for,
    to_device,
    unit_of,
    used_memory,
    write_allocator_snapshot,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
Sees = Callable[..., list[int]]
"""Makes torch see accelerators; returns the list of those that become the current one."""


@pytest.fixture
def sees(monkeypatch: pytest.MonkeyPatch) -> Sees:
    def see(kind: str = "", count: int = 0, uuid: str = "") -> list[int]:
        current: list[int] = []
        seen = torch.device(kind) if kind else None
        module = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(uuid=uuid))
        for name, function in {
            "current_accelerator": lambda *, check_available: seen,
            "device_count": lambda: count,
            "set_device_index": current.append,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, function)
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        return current

    return see


def chosen(requested: str, local_rank: int) -> str:
    return str(device_for(requested, local_rank))


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_each_worker_of_a_host_is_pinned_to_its_own_accelerator(kind: str, sees: Sees) -> None:
    current = sees(kind, 3)
    assert [chosen("auto", rank) for rank in range(3)] == [f"{kind}:{n}" for n in range(3)]
    assert [chosen(kind, rank) for rank in (1, 2)] == [f"{kind}:1", f"{kind}:2"]
    assert current == [0, 1, 2, 1, 2]


def test_more_workers_than_accelerators_share_them_in_turn(sees: Sees) -> None:
    sees("cuda", 2)
    assert [chosen("cuda", rank)[-1] for rank in range(5)] == ["0", "1", "0", "1", "0"]


def test_a_task_that_is_shown_one_accelerator_has_that_one(sees: Sees) -> None:
    """A scheduler does so by CUDA_VISIBLE_DEVICES; equal identities are one device."""
    for rank, unit in enumerate(("GPU-a", "GPU-b")):
        sees("cuda", 1, unit)
        device = device_for("auto", rank)
        assert device == torch.device("cuda", 0)
        assert unit_of(device) == unit


def test_the_cpu_is_used_if_requested_or_nothing_else_is_there(sees: Sees) -> None:
    current = sees("cuda", 2)
    assert chosen("cpu", 1) == "cpu"
    assert not current
    assert unit_of(torch.device("cpu")) == ""
    sees()
    assert chosen("auto", 1) == "cpu"


def test_a_device_that_is_not_there_is_reported_with_those_that_are(sees: Sees) -> None:
    sees()
    with pytest.raises(UsageError) as error:
        device_for("cuda", 0)
    assert str(error.value) == (
        "--device cuda: torch sees no CUDA device on this host; see pipeworker env"
    )
    sees("xpu", 1)
    with pytest.raises(UsageError, match="no MPS device on this host; it sees xpu, which --device"):
        device_for("mps", 0)


def test_the_devices_of_this_host() -> None:
    kind = accelerator_type()
    assert bool(kind) == bool(torch.accelerator.device_count())
    device = device_for("auto", 0)
    assert device.type == (kind or "cpu")
    assert bool(unit_of(device)) == bool(kind)
    assert peak_memory(torch.device("cpu")) > 1 << 20


def test_a_value_is_moved_with_all_its_tensors() -> None:
    value = {"x": torch.ones(2)}
    assert to_device(value, torch.device("cpu")) is value
    moved = to_device(value, torch.device("meta"))
    assert moved["x"].is_meta


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
    assert Stopwatch().seconds([]) == 0.0


def test_a_start_without_a_stop_is_a_defect() -> None:
    watch = EventStopwatch(Device().event)
    with pytest.raises(ValueError, match="shorter"):
        watch.seconds([watch.mark()])


def test_on_the_host() -> None:
    watch = Stopwatch()
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
    assert type(stopwatch_for(torch.device("cpu"))) is Stopwatch


def test_a_snapshot_is_what_the_devices_allocator_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory.pickle"
    assert not write_allocator_snapshot(CPU, path)
    assert not path.exists()
    held = {"segments": [{"total_size": 1 << 20}]}
    module = SimpleNamespace(memory=SimpleNamespace(_snapshot=lambda: held))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert write_allocator_snapshot(torch.device("cuda"), path)
    assert pickle.loads(path.read_bytes()) == held
    with pytest.raises(OSError, match="No such file"):
        write_allocator_snapshot(torch.device("cuda"), tmp_path / "nowhere" / "memory.pickle")


def test_the_memory_of_a_process_grows_with_what_it_allocates() -> None:
    size = 64 << 20
    with closing(MemoryGauge(CPU)) as gauge, mmap(-1, size) as held:  # malloc may have kept as much
        before = gauge()
        held.write(bytes(size))
        assert size * 0.9 < gauge() - before < size * 1.5
        held.close()
        assert gauge() - before < size * 0.5
    assert abs(used_memory(CPU) - peak_resident()) < 1 << 30


def test_without_the_systems_file_the_memory_is_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeworker.worker.device.device.STATM", "/proc/self/nothing")
    with closing(MemoryGauge(CPU)) as gauge:
        assert gauge() == pytest.approx(peak_resident(), rel=0.01)


def test_the_memory_of_an_accelerator_is_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(memory_allocated=lambda _: 3, max_memory_allocated=lambda _: 5)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert (used_memory(CUDA), peak_memory(CUDA)) == (3, 5)


def test_a_device_without_an_identifier_is_known_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (
        SimpleNamespace(),
        SimpleNamespace(get_device_properties=lambda _: SimpleNamespace()),
    ):
        monkeypatch.setattr(torch, "get_device_module", lambda _, module=module: module)
        assert unit_of(torch.device("cuda", 1)) == "cuda:1"
