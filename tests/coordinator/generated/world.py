"""A job with simulated workers under generated events, all recorded and checked."""

from __future__ import annotations

import dataclasses
import pickle
from collections import deque
from collections.abc import Callable
from functools import partial

from coordinator.generated.follower import Follower, Memory
from coordinator.generated.lives import (
    LAYERS,
    NUMBER,
    Beat,
    Deliver,
    Foreign,
    Full,
    Happening,
    How,
    Life,
    Lose,
    Repeat,
    Rush,
    Silence,
    Stolen,
)
from coordinator.generated.watch import Watch
from pipeworker.coordinator.effects import Commit, Dropped, Effect, Send
from pipeworker.coordinator.events import (
    CheckpointEnded,
    Event,
    MessageReceived,
    Tick,
)
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.wire.lines import Restart, Snapshot, WorkerExited
from pipeworker.wire.messages.checkpoint import Restore
from pipeworker.wire.messages.presence import Failed, Heartbeat, Hello, Signalled, Welcome
from pipeworker.wire.messages.step import Call
from support.pure.coordinator import BATCH, TIMINGS, ScriptedJob, peer_of

_MOST = 5000
"""Turns within which a job ends."""


class World:
    """A simulated job.

    Args:
        life: the job, and what its workers do.
        strict: whether only the workers themselves send messages in their names.

    Attributes:
        memories: the slots of each rank, which outlast the workers.
        full: checkpoints that cannot be completed.
        losses: workers lost so far.
    """

    def __init__(self, life: Life, *, strict: bool = True) -> None:
        self._strict = strict
        self.life = life
        self.script = ScriptedJob(
            life.workers,
            generation=NUMBER,
            layers=LAYERS,
            replaceable=life.replaceable,
            **life.options,
        )
        self.memories: list[Memory] = [{} for _ in range(life.workers)]
        self.watch = Watch(frozenset(self.script.ranks), NUMBER)
        self.commits: deque[int] = deque()
        self.complete: set[int] = set()
        self.sent: list[MessageReceived] = []
        self.late: deque[MessageReceived] = deque()
        self.events: list[tuple[Event, float]] = []
        self.full = 0
        self.losses = 0
        self._begin()

    def _begin(self) -> None:
        self.workers = [
            Follower(self.script, rank, self.life, self.memories[rank], strict=self._strict)
            for rank in self.script.ranks
        ]

    def handle(self, event: Event) -> list[Effect]:
        self.events.append((event, self.script.now))
        self.watch.before(event)
        effects = self.script.handle(event)
        self.watch.after(effects, len(self.script.ranks))
        for effect in effects:
            match effect:
                case Commit(state):
                    self.commits.append(state.step)
                case Send(peer, message, _):
                    if isinstance(message, Welcome) and message.restore:
                        self._check_complete(message.restore)
                    for worker in self.workers:
                        if peer == peer_of(worker.rank):
                            worker.receive(message)
                case Snapshot(step, slot, ranks):
                    self._check_complete(Restore(step, slot=slot, ranks=ranks))
                case Restart():
                    self._replace()
        return effects

    def _check_complete(self, restore: Restore) -> None:
        """Check that a state to resume from is complete, on disk or in the memory of all ranks."""
        if not self._strict:
            return
        if restore.path:
            assert restore.step in self.complete
            assert restore.path == f"checkpoints/{restore.step}"
            return
        held = [memory.get(restore.slot) for memory in self.memories[: restore.ranks]]
        assert held == [restore.step] * restore.ranks

    def _replace(self) -> None:
        """Replace the workers; messages that the earlier ones had sent may still arrive."""
        for worker in self.workers:
            sent = [
                MessageReceived(peer_of(worker.rank), worker.generation, m) for m in worker.outbox
            ]
            self.late.extend(sent)
        self._begin()

    def deliver(self, choice: int) -> bool:
        """Process one of the pending items: a message, a worker's write, or a commit."""
        turns: list[Callable[[], object]] = []
        for worker in self.workers:
            turns += [partial(self._send_next, worker)] if worker.outbox else []
            turns += [worker.write] if worker.writes else []
        turns += [self._commit] if self.commits else []
        turns += [lambda: self.handle(self.late.popleft())] if self.late else []
        if not turns:
            return False
        turns[choice % len(turns)]()
        return True

    def _send_next(self, worker: Follower) -> None:
        received = MessageReceived(peer_of(worker.rank), worker.generation, worker.outbox.popleft())
        self.sent.append(received)
        self.handle(received)

    def _commit(self) -> None:
        step = self.commits.popleft()
        if self.full:
            self.full -= 1
            self.handle(CheckpointEnded(step, error="no space left"))
        else:
            self.complete.add(step)
            self.handle(CheckpointEnded(step, f"checkpoints/{step}"))

    def finish(self, order: list[int]) -> None:
        """Process everything that is pending; silent workers are lost by their timeout."""
        for turn in range(_MOST):
            if not self.deliver(order[turn % len(order)]):
                if self.watch.ended or not self.life.replaceable:
                    return
                self.beat(20.0)
        raise AssertionError("the job does not end")

    def beat(self, seconds: float) -> None:
        """Let time pass, and let all members that are alive send heartbeats."""
        self.script.now += seconds
        for worker in self.workers:
            peer = peer_of(worker.rank)
            if peer in self.watch.joined and not worker.gone:
                beat = Heartbeat(worker.rank, Position())
                self.handle(MessageReceived(peer, worker.generation, beat))
        self.handle(Tick())

    def silence(self) -> None:
        """Let time pass without messages until all workers are lost."""
        for _ in range(60):
            self.script.now += 40.0
            self.handle(Tick())

    def check_replay(self) -> None:
        """Check that the same events give the same effects."""
        job = self.script.new_job()
        replayed = [effect for event, now in self.events for effect in job.handle(event, now)]
        assert repr(replayed) == repr(self.script.effects)
        assert pickle.dumps(job) == pickle.dumps(self.script.job)

    def perform(self, happening: Happening) -> None:
        match happening:
            case Deliver():
                for choice in happening.choices:
                    self.deliver(choice)
            case Beat():
                self.beat(happening.seconds)
            case Silence():
                self.script.now += happening.seconds
                self.handle(Tick())
            case Repeat():
                if self.sent:
                    self.handle(self.sent[happening.choice % len(self.sent)])
            case Foreign():
                self._foreign(happening)
            case Stolen():
                self._stolen(happening)
            case Rush():
                for rank in self.script.ranks:
                    batch = BATCH if rank == self.script.first else None
                    call = Call(rank, happening.kind, batch)
                    self.handle(MessageReceived(peer_of(rank), self.script.number, call))
            case Full(-1):
                self.full = happening.times
            case Full():
                if happening.rank < len(self.workers):
                    self.workers[happening.rank].full = happening.times
            case Lose():
                self._lose(happening)
            case CheckpointEnded() if happening.step in self.commits:
                pass  # the service completes it in its turn
            case _:
                self.handle(happening)

    def _lose(self, lose: Lose) -> None:
        rank = lose.rank % len(self.workers)
        worker, number = self.workers[rank], self.script.number
        peer = peer_of(rank)
        joined = peer in self.watch.joined
        if worker.gone or self.watch.ended:
            return
        self.losses += 1
        step = self.watch.updated + 1
        at = Position(Phase.FORWARD, step, 0, lose.layer) if lose.layer >= 0 else Position()
        worker.leave()
        match lose.how:
            case How.RAISED if joined:
                failure = Failure(Cause.TRANSIENT, "no route", position=at)
                self.handle(MessageReceived(peer, number, Failed(rank, failure)))
            case How.CUT_OFF if joined:
                other = (rank + 1) % len(self.workers)
                failure = Failure(Cause.PEER, "a channel closed")
                self.handle(MessageReceived(peer_of(other), number, Failed(other, failure)))
                self.beat(TIMINGS.grace + 0.1)
            case How.SIGNALLED if joined:
                self.handle(MessageReceived(peer, number, Signalled(rank, "SIGTERM")))
                self.beat(TIMINGS.grace + 0.1)
            case How.HUNG:
                pass  # found by its timeout
            case _:
                self.handle(WorkerExited(rank, number, -9, at))

    def _stolen(self, happening: Stolen) -> None:
        """Check that an unknown peer's message is dropped; a member's would end the job."""
        senders = [worker for worker in self.workers if worker.outbox]
        if not senders:
            return
        worker = senders[happening.choice % len(senders)]
        message = worker.outbox[0]
        if worker.rank != happening.rank and not isinstance(message, Hello):
            effects = self.handle(MessageReceived(b"not a member", worker.generation, message))
            assert [type(effect) for effect in effects] == self._dropped

    def _foreign(self, happening: Foreign) -> None:
        """Check that a message of another generation does not change the job's state."""
        number = self.script.number + happening.younger
        events: list[Event] = [WorkerExited(0, number, -9, Position())]
        events += [dataclasses.replace(sent, generation=number) for sent in self.sent]
        before = pickle.dumps(self.script.job)
        effects = self.handle(events[happening.choice % len(events)])
        assert [type(effect) for effect in effects] == self._dropped
        assert pickle.dumps(self.script.job) == before

    @property
    def _dropped(self) -> list[type]:
        """The effects of a message that does not count."""
        return [] if self.watch.ended else [Dropped]
