"""The memory of a channel when shapes change: little more than the largest shape needs."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.links.gloo import GroupLink
from support.in_process.transport import FORTH, connect_all
from support.processes.memory import shared_memory
from support.real_jobs.jobs import Jobs, processes_of, until
from support.slow import slow

MICROBATCHES = 4
LARGEST = 100_000
Step = Sequence[list[torch.Tensor]]


def constant(chance: random.Random) -> Step:
    return [[torch.empty(LARGEST), torch.empty(LARGEST // 4)] for _ in range(MICROBATCHES)]


def by_step(chance: random.Random) -> Step:
    size = chance.randint(LARGEST // 20, LARGEST)
    return [[torch.empty(size), torch.empty(size // 4)] for _ in range(MICROBATCHES)]


def by_microbatch(chance: random.Random) -> Step:
    return [by_step(chance)[0] for _ in range(chance.randint(1, MICROBATCHES))]


def by_rank(chance: random.Random) -> Step:
    """Return few large tensors, or many small ones."""
    count = chance.choice([1, 5, 40])
    sizes = [LARGEST // count - chance.randint(0, 300) for _ in range(count)]
    return [[torch.empty(size) for size in sizes] for _ in range(MICROBATCHES)]


def two_shapes(chance: random.Random) -> Step:
    """Return one of two shapes, both of which become known to both ends."""
    size = LARGEST - 30_000 * chance.randint(0, 1)
    return [[torch.empty(size), torch.empty(size // 4)] for _ in range(MICROBATCHES)]


class Channel:
    """Both ends of a connected channel in this process, and the memory that it holds."""

    def __init__(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        if backend == "gloo":
            real = GroupLink.allocate

            def allocate(link: GroupLink, count: int) -> torch.Tensor:
                memory = real(link, count)
                self._made.append(weakref.ref(memory.untyped_storage()))
                return memory

            monkeypatch.setattr(GroupLink, "allocate", allocate)
        gc.collect()
        self._before = shared_memory()
        source, target = connect_all((FORTH,), 2, backend)
        self.links = source[FORTH], target[FORTH]
        self.sender = Sender(self.links[0], None, None)
        self.receiver = Receiver(self.links[1], MICROBATCHES)

    def held(self) -> int:
        alive = sum(storage.nbytes() for ref in self._made if (storage := ref()) is not None)
        return shared_memory() - self._before + alive

    def step(self, number: int, values: Step, keep: Callable[[torch.Tensor], object]) -> int:
        """Receive all micro-batches, then release them; return the most bytes held."""
        signature = hash(tuple(tuple(t.numel() for t in value) for value in values))
        self.sender.begin(signature)
        self.receiver.begin(signature, range(len(values)))
        arrived = []
        for m, value in enumerate(values):
            for tensor in value:
                tensor.fill_(number)
            self.sender.send(m, value)
            arrived.append(self.receiver.receive(m))
        assert all(bool((t == number).all()) for value in arrived for t in value)
        keep(arrived[0][0])
        most = self.held()
        for m in range(len(values)):
            self.receiver.release(m)
        del arrived, value
        self.sender.flush()
        return max(most, self.held())

    def close(self) -> None:
        for link in self.links:
            link.close()


@pytest.fixture
def largest(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The bytes that a channel holds when all steps have the largest shape."""
    with monkeypatch.context() as patch:
        channel = Channel(backend, patch)
        yield max(channel.step(n, constant(random.Random(0)), lambda _: None) for n in range(4))
        channel.close()


@pytest.mark.parametrize(
    ("shapes", "backend"),
    [
        *((by_step, "auto"), (by_microbatch, "gloo"), (by_rank, "auto"), (two_shapes, "gloo")),
        pytest.param(by_step, "gloo", marks=slow),
        pytest.param(by_microbatch, "auto", marks=slow),
        pytest.param(by_rank, "gloo", marks=slow),
        pytest.param(two_shapes, "auto", marks=slow),
    ],
)
def test_a_channel_holds_little_more_than_for_the_largest_shape(
    shapes: Callable[[random.Random], Step],
    backend: str,
    largest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random(5)
    channel = Channel(backend, monkeypatch)
    held = [channel.step(n, shapes(chance), lambda _: None) for n in range(15)]
    channel.close()
    needed = 4 * MICROBATCHES * (LARGEST + LARGEST // 4)
    assert needed <= largest < 1.1 * needed + (1 << 20)
    assert needed // 2 < max(held) <= 1.5 * largest


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_kept_tensors_do_not_change_when_shapes_change(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(6)
    channel = Channel(backend, monkeypatch)
    kept: list[torch.Tensor] = []
    for number in range(6):
        channel.step(number, by_step(chance), lambda tensor: kept.append(tensor[10:]))
    assert [torch.unique(tensor).tolist() for tensor in kept] == [[float(n)] for n in range(6)]
    channel.close()


JOB = """
    import random
    import sys
    import time
    from pathlib import Path
    import torch
    from torch import nn

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.factor

    def model():
        return nn.Sequential(Scale(), Scale(), Scale())

    def loss(output, target):
        return (output.mean() - target.mean()) ** 2

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.001)

    def data():
        chance = random.Random(3)
        while True:
            for _ in range(int(sys.argv[2])):
                length = chance.randint(16, 256) if sys.argv[1] == "changing" else 256
                yield torch.ones(16, length, 256), torch.zeros(16)
            while not Path("go").exists():
                Path("ready").touch()
                time.sleep(0.02)
"""
"""A job with frames of 1 MB at most, which waits for a file after a number of steps."""


@slow
def test_a_job_with_changing_shapes_holds_little_more_than_the_largest_needs(jobs: Jobs) -> None:
    held = {}
    for shapes, steps in (("constant", 4), ("changing", 30)):
        words = ["--stages", "3", "--microbatches", "4", "--recompute", "never"]
        words += ["--steps", str(steps + 2), "--", shapes, str(steps)]
        process, _ = jobs.start(*words, source=JOB)
        ready, go = jobs.folder / "ready", jobs.folder / "go"
        until(ready.exists)
        held[shapes] = shared_memory(processes_of(jobs.folder))
        go.touch()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        ready.unlink()
        go.unlink()
    assert 16 << 20 <= held["constant"] < 32 << 20  # four channels, four frames of each
    assert 8 << 20 < held["changing"] <= 1.5 * held["constant"]
