"""The reduction of a stage over its replicas: gradients are added up, buffers made equal.

Every replica tells every other which gradients it has, and sends it those that the other adds up
(SCATTER). Each adds up its own part in the order of the replicas and sends the sums to all (SUM).
Each receives the sums of the others (GATHER). All receive the same bytes, so replicas stay bitwise
equal.

Buffers that a forward changes take the values of replica 0, as under DDP's ``broadcast_buffers``.
Deferred batch norm takes the micro-batches of all replicas into account, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.internals import buffers_of, version_of
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.update.replicas import Gradients

_SMALL = 1 << 16
"""Bytes of a buffer that is sent after every mini-batch. Running statistics are small, and a change
of theirs leaves no trace. A larger buffer is sent after it changed on any replica."""

_UPDATE = -1
"""Shape signature of frames of weights, whose shapes never change."""


class Reduction:
    """The reduction of one stage on one replica, with channels by the replica at the other end."""

    def __init__(
        self,
        stage: Stage,
        replica: int,
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
    ) -> None:
        self._stage = stage
        self._replica = replica
        self._replicas = len(senders) + 1
        self._senders, self._receivers = senders, receivers
        self._buffers = _Buffers(stage)
        self._gradients = Gradients((), self._replicas)
        self._reduces_gradients = self._takes_part = False
        self._source = -1
        self._present: list[list[bool]] = []
        """By replica and parameter, whether there is a gradient."""

    def begin(self, signature: int, *, whole: bool) -> None:
        """Begin a mini-batch; with `whole`, the gradients of the step are complete after it."""
        trained = [(name, p) for name, p in _named_parameters(self._stage) if p.requires_grad]
        if [id(p) for _, p in trained] != [id(p) for p in self._gradients.parameters]:
            self._gradients = Gradients(trained, self._replicas)
        self._reduces_gradients = whole and bool(trained)
        self._takes_part = (
            self._reduces_gradients or bool(self._buffers) or bool(self._stage.deferred)
        )
        self._buffers.begin()
        for origin, receiver in self._receivers.items():
            receiver.begin(signature, self._expected(origin))

    def _expected(self, origin: int) -> list[int]:
        """Return the numbers of the frames that another replica sends."""
        found = [0] if self._takes_part else []
        if self._reduces_gradients:
            found += self._part_frames(self._replica)
            found += self._sum_frames(origin, self._replica)
        if self._buffers and origin == 0:
            found.append(self._buffer_frame(0, self._replica))
        return found

    # The numbers of the frames from one replica (origin) to another (goal): 0, which gradients the
    # origin has; then the part of the gradients that the goal adds up; then the sums of the part
    # that the origin adds up; then buffers.

    def _part_frames(self, goal: int) -> range:
        return range(1, 1 + len(self._gradients.parts[goal]))

    def _sum_frames(self, origin: int, goal: int) -> range:
        start = self._part_frames(goal).stop
        return range(start, start + len(self._gradients.parts[origin]))

    def _buffer_frame(self, origin: int, goal: int) -> int:
        return self._sum_frames(origin, goal).stop

    def scatter(self) -> None:
        """Send every other replica the part of the gradients that it adds up.

        Frame 0 has flags of shape ``[parameters + large buffers + 1]`` and the moments of deferred
        batch norm; each further frame a piece of the flat gradients, of shape ``[elements]``.
        """
        if not self._takes_part:
            return
        present = self._gradients.pack() if self._reduces_gradients else []
        flags = torch.tensor([*present, *self._buffers.changes(), True], dtype=torch.uint8)
        moments = self._stage.deferred.moments() if self._stage.deferred else []
        for goal, sender in self._senders.items():
            sender.send(0, [flags, *moments])
            if self._reduces_gradients:
                pieces = self._gradients.parts[goal]
                for number, piece in zip(self._part_frames(goal), pieces, strict=True):
                    sender.send(number, self._gradients.piece(piece))
        self._present = [present]

    def sum(self) -> None:
        """Add up this replica's part of the gradients and send the sums to all others."""
        if not self._takes_part:
            return
        gradients, own = self._gradients, self._replica
        first = {origin: receiver.receive(0) for origin, receiver in self._receivers.items()}
        count = len(gradients.parameters) if self._reduces_gradients else 0
        flags = {origin: list(map(bool, frame[0].tolist())) for origin, frame in first.items()}
        if any(len(found) != count + len(self._buffers.large) + 1 for found in flags.values()):
            raise UsageError(
                f"the parameters of stage {self._stage.index} that require grad, or its buffers, "
                "are not the same on all replicas"
            )
        self._present = [
            self._present[0] if r == own else flags[r][:count] for r in range(self._replicas)
        ]
        self._buffers.choose(found[count:] for found in flags.values())
        if self._stage.deferred:
            moments = self._stage.deferred.moments()
            seen = [moments if r == own else first[r][1:] for r in range(self._replicas)]
            self._stage.deferred.set_moments(seen)
        for origin, receiver in self._receivers.items():
            del first[origin]
            receiver.release(0)
        if self._reduces_gradients:
            self._sum_part()
        if own == 0 and self._buffers:
            packed = self._buffers.pack()
            for goal, sender in self._senders.items():
                sender.send(self._buffer_frame(0, goal), packed)

    def _sum_part(self) -> None:
        gradients, own = self._gradients, self._replica
        for index, piece in enumerate(gradients.parts[own]):
            number = 1 + index
            terms = [
                gradients.piece(piece) if r == own else self._receivers[r].receive(number)
                for r in range(self._replicas)
            ]
            total = gradients.add(piece, terms, self._present)
            del terms
            for goal, sender in self._senders.items():
                sender.send(self._sum_frames(own, goal)[index], total)
                self._receivers[goal].release(number)

    def gather(self) -> None:
        """Receive the sums of the other replicas' parts, and the buffers of replica 0."""
        if not self._takes_part:
            return
        gradients, own = self._gradients, self._replica
        for origin, receiver in self._receivers.items():
            if self._reduces_gradients:
                pieces = gradients.parts[origin]
                for number, piece in zip(self._sum_frames(origin, own), pieces, strict=True):
                    gradients.set_piece(piece, receiver.receive(number))
                    receiver.release(number)
            if origin == 0 and self._buffers:
                number = self._buffer_frame(0, own)
                self._buffers.unpack(receiver.receive(number))
                receiver.release(number)
        if self._reduces_gradients:
            gradients.unpack([any(flags) for flags in zip(*self._present, strict=True)])

    # The transfer of state to replicas that have lost theirs, before the first step.

    def agree_on_state(self, *, present: bool) -> list[int]:
        """Exchange which replicas have the stage's state; the first that has is its source.

        Return the replicas to which this one must send it.
        """
        for sender in self._senders.values():
            sender.begin(None)
            sender.send(0, torch.tensor([present], dtype=torch.uint8))
        by_replica = {self._replica: present}
        for origin, receiver in self._receivers.items():
            receiver.begin(None, ())
            by_replica[origin] = bool(receiver.receive(0)[0])
            receiver.release(0)
        self._source = min((r for r, has_state in by_replica.items() if has_state), default=-1)
        return [r for r in self._senders if not by_replica[r] and self._source == self._replica]

    def send_state(self, replicas: Sequence[int], files: Sequence[torch.Tensor]) -> None:
        """Send the files of the state, each as bytes of shape ``[size]``, to some replicas."""
        for replica in replicas:
            self._senders[replica].send(1, list(files))

    def receive_state(self) -> list[torch.Tensor] | None:
        """Receive the files of the state, each of shape ``[size]``; None if no replica has it."""
        if self._source < 0:
            return None
        receiver = self._receivers[self._source]
        files = [file.clone() for file in receiver.receive(1)]
        receiver.release(1)
        return files

    # The exchange of weights where each replica updates a part of them, after each update.

    def send_weights(self, updated: Sequence[nn.Parameter]) -> None:
        """Send the weights that this replica has updated to all others, as flat pieces."""
        weights = Gradients([("", p) for p in updated], 1)
        weights.pack_weights()
        for sender in self._senders.values():
            sender.begin(_UPDATE)
            for number, piece in enumerate(weights.parts[0]):
                sender.send(number, weights.piece(piece))

    def receive_weights(self, shards: Sequence[Sequence[nn.Parameter]]) -> None:
        """Receive the weights that the others have updated; `shards` has those of each replica."""
        for origin, receiver in self._receivers.items():
            weights = Gradients([("", p) for p in shards[origin]], 1)
            weights.allocate()
            pieces = weights.parts[0]
            receiver.begin(_UPDATE, range(len(pieces)))
            for number, piece in enumerate(pieces):
                weights.set_piece(piece, receiver.receive(number))
                receiver.release(number)
            weights.unpack_weights()


def _named_parameters(stage: Stage) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a stage with their names, each once, in model order."""
    seen: set[int] = set()
    for index, layer in enumerate(stage.layers, stage.first):
        for name, parameter in layer.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{index}.{name}", parameter


_Slot = tuple[nn.Module, str]
"""A module and the name of a buffer of its own."""


class _Buffers:
    """The buffers of a stage, which get the values of replica 0; large ones only after a change."""

    def __init__(self, stage: Stage) -> None:
        self._index = stage.index
        modules = nn.ModuleList(stage.layers).modules()  # each once
        slots = [(m, name) for m in modules for name, b in buffers_of(m).items() if b is not None]
        self._small = [slot for slot in slots if _get(slot).nbytes <= _SMALL]
        self.large = [slot for slot in slots if _get(slot).nbytes > _SMALL]
        self._chosen: list[_Slot] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._changes: list[bool] = []

    def __bool__(self) -> bool:
        return bool(self._small or self.large)

    def begin(self) -> None:
        """Begin a mini-batch: detect changes from now on."""
        self._versions = [(_get(slot), version_of(_get(slot))) for slot in self.large]

    def changes(self) -> list[bool]:
        """Return which of the large buffers have changed here."""
        pairs = zip(self.large, self._versions, strict=True)
        self._changes = [
            _get(slot) is not buffer or version_of(buffer) != version
            for slot, (buffer, version) in pairs
        ]
        return self._changes

    def choose(self, remote: Iterator[Sequence[bool]]) -> None:
        """Choose the buffers to send, from the changes here and those on the other replicas."""
        changed = [any(flags) for flags in zip(self._changes, *remote, strict=False)]
        large = [slot for slot, has in zip(self.large, changed, strict=True) if has]
        self._chosen = [*self._small, *large]

    def pack(self) -> torch.Tensor:
        """Return the bytes of the chosen buffers, of shape ``[total size]``."""
        found = [_bytes_of(_get(slot)) for slot in self._chosen]
        return torch.cat(found) if found else torch.zeros(1, dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> None:
        """Copy the bytes that :meth:`pack` returned on replica 0, where they differ."""
        own_bytes = self.pack()
        if own_bytes.shape != packed.shape:
            raise UsageError(
                f"the buffers of stage {self._index} have other sizes on another replica"
            )
        if torch.equal(own_bytes, packed):
            return
        start = 0
        for slot in self._chosen:
            own = _bytes_of(_get(slot))
            sent = packed[start : start + own.numel()]
            start += own.numel()
            if not torch.equal(own, sent):
                buffer = _get(slot)
                with torch.no_grad():
                    buffer.copy_(sent.clone().view(buffer.dtype).view(buffer.shape))


def _get(slot: _Slot) -> torch.Tensor:
    module, name = slot
    found = buffers_of(module).get(name)
    return torch.empty(0) if found is None else found


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().contiguous().reshape(-1).view(torch.uint8)
