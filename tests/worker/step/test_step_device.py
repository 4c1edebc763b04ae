"""Pipelines on devices that work late: bitwise equal to the CPU, with few waits by the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.facts.connections import Skip
from pipeworker.facts.step import Batch
from pipeworker.plan.actions import Payload
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import replica_edges
from pipeworker.worker.data.reader import MicroBatches
from pipeworker.worker.step.wiring import Wiring
from support.devices.device import LateDevice
from support.draws import some
from support.in_process.layers import Pop, Stash, data, mse
from support.in_process.pipelines import Pipeline, filled
from support.in_process.plain_loop import Batches, Loss, assert_equal
from support.in_process.transport import MemoryLink
from support.slow import slow

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
def open_pipeline(
    devices: Sequence[LateDevice],
    batches: Batches,
    mode: str = "never",
    loss: Loss = mse,
    stages: int = 3,
) -> Iterator[Pipeline]:
    """Build a pipeline on devices; without any, on the host, which other tests compare."""
    torch.manual_seed(1)
    pipeline = Pipeline(
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
        yield pipeline
    finally:
        for wiring in pipeline.wirings:
            wiring.close()


@pytest.mark.parametrize(
    ("eager", "mode", "loss"),
    [
        (((), ("compute", "receives"), ("sends",)), "never", mse),
        pytest.param((("sends", "receives"), (), ("compute",)), "always", mse, marks=slow),
        pytest.param(
            (("compute",), ("sends", "receives"), ()), "except_first", counted, marks=slow
        ),
        ((("compute",), ("offloads", "sends"), ("compute", "receives")), "offload", mse),
    ],
)
def test_results_equal_the_hosts_with_few_waits_for_the_device(
    eager: Sequence[tuple[str, ...]], mode: str, loss: Loss
) -> None:
    steps = 2
    batches = data(*[10] * steps)
    with open_pipeline((), batches, mode, loss) as pipeline:
        expected = pipeline.train(steps)
    devices = [LateDevice(names) for names in eager]
    with open_pipeline(devices, batches, mode, loss) as pipeline:
        assert_equal(pipeline.train(steps), expected)
    for device in devices:
        reads = [thread for thread in device.waits if thread != "send"]
        # Only the last stage waits, for the losses and counts of a step; else only send threads do,
        # and a stage that keeps several graphs: once in the first, second, fourth ... mini-batch.
        losses = steps * (1 + (loss is counted)) if device is devices[-1] else 0
        assert len(reads) == losses + (steps if mode in ("never", "offload") else 0)


def test_evaluation_outputs_equal_the_hosts() -> None:
    batches = data(10, 7)
    with open_pipeline((), batches) as pipeline:
        expected = pipeline.stream(1, batches)
    devices = [LateDevice(), LateDevice(["compute", "receives"]), LateDevice(["sends"])]
    with open_pipeline(devices, batches) as pipeline:
        seen = pipeline.stream(1, batches)
    for actual, other in zip(seen, expected, strict=True):
        assert torch.equal(actual[0], other[0])
        assert torch.equal(actual[1], other[1])


class Overwriting:
    """Mini-batches that are always in the same memory."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        memory = [tensor.clone() for tensor in self._batches[0]]
        for batch in self._batches:
            for mine, tensor in zip(memory, batch, strict=True):
                mine.copy_(tensor)
            yield memory[0], memory[1]
        for mine in memory:
            mine.fill_(float("nan"))


@pytest.mark.parametrize("stages", [pytest.param(1, marks=slow), 3])
def test_data_may_overwrite_a_mini_batch_that_is_on_its_way_to_the_device(stages: int) -> None:
    batches: Any = data(10, 10)
    with open_pipeline((), batches, stages=stages) as pipeline:
        expected = pipeline.train(2)
    devices = [LateDevice() for _ in range(stages)]
    with open_pipeline(devices, Overwriting(batches), stages=stages) as pipeline:  # type: ignore[arg-type]
        assert_equal(pipeline.train(2), expected)


def test_compute_waits_on_the_device_for_the_mini_batch() -> None:
    """With one stage, nothing else is received."""
    batches = data(10, 10)
    with open_pipeline((), batches, stages=1) as pipeline:
        expected = pipeline.train(2)
    for without in ("", "receives>compute"):
        with open_pipeline([LateDevice(["compute"], without)], batches, stages=1) as pipeline:
            assert (pipeline.train(2).losses == expected.losses) is not bool(without)


def test_offloaded_tensors_are_copied_in_order_with_compute() -> None:
    batches = data(10, 10)
    with open_pipeline((), batches, stages=1) as pipeline:
        expected = pipeline.train(2)
    quiet = some((("offloads", ""), ("compute", "")), 2)
    for eager, without in (
        *(("compute", "offloads>compute"), ("offloads", "compute>offloads")),
        *quiet,
    ):
        device = LateDevice([eager], without)
        with open_pipeline([device], batches, "offload", stages=1) as pipeline:
            assert (pipeline.train(2).losses == expected.losses) is not bool(without)


def test_replicas_get_data_that_a_loop_has_on_the_device() -> None:
    """The other replica receives its part on the host, which waits for the device."""
    placement, device = Placement.identity(1).copies(2), LateDevice()
    (edge,) = [
        one for one in replica_edges(placement, scatters_data=True) if one.payload is Payload.DATA
    ]
    link = MemoryLink()
    first, second = (
        Wiring(placement, {}, {edge: link}, None, {}, replica=number, accelerator=accelerator)
        for number, accelerator in enumerate((device, LateDevice()))
    )
    facts = Batch(signature=1, samples=4, microbatches=2, epoch=0)
    values = [torch.full((2, 3), float(m)) for m in range(2)]
    with device.active():
        own = [device.put(value) * 1.0 for value in values]
        first.scatter.scatter(MicroBatches(facts, own, own))
    received = second.scatter.receive()
    assert received is not None
    for found in (received.inputs, received.targets):
        assert torch.equal(found[0], values[1])
