"""Which device a worker has, and values on it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from pipeworker.errors import UsageError
from pipeworker.worker.device.device import device_for, peak_memory, to_device, unit_of
from pipeworker.worker.device.visible import Accelerators, TorchAccelerators


@dataclass
class Few:
    """Accelerators as torch would see them."""

    kind: str = ""
    count: int = 0
    units: tuple[str, ...] = ()
    taken: list[int] = field(default_factory=list)

    def take(self, index: int) -> None:
        self.taken.append(index)

    def unit(self, index: int) -> str:
        return self.units[index]


def chosen(asked: str, local_rank: int, seen: Accelerators) -> str:
    return str(device_for(asked, local_rank, seen))


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_each_worker_of_a_host_is_pinned_to_its_own_accelerator(kind: str) -> None:
    seen = Few(kind, 3)
    assert [chosen("auto", rank, seen) for rank in range(3)] == [f"{kind}:{n}" for n in range(3)]
    assert [chosen(kind, rank, seen) for rank in (1, 2)] == [f"{kind}:1", f"{kind}:2"]
    assert seen.taken == [0, 1, 2, 1, 2]


def test_more_workers_than_accelerators_share_them_in_turn() -> None:
    seen = Few("cuda", 2)
    assert [chosen("cuda", rank, seen)[-1] for rank in range(5)] == ["0", "1", "0", "1", "0"]


def test_a_task_that_is_shown_one_accelerator_has_that_one() -> None:
    """As a scheduler does by CUDA_VISIBLE_DEVICES: who else has one is told by what it is."""
    tasks = [Few("cuda", 1, (unit,)) for unit in ("GPU-a", "GPU-b")]
    devices = [device_for("auto", rank, seen) for rank, seen in enumerate(tasks)]
    assert devices == [torch.device("cuda", 0)] * 2
    assert [unit_of(*pair) for pair in zip(devices, tasks, strict=True)] == ["GPU-a", "GPU-b"]


def test_the_cpu_is_taken_where_it_is_asked_for_or_nothing_else_is_there() -> None:
    seen = Few("cuda", 2)
    assert [chosen("cpu", 1, seen), chosen("auto", 1, Few())] == ["cpu", "cpu"]
    assert not seen.taken
    assert unit_of(torch.device("cpu"), seen) == ""


def test_a_device_that_is_not_there_is_said_with_what_is() -> None:
    with pytest.raises(UsageError) as error:
        device_for("cuda", 0, Few())
    assert str(error.value) == (
        "--device cuda: torch sees no CUDA device on this host: see pipeworker env"
    )
    with pytest.raises(UsageError, match="no MPS device on this host: it sees xpu, which --device"):
        device_for("mps", 0, Few("xpu", 1))


def test_what_torch_sees_here() -> None:
    seen = TorchAccelerators()
    assert bool(seen.kind) == bool(seen.count)
    device = device_for("auto", 0, seen)
    assert device.type == (seen.kind or "cpu")
    assert bool(unit_of(device, seen)) == bool(seen.kind)
    assert peak_memory(torch.device("cpu")) > 1 << 20


def test_a_value_is_moved_with_all_its_tensors() -> None:
    value = {"x": torch.ones(2)}
    assert to_device(value, torch.device("cpu")) is value
    moved = to_device(value, torch.device("meta"))
    assert moved["x"].is_meta
