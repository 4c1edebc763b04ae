"""The frames that replicas of a stage exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pipeworker.host.position import Tracker
from pipeworker.worker.step.reduction import Reduction
from support.devices.device import LateDevice


class Sent:
    """A sender that notes the numbers of the frames."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.shapes: list[list[torch.Size]] = []

    def begin(self, signature: int | None) -> None:
        pass

    def send(self, number: int, value: Any) -> None:
        self.numbers.append(number)
        if isinstance(value, list):
            self.shapes.append([tensor.shape for tensor in value])


def test_weights_and_the_next_mini_batch_have_no_number_in_common() -> None:
    """A receiver may have the header of the next mini-batch before it has read the weights."""
    layer = nn.Linear(2, 2)
    deferred = SimpleNamespace(moments=list)
    stage: Any = SimpleNamespace(layers=[layer], first=0, index=0, deferred=deferred)
    sent: Any = Sent()
    receiver: Any = SimpleNamespace(begin=lambda *_: None)
    reduction = Reduction(stage, 0, {1: sent}, {1: receiver})
    reduction.send_weights([list(layer.parameters()), []])
    weights = set(sent.numbers)
    layer(torch.ones(1, 2)).sum().backward()
    reduction.begin(0, whole=True)
    reduction.scatter()
    assert weights
    assert not weights & set(sent.numbers[len(weights) :])


def test_frames_have_one_shape_whether_weights_are_compared_or_not() -> None:
    """A frame of another shape has all that follow described, with their tensors twice."""
    layer = nn.Linear(2, 2)
    stage: Any = SimpleNamespace(
        layers=[layer], first=0, index=0, deferred=SimpleNamespace(moments=list)
    )
    sent: Any = Sent()
    receiver: Any = SimpleNamespace(begin=lambda *_: None)
    reduction = Reduction(stage, 0, {1: sent}, {1: receiver})
    for reduction._updates in range(6):
        layer(torch.ones(1, 2)).sum().backward()
        reduction.begin(0, whole=True)
        sent.shapes.clear()
        reduction.scatter()
        assert sent.shapes[0] == [(3,), (2,)]


def test_each_piece_that_has_arrived_is_progress() -> None:
    """Otherwise an exchange over a slow line would count as a deadlock."""
    layer, tracker = nn.Linear(2, 2), Tracker()
    stage: Any = SimpleNamespace(
        layers=[layer],
        first=0,
        index=0,
        device="cpu",
        deferred=SimpleNamespace(moments=list, set_moments=lambda _: None),
        tracker=tracker,
    )
    sent: Any = Sent()
    flags, weights = torch.ones(3, dtype=torch.uint8), 1 << 33
    received: dict[int, Any] = {
        0: [flags, torch.zeros(2)],
        1: [torch.ones(3)],
        -1: [torch.ones(3)],
        weights: [torch.ones(6)],
    }
    receiver: Any = SimpleNamespace(
        begin=lambda *_: None, release=lambda _: None, receive=received.__getitem__
    )
    reduction = Reduction(stage, 0, {1: sent}, {1: receiver})
    layer(torch.ones(1, 2)).sum().backward()
    reduction.begin(0, whole=True)
    reduction.scatter()
    received[0][1] = reduction._checksums
    sent.flush = lambda: None
    for exchange in (
        reduction.sum,
        reduction.gather,
        lambda: reduction.receive_weights([[], [*layer.parameters()]]),
    ):
        tracker.wait(1)
        exchange()
        assert tracker.waiting == 2


def test_buffers_that_differ_wait_for_a_device_twice_however_many_they_are() -> None:
    norms = [nn.BatchNorm1d(2) for _ in range(4)]
    deferred = SimpleNamespace(moments=list)
    stage: Any = SimpleNamespace(layers=norms, first=0, index=0, deferred=deferred)
    buffers, device = Reduction(stage, 1, {0: Sent()}, {})._buffers, LateDevice()  # type: ignore[dict-item]
    buffers.begin()
    buffers.choose([])
    sent = buffers.pack(torch.device("cpu"))
    with torch.no_grad():
        for norm in norms[1:]:
            norm.running_mean.fill_(2.0)  # type: ignore[union-attr]
    device.move(norms)
    with device.active():
        buffers.unpack(device.put(sent))
    assert len(device.waits) == 2
    for norm in norms:
        assert norm.running_mean is not None
        assert device.read(norm.running_mean).tolist() == [0.0, 0.0]
