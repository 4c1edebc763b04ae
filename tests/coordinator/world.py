"""A job, workers that follow it, and whatever else happens: recorded and watched."""

from __future__ import annotations

import dataclasses
import pickle
from collections import deque
from collections.abc import Callable
from functools import partial

from coordinator.follower import Follower, Memory
from coordinator.lives import (
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
    Rush,
    Silence,
    Stolen,
)
from coordinator.lives import Again as SaidAgain
from coordinator.watch import Watch
from pipeworker.coordinator.effects import Commit, Dropped, Effect, Send
from pipeworker.coordinator.events import Arrived, Committed, Event, Ticked, Uncommitted
from pipeworker.wire.lines import Again, Snapshot, WorkerExited
from pipeworker.wire.messages.calls import Call
from pipeworker.wire.messages.checkpoint import Restore
from pipeworker.wire.messages.failure import Cause, Failed, Failure, Signalled
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.wire.messages.presence import Heartbeat, Hello, Welcome
from support.coordinator import BATCH, TIMINGS, Scripted, identity

_MOST = 5000
"""Turns within which a job comes to its end."""


class World:
    """See the module.

    Args:
        strict: workers are themselves; not, where others speak in their names.

    Attributes:
        memories: by rank; they outlive the workers.
        full: so many checkpoints cannot be completed.
        losses: how many workers were lost so far.
    """

    def __init__(self, life: Life, *, strict: bool = True) -> None:
        self._strict = strict
        self.life = life
        self.script = Scripted(
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
        self.said: list[Arrived] = []
        self.late: deque[Arrived] = deque()
        self.events: list[tuple[Event, float]] = []
        self.full = 0
        self.losses = 0
        self._begin()

    def _begin(self) -> None:
        self.workers = [
            Follower(self.script, rank, self.life, self.memories[rank], strict=self._strict)
            for rank in self.script.ranks
        ]

    def happens(self, event: Event) -> list[Effect]:
        self.events.append((event, self.script.now))
        self.watch.before(event)
        effects = self.script.handle(event)
        self.watch.after(effects, len(self.script.ranks))
        for effect in effects:
            match effect:
                case Commit():
                    self.commits.append(effect.step)
                case Send(peer, message, _):
                    if isinstance(message, Welcome) and message.restore:
                        self._is_there(message.restore)
                    for worker in self.workers:
                        if peer == identity(worker.rank):
                            worker.hears(message)
                case Snapshot(step, slot, ranks):
                    self._is_there(Restore(step, slot=slot, ranks=ranks))
                case Again():
                    self._replace()
        return effects

    def _is_there(self, restore: Restore) -> None:
        """What is gone back to is whole: on disk, or in the memories of all who left it."""
        if not self._strict:
            return
        if restore.path:
            assert restore.step in self.complete
            assert restore.path == f"checkpoints/{restore.step}"
            return
        held = [memory.get(restore.slot) for memory in self.memories[: restore.ranks]]
        assert held == [restore.step] * restore.ranks

    def _replace(self) -> None:
        """What the old workers had under way may still arrive."""
        for worker in self.workers:
            said = [Arrived(identity(worker.rank), worker.generation, m) for m in worker.outbox]
            self.late.extend(said)
        self._begin()

    def deliver(self, choice: int) -> bool:
        """One of those who have something to do or to say: a worker, its disk, or the shell."""
        turns: list[Callable[[], object]] = []
        for worker in self.workers:
            turns += [partial(self._speak, worker)] if worker.outbox else []
            turns += [worker.write] if worker.writes else []
        turns += [self._commit] if self.commits else []
        turns += [lambda: self.happens(self.late.popleft())] if self.late else []
        if not turns:
            return False
        turns[choice % len(turns)]()
        return True

    def _speak(self, worker: Follower) -> None:
        said = Arrived(identity(worker.rank), worker.generation, worker.outbox.popleft())
        self.said.append(said)
        self.happens(said)

    def _commit(self) -> None:
        step = self.commits.popleft()
        if self.full:
            self.full -= 1
            self.happens(Uncommitted(step, "no space left"))
        else:
            self.complete.add(step)
            self.happens(Committed(step, f"checkpoints/{step}"))

    def finish(self, order: list[int]) -> None:
        """All goes on until nobody has anything to say; who is silent is found out."""
        for turn in range(_MOST):
            if not self.deliver(order[turn % len(order)]):
                if self.watch.ended or not self.life.replaceable:
                    return
                self.beat(20.0)
        raise AssertionError("it does not come to its end")

    def beat(self, seconds: float) -> None:
        """Time passes, and whoever has joined and is there is alive."""
        self.script.now += seconds
        for worker in self.workers:
            peer = identity(worker.rank)
            if peer in self.watch.joined and not worker.gone:
                beat = Heartbeat(worker.rank, Position())
                self.happens(Arrived(peer, worker.generation, beat))
        self.happens(Ticked())

    def silence(self) -> None:
        """Nothing but ticks, until all have been given up."""
        for _ in range(60):
            self.script.now += 40.0
            self.happens(Ticked())

    def check_replay(self) -> None:
        """The same events give the same effects."""
        job = self.script.begun()
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
                self.happens(Ticked())
            case SaidAgain():
                if self.said:
                    self.happens(self.said[happening.choice % len(self.said)])
            case Foreign():
                self._foreign(happening)
            case Stolen():
                self._stolen(happening)
            case Rush():
                for rank in self.script.ranks:
                    batch = BATCH if rank == self.script.first else None
                    call = Call(rank, happening.kind, batch)
                    self.happens(Arrived(identity(rank), self.script.number, call))
            case Full(-1):
                self.full = happening.times
            case Full():
                if happening.rank < len(self.workers):
                    self.workers[happening.rank].full = happening.times
            case Lose():
                self._lose(happening)
            case Committed() if happening.step in self.commits:
                pass  # the shell completes what it was asked for when it is its turn
            case _:
                self.happens(happening)

    def _lose(self, lose: Lose) -> None:
        rank = lose.rank % len(self.workers)
        worker, number = self.workers[rank], self.script.number
        peer = identity(rank)
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
                self.happens(Arrived(peer, number, Failed(rank, failure)))
            case How.CUT_OFF if joined:
                other = (rank + 1) % len(self.workers)
                failure = Failure(Cause.PEER, "a channel closed")
                self.happens(Arrived(identity(other), number, Failed(other, failure)))
                self.beat(TIMINGS.echo + 0.1)
            case How.SIGNALLED if joined:
                self.happens(Arrived(peer, number, Signalled(rank, "SIGTERM")))
                self.beat(TIMINGS.echo + 0.1)
            case How.HUNG:
                pass  # time shows it
            case _:
                self.happens(WorkerExited(rank, number, -9, at))

    def _stolen(self, happening: Stolen) -> None:
        """Nobody else speaks for a worker. (A member that does ends the job: it lies.)"""
        speakers = [worker for worker in self.workers if worker.outbox]
        if not speakers:
            return
        worker = speakers[happening.choice % len(speakers)]
        message = worker.outbox[0]
        if worker.rank != happening.rank and not isinstance(message, Hello):
            effects = self.happens(Arrived(b"not a member", worker.generation, message))
            assert [type(effect) for effect in effects] == self._dropped

    def _foreign(self, happening: Foreign) -> None:
        """A message of another generation changes nothing: the whole state is as it was."""
        number = self.script.number + happening.younger
        events: list[Event] = [WorkerExited(0, number, -9, Position())]
        events += [dataclasses.replace(said, generation=number) for said in self.said]
        before = pickle.dumps(self.script.job)
        effects = self.happens(events[happening.choice % len(events)])
        assert [type(effect) for effect in effects] == self._dropped
        assert pickle.dumps(self.script.job) == before

    @property
    def _dropped(self) -> list[type]:
        """What is done with what does not count."""
        return [] if self.watch.ended else [Dropped]
