"""A U-shaped network of sleeping layers, which can lack a feature of pipeworker.

Its arguments are the number of layers, the seconds of a forward, the bytes of an activation, which
are also those of each skip connection, the number of micro-batches, and what it lacks: ``nothing``;
``recompute``: a forward is repeated when its gradient has arrived, not before; ``receives``: a
receive is posted when its tensor is needed; ``skips``: each skip connection passes all layers
between its ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from emulated_job import Sleeping, data, loss, optimizer

import pipeworker
from pipeworker.plan.actions import Action, Kind
from pipeworker.worker.step.executor import Executor
from pipeworker.worker.transport import channel

__all__ = ["data", "loss", "model", "optimizer"]
LAYERS, SECONDS, LACKS = int(sys.argv[1]), float(sys.argv[2]), sys.argv[5]


class Down(Sleeping):
    """A layer of the first half, whose output is also that of a skip connection."""

    def __init__(self, index: int) -> None:
        super().__init__(SECONDS)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        pipeworker.stash(f"level {self.index}", y)
        return y


class Up(Sleeping):
    """A layer of the second half, which adds a skip connection."""

    def __init__(self, index: int) -> None:
        super().__init__(SECONDS)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + pipeworker.pop(f"level {self.index}"))


class Passing(Sleeping):
    """A layer that maps (x, skipped, …) to such a tuple: it adds one to the end, or uses the last.

    The last layer returns a tensor.
    """

    def __init__(self, *, down: bool) -> None:
        super().__init__(SECONDS)
        self.down = down

    def forward(self, values: Any) -> Any:
        x, *skipped = values if isinstance(values, tuple) else (values,)
        if self.down:
            y = super().forward(x)
            return (y, *skipped, y)
        y = super().forward(x + skipped.pop())
        return (y, *skipped) if skipped else y


def model() -> list[Any]:
    half = LAYERS // 2
    if LACKS == "skips":
        return [partial(Passing, down=index < half) for index in range(LAYERS)]
    down = [partial(Down, index) for index in range(half)]
    return [*down, *(partial(Up, index) for index in reversed(range(half)))]


def _without_early_recompute() -> None:
    kept = Executor.set_actions

    def set_actions(self: Executor, actions: Sequence[Action]) -> int:
        order: list[Action] = []
        for action in actions:
            if action.kind is Kind.RECEIVE_GRADIENT and order[-1].kind is Kind.RECOMPUTE:
                order.insert(-1, action)
            else:
                order.append(action)
        return kept(self, order)

    Executor.set_actions = set_actions  # type: ignore[method-assign]


def _without_posted_receives() -> None:
    # One is posted at a time.
    channel.CHANNEL_CAPACITY = 1  # type: ignore[attr-defined]
    channel._MESSAGES_AHEAD = 0
    post, receive = channel.Receiver._post_ahead, channel.Receiver.receive

    def posted_late(self: channel.Receiver, number: int) -> Any:
        post(self)
        return receive(self, number)

    def not_yet(self: channel.Receiver) -> None: ...

    channel.Receiver._post_ahead = not_yet  # type: ignore[method-assign]
    channel.Receiver.receive = posted_late  # type: ignore[method-assign]


if LACKS == "recompute":
    _without_early_recompute()
elif LACKS == "receives":
    _without_posted_receives()
