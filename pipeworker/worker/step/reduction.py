"""A stage and its like in the other replicas: gradients added up, buffers and statistics alike.

Every replica tells every other which gradients it has, and gives it those that the other adds up
(SCATTER); each adds up its own part in the order of the replicas and gives the sums to all (SUM);
each takes the others' (GATHER). All receive the same bytes, so replicas stay equal bit for bit.

Buffers that a forward changes are those of replica 0 from then on, as under DDP's
``broadcast_buffers``. Deferred batch norm sees the micro-batches of all replicas, in their order.
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
"""Bytes of a buffer that is told each time. Running statistics leave no trace when they change, and
are small; a larger one is told when it, or its module's others, changed on any replica."""

_UPDATE = -1
"""What stands for the shapes of a mini-batch where weights are told, which are always the same."""


class Reduction:
    """One stage of one replica.

    Args:
        replica: this one.
        senders, receivers: its channels, by the replica at the other end.
    """

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
        self._whole = self._speaks = False
        self._giver = -1
        self._there: list[list[bool]] = []

    def begin(self, signature: int, *, whole: bool) -> None:
        """A mini-batch starts.

        Args:
            signature: of its shapes.
            whole: the gradients of the step are complete with it.
        """
        trained = [(name, p) for name, p in _named(self._stage) if p.requires_grad]
        if [id(p) for _, p in trained] != [id(p) for p in self._gradients.parameters]:
            self._gradients = Gradients(trained, self._replicas)
        self._whole = whole and bool(trained)
        self._speaks = self._whole or bool(self._buffers) or bool(self._stage.deferred)
        self._buffers.begin()
        for origin, receiver in self._receivers.items():
            receiver.begin(signature, self._expected(origin))

    def _expected(self, origin: int) -> list[int]:
        """The frames that another replica sends."""
        found = [0] if self._speaks else []
        if self._whole:
            found += self._parts(self._replica)
            found += self._sums(origin, self._replica)
        if self._buffers and origin == 0:
            found.append(self._last(0, self._replica))
        return found

    # The numbers of frames from one replica to another: 0, what it has; then of the gradients those
    # that the other adds up; then the sums of its own; then buffers.

    def _parts(self, goal: int) -> range:
        return range(1, 1 + len(self._gradients.parts[goal]))

    def _sums(self, origin: int, goal: int) -> range:
        start = self._parts(goal).stop
        return range(start, start + len(self._gradients.parts[origin]))

    def _last(self, origin: int, goal: int) -> int:
        return self._sums(origin, goal).stop

    def scatter(self) -> None:
        """Give every other replica what it adds up."""
        if not self._speaks:
            return
        mine = self._gradients.pack() if self._whole else []
        flags = torch.tensor([*mine, *self._buffers.traces(), True], dtype=torch.uint8)
        moments = self._stage.deferred.moments() if self._stage.deferred else []
        for goal, sender in self._senders.items():
            sender.send(0, [flags, *moments])
            if self._whole:
                pieces = self._gradients.parts[goal]
                for number, piece in zip(self._parts(goal), pieces, strict=True):
                    sender.send(number, self._gradients.piece(piece))
        self._there = [mine]

    def sum(self) -> None:
        """Add up this replica's own part, and give it to all others."""
        if not self._speaks:
            return
        gradients, mine = self._gradients, self._replica
        first = {origin: receiver.receive(0) for origin, receiver in self._receivers.items()}
        count = len(gradients.parameters) if self._whole else 0
        flags = {origin: list(map(bool, given[0].tolist())) for origin, given in first.items()}
        if any(len(found) != count + len(self._buffers.large) + 1 for found in flags.values()):
            raise UsageError(
                f"the parameters of stage {self._stage.index} that require grad, or its buffers, "
                "are not the same on all replicas"
            )
        self._there = [
            self._there[0] if r == mine else flags[r][:count] for r in range(self._replicas)
        ]
        self._buffers.changed(found[count:] for found in flags.values())
        if self._stage.deferred:
            own = self._stage.deferred.moments()
            seen = [own if r == mine else first[r][1:] for r in range(self._replicas)]
            self._stage.deferred.take(seen)
        for origin, receiver in self._receivers.items():
            del first[origin]
            receiver.release(0)
        if self._whole:
            self._add_up()
        if mine == 0 and self._buffers:
            packed = self._buffers.packed()
            for goal, sender in self._senders.items():
                sender.send(self._last(0, goal), packed)

    def _add_up(self) -> None:
        gradients, mine = self._gradients, self._replica
        for index, piece in enumerate(gradients.parts[mine]):
            number = 1 + index
            given = [
                gradients.piece(piece) if r == mine else self._receivers[r].receive(number)
                for r in range(self._replicas)
            ]
            total = gradients.add(piece, given, self._there)
            del given
            for goal, sender in self._senders.items():
                sender.send(self._sums(mine, goal)[index], total)
                self._receivers[goal].release(number)

    def gather(self) -> None:
        """Take the sums of the other parts."""
        if not self._speaks:
            return
        gradients, mine = self._gradients, self._replica
        for origin, receiver in self._receivers.items():
            if self._whole:
                pieces = gradients.parts[origin]
                for number, piece in zip(self._sums(origin, mine), pieces, strict=True):
                    gradients.put(piece, receiver.receive(number))
                    receiver.release(number)
            if origin == 0 and self._buffers:
                number = self._last(0, mine)
                self._buffers.unpack(receiver.receive(number))
                receiver.release(number)
        if self._whole:
            gradients.unpack([any(some) for some in zip(*self._there, strict=True)])

    # Where a replica has lost its state: before the first step.

    def tell(self, *, has: bool) -> list[int]:
        """Whether this replica has the state; returns whom it gives it: it is the first that has.

        Each takes it then from that one.
        """
        for sender in self._senders.values():
            sender.begin(None)
            sender.send(0, torch.tensor([has], dtype=torch.uint8))
        everybody = {self._replica: has}
        for origin, receiver in self._receivers.items():
            receiver.begin(None, ())
            everybody[origin] = bool(receiver.receive(0)[0])
            receiver.release(0)
        self._giver = min((r for r, others in everybody.items() if others), default=-1)
        return [r for r in self._senders if not everybody[r] and self._giver == self._replica]

    def give(self, heirs: Sequence[int], files: Sequence[torch.Tensor]) -> None:
        """Give some replicas the files of the state."""
        for replica in heirs:
            self._senders[replica].send(1, list(files))

    def inherit(self) -> list[torch.Tensor] | None:
        """The files that this replica, which has none, is given; None where nobody has any."""
        if self._giver < 0:
            return None
        receiver = self._receivers[self._giver]
        files = [file.clone() for file in receiver.receive(1)]
        receiver.release(1)
        return files

    # Where each replica updates a part of the weights: behind an update, whatever comes next.

    def give_weights(self, mine: Sequence[nn.Parameter]) -> None:
        """Tell all other replicas what this one has updated."""
        weights = Gradients([("", p) for p in mine], 1)
        weights.pack_weights()
        for sender in self._senders.values():
            sender.begin(_UPDATE)
            for number, piece in enumerate(weights.parts[0]):
                sender.send(number, weights.piece(piece))

    def take_weights(self, shards: Sequence[Sequence[nn.Parameter]]) -> None:
        """Take what the others have updated; `shards` are by replica."""
        for origin, receiver in self._receivers.items():
            weights = Gradients([("", p) for p in shards[origin]], 1)
            weights.room()
            pieces = weights.parts[0]
            receiver.begin(_UPDATE, range(len(pieces)))
            for number, piece in enumerate(pieces):
                weights.put(piece, receiver.receive(number))
                receiver.release(number)
            weights.unpack_weights()


def _named(stage: Stage) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a stage, each once, in model order."""
    seen: set[int] = set()
    for index, layer in enumerate(stage.layers, stage.first):
        for name, parameter in layer.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{index}.{name}", parameter


class _Buffers:
    """The buffers of a stage, which replica 0 tells the others."""

    def __init__(self, stage: Stage) -> None:
        self._index = stage.index
        modules = {id(m): m for layer in stage.layers for m in layer.modules()}.values()
        slots = [(m, name) for m in modules for name, b in buffers_of(m).items() if b is not None]
        self._small = [slot for slot in slots if _get(slot).nbytes <= _SMALL]
        self.large = [slot for slot in slots if _get(slot).nbytes > _SMALL]
        self._told: list[tuple[nn.Module, str]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._mine: list[bool] = []

    def __bool__(self) -> bool:
        return bool(self._small or self.large)

    def begin(self) -> None:
        """A mini-batch starts: what changes from now on is told."""
        self._versions = [(_get(slot), version_of(_get(slot))) for slot in self.large]

    def traces(self) -> list[bool]:
        """Which of the large ones have changed."""
        pairs = zip(self.large, self._versions, strict=True)
        mine = [_get(slot) is not b or version_of(b) != version for slot, (b, version) in pairs]
        self._mine = mine
        return mine

    def changed(self, elsewhere: Iterator[Sequence[bool]]) -> None:
        """What the other replicas have said."""
        found = [any(some) for some in zip(self._mine, *elsewhere, strict=False)]
        large = [slot for slot, has in zip(self.large, found, strict=True) if has]
        self._told = [*self._small, *large]

    def packed(self) -> torch.Tensor:
        """Those that are told, as bytes."""
        found = [_bytes_of(_get(slot)) for slot in self._told]
        return torch.cat(found) if found else torch.zeros(1, dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> None:
        """Put back what :meth:`packed` gave, where it differs."""
        mine = self.packed()
        if mine.shape != packed.shape:
            raise UsageError(
                f"the buffers of stage {self._index} have other sizes on another replica"
            )
        if torch.equal(mine, packed):
            return
        start = 0
        for slot in self._told:
            own = _bytes_of(_get(slot))
            theirs = packed[start : start + own.numel()]
            start += own.numel()
            if not torch.equal(own, theirs):
                buffer = _get(slot)
                with torch.no_grad():
                    buffer.copy_(theirs.clone().view(buffer.dtype).view(buffer.shape))


def _get(slot: tuple[nn.Module, str]) -> torch.Tensor:
    module, name = slot
    found = buffers_of(module).get(name)
    return torch.empty(0) if found is None else found


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().contiguous().reshape(-1).view(torch.uint8)
