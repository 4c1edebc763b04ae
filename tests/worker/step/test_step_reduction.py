"""The frames that replicas of a stage exchange."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pipeworker.host.position import Tracker
from pipeworker.plan.partition import PIECE_ELEMENTS
from pipeworker.worker.step.reduction import Reduction


class Sent:
    """A sender that notes the numbers of the frames."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.frames: list[list[torch.Tensor]] = []

    def begin(self, signature: int | None) -> None:
        pass

    def send(self, number: int, value: Any) -> None:
        self.numbers.append(number)
        if isinstance(value, list):
            self.frames.append(value)


def stage_of_a_layer() -> tuple[nn.Linear, Any]:
    """Return a layer, and a stage that has it alone."""
    layer = nn.Linear(2, 2)
    deferred = SimpleNamespace(moments=list, set_moments=lambda _: None)
    values = {"first": 0, "index": 0, "device": "cpu", "tracker": Tracker()}
    return layer, SimpleNamespace(layers=[layer], deferred=deferred, **values)


def test_weights_and_the_next_mini_batch_have_no_number_in_common() -> None:
    """A receiver may have the header of the next mini-batch before it has read the weights."""
    layer, stage = stage_of_a_layer()
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
    layer, stage = stage_of_a_layer()
    sent: Any = Sent()
    received: dict[int, Any] = {1: [torch.zeros(3)]}
    receiver: Any = SimpleNamespace(
        begin=lambda *_: None, release=lambda _: None, receive=received.__getitem__
    )
    reduction = Reduction(stage, 0, {1: sent}, {1: receiver})
    checksums = []
    for _ in range(6):
        layer(torch.ones(1, 2)).sum().backward()
        reduction.begin(0, whole=True)
        sent.frames.clear()
        reduction.scatter()
        received[0] = sent.frames[0]
        assert [tensor.shape for tensor in received[0]] == [(3,), (2,)]
        checksums.append(received[0][1].tolist())
        reduction.sum()
        with torch.no_grad():
            layer.weight.add_(1.0)
    # Weights are compared before updates 1, 2 and 4.
    assert [a == b for a, b in pairwise(checksums)] == [False, True, False, True, True]


def test_each_piece_that_has_arrived_is_progress() -> None:
    """Otherwise an exchange over a slow line would count as a deadlock."""
    layer, stage = stage_of_a_layer()
    tracker = stage.tracker
    sent: Any = Sent()
    flags, weights = torch.ones(3, dtype=torch.uint8), 1 << 33
    received: dict[int, Any] = {
        0: [flags, torch.zeros(2)],
        1: [torch.ones(3)],
        -1: [torch.ones(3)],
        weights: ([torch.ones(6)], {}),
    }
    receiver: Any = SimpleNamespace(
        begin=lambda *_: None, release=lambda _: None, receive=received.__getitem__
    )
    reduction = Reduction(stage, 0, {1: sent}, {1: receiver})
    layer(torch.ones(1, 2)).sum().backward()
    reduction.begin(0, whole=True)
    reduction.scatter()
    received[0][1] = sent.frames[0][1]
    sent.flush = lambda: None
    for exchange in (
        reduction.sum,
        reduction.gather,
        lambda: reduction.receive_weights([[], [*layer.parameters()]]),
    ):
        tracker.wait(1)
        exchange()
        assert tracker.waiting == 2


def test_strides_are_sent_once_however_many_pieces_the_weights_have() -> None:
    """Both ends compare each plain value of a frame in every step."""
    (layer, stage), (other, receiving) = stage_of_a_layer(), stage_of_a_layer()
    layer.weight.data = torch.randn(2, PIECE_ELEMENTS).t()
    other.weight.data = torch.zeros(PIECE_ELEMENTS, 2)
    frames: dict[int, Any] = {}
    sender: Any = SimpleNamespace(begin=lambda _: None, send=frames.__setitem__, flush=lambda: None)
    receiver: Any = SimpleNamespace(
        begin=lambda *_: None, release=lambda _: None, receive=frames.__getitem__
    )
    Reduction(stage, 0, {1: sender}, {1: receiver}).send_weights(
        [[layer.get_parameter("weight")], []]
    )
    assert [type(frame) for frame in frames.values()] == [tuple, list]
    weights = [other.get_parameter("weight")]
    Reduction(receiving, 1, {0: sender}, {0: receiver}).receive_weights([weights, []])
    assert torch.equal(other.weight, layer.weight)
    assert other.weight.stride() == layer.weight.stride() == (1, PIECE_ELEMENTS)
