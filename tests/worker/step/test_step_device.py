"""Pipelines on devices that work late: the bits of the CPU, and who waits for the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.plan.placement import Placement
from pipeworker.plan.skips import Skip
from support.device import LateDevice
from support.pipelines import (
    Batches,
    Loss,
    Pipeline,
    Pop,
    Stash,
    assert_equal,
    data,
    filled,
    mse,
)

MICROBATCHES = 4
SKIPS = [Skip(0, 4, "kept")]


def layers() -> list[nn.Module]:
    first, last = nn.Sequential(nn.Linear(6, 6), Stash("kept")), nn.Sequential(Pop("kept"))
    middle = [nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 6)]
    return [first, *middle, last, nn.Linear(6, 2)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nn.functional.mse_loss(output, target, reduction="sum"), (target > 0).sum()


@contextmanager
def pipeline(
    devices: Sequence[LateDevice],
    batches: Batches,
    mode: str = "never",
    loss: Loss = mse,
    stages: int = 3,
) -> Iterator[Pipeline]:
    """Without devices on the host, as other tests hold against the plain loop."""
    torch.manual_seed(1)
    made = Pipeline(
        layers(),
        loss,
        copy.deepcopy(batches),
        filled(Placement.identity(stages), mode),
        microbatches=MICROBATCHES,
        optimizer=sgd,
        devices=devices,
        skips=SKIPS,
    )
    try:
        yield made
    finally:
        for executor in made.executors:
            executor.close()


@pytest.mark.parametrize(
    ("eager", "mode", "loss"),
    [
        (((), ("compute", "receives"), ("sends",)), "never", mse),
        ((("sends", "receives"), (), ("compute",)), "always", mse),
        ((("compute",), ("sends", "receives"), ()), "except_first", counted),
        ((("compute",), ("aside", "sends"), ("compute", "receives")), "offload", mse),
    ],
)
def test_the_bits_are_those_of_the_host_and_few_wait(
    eager: Sequence[tuple[str, ...]], mode: str, loss: Loss
) -> None:
    steps = 2
    batches = data(*[10] * steps)
    with pipeline((), batches, mode, loss) as made:
        expected = made.train(steps)
    devices = [LateDevice(names) for names in eager]
    with pipeline(devices, batches, mode, loss) as made:
        assert_equal(made.train(steps), expected)
    for device in devices:
        reads = [thread for thread in device.waits if thread != "courier"]
        # Where the losses are they are read, once a step, and counts; else only the courier waits.
        assert len(reads) == (steps * (1 + (loss is counted)) if device is devices[-1] else 0)


def test_outputs_are_those_of_the_host() -> None:
    batches = data(10, 7)
    with pipeline((), batches) as made:
        expected = made.stream(1, batches)
    devices = [LateDevice(), LateDevice(["compute", "receives"]), LateDevice(["sends"])]
    with pipeline(devices, batches) as made:
        seen = made.stream(1, batches)
    for mine, theirs in zip(seen, expected, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize("without", ["", "receives>compute"])
def test_a_mini_batch_is_waited_for_on_the_device(without: str) -> None:
    """With one stage nothing else arrives."""
    batches = data(10, 10)
    with pipeline((), batches, stages=1) as made:
        expected = made.train(2)
    with pipeline([LateDevice(["compute"], without)], batches, stages=1) as made:
        assert (made.train(2).losses == expected.losses) is not bool(without)


@pytest.mark.parametrize(
    ("eager", "without"),
    [("compute", "aside>compute"), ("aside", "compute>aside"), ("aside", ""), ("compute", "")],
)
def test_what_a_graph_saved_comes_and_goes_behind_what_is_computed(
    eager: str, without: str
) -> None:
    batches = data(10, 10)
    with pipeline((), batches, stages=1) as made:
        expected = made.train(2)
    with pipeline([LateDevice([eager], without)], batches, "offload", stages=1) as made:
        assert (made.train(2).losses == expected.losses) is not bool(without)
