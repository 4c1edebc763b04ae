"""The reduction of a stage over its replicas: gradients are added up, buffers made equal.

Every replica sends every other a flag for each gradient that it has, and the gradients that the
other adds up (SCATTER). Each adds up its own part in the order of the replicas and sends the sums
to all (SUM). Each receives the sums of the others (GATHER). All receive the same bytes, so replicas
stay bitwise equal.

Buffers that a forward changes take the values of replica 0 (``replica_buffers.py``).
Weights that differ between replicas are not made equal: an error reports them. They are compared
before updates 1, 2, 4, 8, ..., in the step that follows a checkpoint, and in the last step if its
number is known.
Deferred batch norm takes the micro-batches of all replicas into account, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from pipeworker.errors import ReplicasDiffer, SnapshotLost, UsageError
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.stage.values import checksum, is_checked, is_dense
from pipeworker.worker.step.replica_buffers import ReplicaBuffers
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.update.replicas import Gradients, Piece, Weights

_UPDATE = -1
"""Shape signature of frames of weights, whose shapes never change."""

# The numbers of the frames from one replica (origin) to another (goal). The pieces of the part that
# the goal adds up have 1, 2, ...; the sums of the part that the origin adds up have -1, -2, ...;
# weights have numbers of their own, because the header of the next mini-batch's flags may already
# have arrived when the goal receives the last weights.
_FLAGS, _BUFFERS, _WEIGHTS = 0, 1 << 32, 1 << 33

Files = list[torch.Tensor]
"""The files of a stage's state, each as bytes of shape ``[size]``."""


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
        self._replica, self._replicas = replica, len(senders) + 1
        self._senders, self._receivers = senders, receivers
        self._layers = nn.ModuleDict(
            {str(index): layer for index, layer in enumerate(stage.layers, stage.first)}
        )
        self._buffers = ReplicaBuffers(stage.index, self._layers)
        self._gradients = Gradients((), self._replicas)
        self._parts: Sequence[Sequence[Piece]] = ()
        """By replica, the pieces that it adds up after this mini-batch."""
        self._reduces_gradients = self._takes_part = False
        self._flags: list[bool] = []
        """For each parameter whether it has a gradient here, for each large buffer whether it has
        changed, and True."""
        self._present: list[list[bool]] = []
        """By replica and parameter, whether there is a gradient."""
        self._updates = 0
        """How many updates this reduction has been made for."""
        self._compares = False
        """Whether weights are compared at the next opportunity, whatever the number of updates."""
        self._names: list[str] = []
        self._checksums = torch.zeros(1, dtype=torch.int64, device="cpu")
        """Checksums of the weights with these names, as last compared. They are sent after
        every mini-batch, because a frame of another shape would have all gradients described."""

    def begin(self, signature: int, *, whole: bool, compares: bool = False) -> None:
        """Begin a mini-batch; with `whole`, the gradients of the step are complete after it.

        With `compares` weights are compared, in this mini-batch or the next that reduces anything.
        """
        self._compares = self._compares or compares
        trained = [(name, p) for name, p in self._layers.named_parameters() if p.requires_grad]
        if [id(p) for _, p in trained] != [id(p) for p in self._gradients.parameters]:
            self._gradients = Gradients(trained, self._replicas)
        self._buffers.begin()
        self._reduces_gradients = whole and bool(trained)
        self._parts = self._gradients.parts if self._reduces_gradients else [()] * self._replicas
        self._takes_part = (
            self._reduces_gradients or bool(self._buffers) or bool(self._stage.deferred)
        )
        for origin, receiver in self._receivers.items():
            expected = [_FLAGS] if self._takes_part else []
            expected += range(1, 1 + len(self._parts[self._replica]))
            expected += range(-1, -1 - len(self._parts[origin]), -1)
            expected += [_BUFFERS] if self._buffers and origin == 0 else []
            receiver.begin(signature, expected)

    def scatter(self) -> None:
        """Send every other replica the part of the gradients that it adds up.

        The first frame has flags of shape ``[parameters + large buffers + 1]``, a checksum of the
        weights and the moments of deferred batch norm; each further frame a piece of the gradients,
        as tensors of shape ``[elements]``.

        Raises:
            UsageError: a forward has unfrozen a parameter, whose gradients no replica expects.
        """
        known = {id(p) for p in self._gradients.parameters}
        if any(p.requires_grad and id(p) not in known for p in self._layers.parameters()):
            raise UsageError(
                f"stage {self._stage.index}: a layer has called requires_grad_() on a frozen "
                "parameter, whose gradients the replicas do not add up in this step; call it in "
                "model() instead, or use --replicas 1"
            )
        if not self._takes_part:
            return
        present = self._gradients.begin() if self._reduces_gradients else []
        self._flags = [*present, *self._buffers.changes(), True]
        flags = torch.tensor(self._flags, dtype=torch.uint8, device="cpu")
        self._compares = self._compares or is_checked(self._updates + 1)
        if self._compares:
            self._sum_weights()
        frame = [flags, self._checksums, *self._stage.deferred.moments()]
        for goal, sender in self._senders.items():
            sender.send(_FLAGS, frame)
            for number, piece in enumerate(self._parts[goal], 1):
                sender.send(number, self._gradients.read(piece))

    def sum(self) -> None:
        """Add up this replica's part of the gradients and send the sums to all others."""
        if not self._takes_part:
            return
        own, replicas = self._replica, range(self._replicas)
        first = {origin: receiver.receive(_FLAGS) for origin, receiver in self._receivers.items()}
        flags = {origin: list(map(bool, frame[0].tolist())) for origin, frame in first.items()}
        flags[own] = self._flags
        if any(len(found) != len(self._flags) for found in flags.values()):
            raise UsageError(
                f"stage {self._stage.index}: its parameters that require grad, or its buffers, are "
                "not the same on all replicas; build the same model on each"
            )
        if self._compares:
            for frame in first.values():
                self._compare(frame[1].tolist())
        self._compares = False
        self._updates += self._reduces_gradients
        count = len(self._gradients.parameters) if self._reduces_gradients else 0
        self._present = [flags[r][:count] for r in replicas]
        self._buffers.choose([found[count:] for found in flags.values()])
        if self._stage.deferred:
            moments = self._stage.deferred.moments()
            seen = [moments if r == own else first[r][2:] for r in replicas]
            self._stage.deferred.set_moments(seen)
        for origin, receiver in self._receivers.items():
            del first[origin]
            receiver.release(_FLAGS)
        if self._reduces_gradients:
            self._gradients.make([any(flags) for flags in zip(*self._present, strict=True)])
        for number, piece in enumerate(self._parts[own], 1):
            self._sum_piece(number, piece)
        if own == 0 and self._buffers:
            packed = self._buffers.pack(self._stage.device), self._buffers.strides()
            for sender in self._senders.values():
                sender.send(_BUFFERS, packed)

    def _sum_weights(self) -> None:
        dense = {name: p for name, p in self._layers.named_parameters() if is_dense(p)}
        self._names = [*dense]
        if dense:
            self._checksums = torch.stack([checksum(p) for p in dense.values()]).cpu()

    def _compare(self, others: Sequence[int]) -> None:
        """Compare the checksums of the weights with another replica's."""
        for name, own, other in zip(self._names, self._checksums.tolist(), others, strict=False):
            if own != other:
                layer, _, parameter = name.partition(".")
                raise ReplicasDiffer(
                    f"stage {self._stage.index}, layer {layer}: `{parameter}` differs between the "
                    "replicas, because a forward changes it by its own micro-batches, or model(), "
                    "before_update() or a loop of the user's gives it or its learning rate another "
                    "value in each process; do the same in all of them, keep what a forward "
                    "changes in buffers, or use --replicas 1"
                )

    def _sum_piece(self, number: int, piece: Piece) -> None:
        terms = [
            self._gradients.read(piece)
            if r == self._replica
            else self._receivers[r].receive(number)
            for r in range(self._replicas)
        ]
        self._stage.tracker.progress()
        total = self._gradients.add(piece, terms, self._present)
        del terms
        for goal, sender in self._senders.items():
            sender.send(-number, total)
            self._receivers[goal].release(number)
        self._gradients.write(piece, total)

    def gather(self) -> None:
        """Receive the sums of the other replicas' parts, and the buffers of replica 0."""
        if not self._takes_part:
            return
        for origin, receiver in self._receivers.items():
            for number, piece in enumerate(self._parts[origin], 1):
                self._gradients.write(piece, receiver.receive(-number))
                self._stage.tracker.progress()
                receiver.release(-number)
            if origin == 0 and self._buffers:
                self._buffers.unpack(*receiver.receive(_BUFFERS))
                receiver.release(_BUFFERS)
        self._gradients.end()

    def share_state(self, own_files: Callable[[], Files] | None) -> Files | None:
        """Transfer the stage's state to the replicas that lack it, before the first step.

        The first replica that has it sends it. `own_files` returns the files; None if this replica
        lacks them.

        Returns:
            The files that this replica received; None if it has its own.
        """
        for sender in self._senders.values():
            sender.begin(None)
            sender.send(0, torch.tensor([own_files is not None], dtype=torch.uint8, device="cpu"))
        has_state = {self._replica: own_files is not None}
        for origin, receiver in self._receivers.items():
            receiver.begin(None, ())
            has_state[origin] = bool(receiver.receive(0)[0])
            receiver.release(0)
        source = min((replica for replica, has in has_state.items() if has), default=None)
        if source is None:
            raise SnapshotLost(f"no replica has the state of stage {self._stage.index} in memory")
        if own_files is None:
            files = [file.clone() for file in self._receivers[source].receive(1)]
            self._receivers[source].release(1)
            return files
        lacking = [sender for goal, sender in self._senders.items() if not has_state[goal]]
        if lacking and source == self._replica:
            files = own_files()
            for sender in lacking:
                sender.send(1, files)
        return None

    # The exchange of weights where each replica updates a part of them, after each update.

    def send_weights(self, shards: Sequence[Sequence[nn.Parameter]]) -> None:
        """Send the weights that this replica has updated to all others, in pieces.

        Strides come with the first piece: a frame with another value has a header, and each value
        takes time to compare. `shards` has the weights that each replica updates.
        """
        weights = Weights(shards[self._replica])
        strides = weights.strides()
        for sender in self._senders.values():
            sender.begin(_UPDATE)
            for number, piece in enumerate(weights.parts[0], _WEIGHTS):
                values = weights.read(piece)
                sender.send(number, (values, strides) if number == _WEIGHTS else values)

    def receive_weights(self, shards: Sequence[Sequence[nn.Parameter]]) -> None:
        """Receive the weights that the others have updated; see :meth:`send_weights`."""
        for origin, receiver in self._receivers.items():
            weights = Weights(shards[origin])
            pieces = weights.parts[0]
            receiver.begin(_UPDATE, range(_WEIGHTS, _WEIGHTS + len(pieces)))
            for number, piece in enumerate(pieces, _WEIGHTS):
                values = receiver.receive(number)
                if number == _WEIGHTS:
                    values, strides = values
                    weights.set_strides(strides)
                weights.write(piece, values)
                self._stage.tracker.progress()
                receiver.release(number)
            weights.end()
        for sender in self._senders.values():
            sender.flush()  # what is sent are the weights themselves, which the user may change
