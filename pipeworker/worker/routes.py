"""What a stage exchanges with others over skip connections, straight from stage to stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeworker.worker.transport.channel import Receiver, Sender

Gradients = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Skips:
    """What crosses a stage's boundary over skip connections.

    Attributes:
        arriving: by stage it comes from, in order, the names, sorted.
        departing: by stage it goes to, likewise.
    """

    arriving: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    departing: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def leaving(self) -> list[str]:
        """All names that depart, in the order in which their gradients come back."""
        return [name for names in self.departing.values() for name in names]


@dataclass(slots=True)
class _Arrived:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    wants_grad: dict[int, list[bool]] = field(default_factory=dict)


class Routes:
    """A stage's ends of its skip connections.

    With them, the stage's input is a pair of a value and what arrived, and its output a pair of a
    value and what departs. Here pairs are made and taken apart.

    Args:
        senders, receivers: of activations and of gradients, by the stage at the other end.
    """

    def __init__(
        self,
        skips: Skips,
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
        gradient_senders: Mapping[int, Sender],
        gradient_receivers: Mapping[int, Receiver],
    ) -> None:
        self._skips = skips
        self._senders = senders
        self._receivers = receivers
        self._gradient_senders = gradient_senders
        self._gradient_receivers = gradient_receivers
        self._arrived: dict[int, _Arrived] = {}
        self._departing: dict[int, dict[str, torch.Tensor]] = {}
        self._gradients: dict[int, dict[int, Gradients]] = {}
        self._returning: dict[int, dict[int, Gradients]] = {}

    def receive_all(self, microbatch: int) -> None:
        for peer in self._skips.arriving:
            self.receive(microbatch, peer)

    def send_all(self, microbatch: int) -> None:
        for peer in self._skips.departing:
            self.send(microbatch, peer)

    def receive(self, microbatch: int, peer: int) -> None:
        receiver = self._receivers[peer]
        value = receiver.receive(microbatch)
        names = self._skips.arriving[peer]
        arrived = self._arrived.setdefault(microbatch, _Arrived())
        arrived.tensors.update(zip(names, _unpacked(value), strict=True))
        arrived.wants_grad[peer] = list(receiver.wants_grad)

    def joined(
        self, microbatch: int, value: Any, wants_grad: Sequence[bool]
    ) -> tuple[tuple[Any, dict[str, torch.Tensor]], list[bool]]:
        """The stage's input, and which of its distinct tensors want a gradient."""
        arrived = self._arrived.setdefault(microbatch, _Arrived())
        wanted = [want for peer in self._skips.arriving for want in arrived.wants_grad[peer]]
        tensors = {name: arrived.tensors[name] for name in self._arriving_names()}
        return (value, tensors), [*wants_grad, *wanted]

    def parted(self, microbatch: int, output: tuple[Any, dict[str, torch.Tensor]]) -> Any:
        """The value of the stage's output; what departs is kept for :meth:`send`."""
        value, departing = output
        self._departing[microbatch] = dict(departing)  # the stage keeps its own
        return value

    def send(self, microbatch: int, peer: int) -> None:
        held = self._departing[microbatch]
        names = self._skips.departing[peer]
        self._senders[peer].send(microbatch, _packed([held.pop(name) for name in names]))
        if not held:
            del self._departing[microbatch]

    def receive_gradient(self, microbatch: int, peer: int) -> None:
        gradients = _unpacked(self._gradient_receivers[peer].receive(microbatch))
        self._gradients.setdefault(microbatch, {})[peer] = gradients

    def gradients(self, microbatch: int) -> Gradients:
        """Those of what departed, of the tensors that require grad."""
        by_peer = self._gradients.pop(microbatch, {})
        return [gradient for peer in self._skips.departing for gradient in by_peer[peer]]

    def returned(self, microbatch: int, gradients: Gradients) -> Gradients:
        """The gradients of the input's value; those of what arrived wait to be sent back."""
        wants = self._arrived.pop(microbatch).wants_grad
        counts = {peer: sum(wants[peer]) for peer in self._skips.arriving}
        start = len(gradients) - sum(counts.values())
        value = gradients[:start]
        returning = self._returning[microbatch] = {}
        for peer, count in counts.items():
            returning[peer] = gradients[start : start + count]
            start += count
        return value

    def send_gradient(self, microbatch: int, peer: int) -> None:
        returning = self._returning[microbatch]
        self._gradient_senders[peer].send(microbatch, _packed(returning.pop(peer)))
        if not returning:
            del self._returning[microbatch]

    def forget(self, microbatch: int) -> None:
        """There will be no backward."""
        self._arrived.pop(microbatch, None)

    def _arriving_names(self) -> list[str]:
        return [name for names in self._skips.arriving.values() for name in names]


def _packed(tensors: Sequence[torch.Tensor | None]) -> Any:
    """One alone goes bare, which is quicker."""
    return tensors[0] if len(tensors) == 1 else list(tensors)


def _unpacked(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
