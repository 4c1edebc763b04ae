"""The coordinator under generated events: the protocol, and all that goes wrong.

What must hold is written down once, in `Watch`, and looked at after every event.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.lives import (
    ASKED,
    FATAL,
    HARMLESS,
    LAYERS,
    NUMBER,
    ODD,
    Again,
    Beat,
    Deliver,
    Foreign,
    Happening,
    Life,
    Rush,
    Silence,
    Stolen,
    lives,
    often,
)
from pipeworker.coordinator.effects import Commit, Dropped, Effect, Ended, Send, Status
from pipeworker.coordinator.events import (
    Arrived,
    Committed,
    Event,
    SaveAsked,
    Ticked,
)
from pipeworker.coordinator.job import Job
from pipeworker.coordinator.states import State
from pipeworker.plan.orders import ORDERS
from pipeworker.wire.lines import WorkerExited
from pipeworker.wire.messages import (
    Advance,
    Call,
    CallKind,
    Evaluate,
    Evaluation,
    Finish,
    Heartbeat,
    Hello,
    Position,
    RunStep,
    Save,
    Saved,
    StepDone,
    StepResult,
    Update,
    Welcome,
)
from support.coordinator import BATCH, LOOPED, TIMINGS, Scripted, Worker, ends, identity, of


@pytest.fixture(autouse=True, scope="module")
def looped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ORDERS, "looped", LOOPED)
        yield


@dataclass
class Watch:
    """What has been done so far, and what may be done next."""

    ranks: frozenset[int]
    joined: dict[bytes, int] = field(default_factory=dict)
    hello: int = -1
    running: RunStep | None = None
    done: set[int] = field(default_factory=set)
    rows: int = 0
    updated: int = 0
    saving: int | None = None
    saved: set[int] = field(default_factory=set)
    ended: bool = False

    def before(self, event: Event) -> None:
        """What a worker says for itself, in this generation."""
        if not isinstance(event, Arrived) or event.generation != NUMBER:
            return
        message = event.message
        if isinstance(message, Hello):
            self.hello = message.rank
        elif self.joined.get(event.peer) == message.rank:
            match message:
                case StepDone() if self.running and message.step == self.running.step:
                    self.done.add(message.rank)
                case Saved() if message.step == self.saving:
                    self.saved.add(message.rank)

    def after(self, effects: list[Effect]) -> None:
        assert not (self.ended and effects)
        for row in of(effects, StepResult):
            assert row.step == self.rows + 1  # each once, in order
            assert self.done == self.ranks
            self.rows = row.step
        self._advances(effects)
        for effect in effects:
            match effect:
                case Send(peer, Welcome(), _):
                    assert peer not in self.joined
                    self.joined[peer] = self.hello
                case Commit():
                    assert effect.step == self.saving
                    assert self.saved == self.ranks
                    self.saving = None
        assert {send.generation for send in of(effects, Send)} <= {NUMBER}
        verdicts = of(effects, Ended)
        told = sorted(send.peer for send in ends(effects) if send.peer in self.joined)
        assert told == (sorted(self.joined) if verdicts else [])
        if verdicts:
            assert effects[-1:] == verdicts
            assert verdicts[0].steps == self.rows
            self.ended = True
        else:
            assert self.rows == self.updated

    def _advances(self, effects: list[Effect]) -> None:
        """All are told the same, or nobody is told anything."""
        sends = [s for s in of(effects, Send) if isinstance(s.message, Advance)]
        told = [s.message for s in sends if isinstance(s.message, Advance)]
        if not told or isinstance(told[0].next, Finish):
            return
        assert [self.joined[send.peer] for send in sends] == sorted(self.ranks)
        following, update = told[0].next, told[0].update
        assert all(advance.update == update for advance in told)
        if isinstance(following, RunStep):
            told = [
                dataclasses.replace(a, next=dataclasses.replace(a.next, actions=""))
                for a in told
                if isinstance(a.next, RunStep)
            ]
        assert len(told) == len(self.ranks)
        assert all(advance == told[0] for advance in told)
        if isinstance(update, Update):
            assert update.step == self.updated + 1
            assert self.running
            assert update.step == self.running.step
            assert self.done == self.ranks
            assert [row.step for row in of(effects, StepResult)] == [update.step]
            self.updated = update.step
        if isinstance(following, RunStep):
            assert following.step == self.updated + 1
            assert self.running is None or self.done == self.ranks
            self.running, self.done = following, set()
        elif isinstance(following, Evaluate | Save):
            assert following.step == self.updated
            if isinstance(following, Save):
                self.saving, self.saved = following.step, set()


class World:
    """A job and its workers; every event is recorded and watched."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.script = Scripted(life.workers, generation=NUMBER, layers=LAYERS, **life.options)
        ranks = self.script.ranks
        self.workers = [Worker(self.script, rank, life.data, life.calls) for rank in ranks]
        self.watch = Watch(frozenset(ranks))
        self.commits: list[Commit] = []
        self.said: list[Arrived] = []
        self.events: list[tuple[Event, float]] = []

    def happens(self, event: Event) -> list[Effect]:
        self.events.append((event, self.script.now))
        self.watch.before(event)
        effects = self.script.handle(event)
        self.watch.after(effects)
        self.commits += of(effects, Commit)
        for send in of(effects, Send):
            for worker in self.workers:
                if send.peer == identity(worker.rank):
                    worker.hears(send.message)
        return effects

    def deliver(self, choice: int) -> bool:
        """One of those who have something to say says it: a worker, or the shell."""
        speakers = [worker for worker in self.workers if worker.outbox]
        if not speakers and not self.commits:
            return False
        chosen = choice % (len(speakers) + bool(self.commits))
        if chosen == len(speakers):
            self.happens(Committed(self.commits.pop(0).step))
        else:
            worker = speakers[chosen]
            said = Arrived(identity(worker.rank), NUMBER, worker.outbox.popleft())
            self.said.append(said)
            self.happens(said)
        return True

    def beat(self, seconds: float) -> None:
        """Time passes, and whoever has joined is alive."""
        self.script.now += seconds
        for peer, rank in self.watch.joined.items():
            self.happens(Arrived(peer, NUMBER, Heartbeat(rank, Position())))
        self.happens(Ticked())

    def silence(self) -> None:
        """Nothing but ticks, for ten minutes."""
        for _ in range(60):
            self.script.now += 10.0
            self.happens(Ticked())

    def check_replay(self) -> None:
        """The same events give the same effects."""
        last = self.script
        job = Job(last.options, "runs/x", 100.0, timings=TIMINGS, generation=NUMBER)
        replayed = [effect for event, now in self.events for effect in job.handle(event, now)]
        assert repr(replayed) == repr(last.effects)
        assert pickle.dumps(job) == pickle.dumps(last.job)


def perform(world: World, happening: Happening) -> None:
    match happening:
        case Deliver():
            for choice in happening.choices:
                world.deliver(choice)
        case Beat():
            world.beat(happening.seconds)
        case Silence():
            world.script.now += happening.seconds
            world.happens(Ticked())
        case Again():
            if world.said:
                world.happens(world.said[happening.choice % len(world.said)])
        case Foreign():
            foreign(world, happening)
        case Stolen():
            stolen(world, happening)
        case Rush():
            for rank in world.script.ranks:
                batch = BATCH if rank == world.script.first else None
                call = Call(rank, happening.kind, batch)
                world.happens(Arrived(identity(rank), NUMBER, call))
        case Committed() if world.script.state() is State.COMMITTING:
            pass  # the shell completes what it was asked for, and nothing else
        case _:
            world.happens(happening)


def stolen(world: World, happening: Stolen) -> None:
    """Nobody else speaks for a worker. (A member that does ends the job: it lies.)"""
    speakers = [worker for worker in world.workers if worker.outbox]
    if not speakers:
        return
    worker = speakers[happening.choice % len(speakers)]
    message = worker.outbox[0]
    if worker.rank != happening.rank and not isinstance(message, Hello):
        effects = world.happens(Arrived(b"not a member", NUMBER, message))
        assert [type(effect) for effect in effects] == ([] if world.watch.ended else [Dropped])


def foreign(world: World, happening: Foreign) -> None:
    """A message of another generation changes nothing: the whole state is as it was."""
    events: list[Event] = [WorkerExited(0, happening.number, -9, Position())]
    events += [dataclasses.replace(said, generation=happening.number) for said in world.said]
    before = pickle.dumps(world.script.job)
    effects = world.happens(events[happening.choice % len(events)])
    assert [type(effect) for effect in effects] == ([] if world.watch.ended else [Dropped])
    assert pickle.dumps(world.script.job) == before


@settings(max_examples=300, deadline=None)
@given(lives(), often(HARMLESS, ASKED, ODD, FATAL))
def test_whatever_happens(life: Life, happenings: list[Happening]) -> None:
    world = World(life)
    for happening in happenings:
        perform(world, happening)
    world.silence()
    assert world.watch.ended
    assert world.script.job.over
    world.check_replay()


@settings(max_examples=150, deadline=None)
@given(lives(), often(HARMLESS, ASKED), st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_without_a_fault_every_step_is_done(
    life: Life, happenings: list[Happening], order: list[int]
) -> None:
    """In whatever order workers speak, whatever strangers say, however often it is saved."""
    world = World(life)
    for happening in happenings:
        perform(world, happening)
    finish(world, order)
    script = world.script
    assert (script.ended.status, script.ended.steps) == (Status.DONE, life.steps)
    assert [row.step for row in of(script.effects, StepResult)] == [*range(1, life.steps + 1)]
    assert of(script.effects, Commit)[-1].step == life.steps
    assert world.watch.updated == life.steps
    for worker in world.workers:
        assert worker.heard[-1] == Advance(Finish())
    world.check_replay()


def finish(world: World, order: list[int]) -> None:
    turn = 0
    while world.deliver(order[turn % len(order)]):
        turn += 1


@settings(max_examples=50, deadline=None)
@given(lives(accumulate=1).filter(lambda life: not life.calls), st.data())
def test_what_is_said_twice_counts_once(life: Life, data: st.DataObject) -> None:
    """Where a message names its step: a repeated call, or mini-batch of a step, has no number."""
    world = World(life)
    while world.deliver(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            perform(world, Again(data.draw(st.integers(0, 99))))
    assert (world.script.ended.status, world.script.ended.steps) == (Status.DONE, life.steps)
    assert len(of(world.script.effects, Evaluation)) == evaluations(life)


def evaluations(life: Life) -> int:
    every = life.options["evaluate_every"]
    assert isinstance(every, int | None)
    return life.steps // every if every else 0


@settings(max_examples=150, deadline=None)
@given(lives(), st.integers(0, 60), st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_a_checkpoint_changes_nothing_but_that_it_is_there(
    life: Life, moment: int, order: list[int]
) -> None:
    plain, asked = World(life), World(life)
    finish(plain, order)
    for turn in range(moment):
        asked.deliver(order[turn % len(order)])
    before, over = asked.watch.rows, asked.watch.ended
    last = asked.script.state() in (State.SAVING, State.COMMITTING)  # nothing comes after it
    asked.happens(SaveAsked())
    finish(asked, order)
    for rank in asked.script.ranks:
        assert asked.script.runs(rank) == plain.script.runs(rank)
    for kind in (StepResult, Evaluation, Ended):
        assert of(asked.script.effects, kind) == of(plain.script.effects, kind)
    (final,) = of(plain.script.effects, Commit)
    *more, end = of(asked.script.effects, Commit)
    assert end == final
    assert [commit.step for commit in more] in ([], [before], [before + 1])
    if not more:  # the last one is the one that was asked for
        assert over or last or final.step - before <= 1


@settings(max_examples=100, deadline=None)
@given(
    lives().filter(lambda life: len(life.calls) > 1),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(CallKind)), max_size=12),
)
def test_a_call_out_of_turn_does_not_leave_a_step_half_done(
    life: Life, rushes: list[tuple[int, CallKind]]
) -> None:
    world = World(life)
    for turns, kind in rushes:
        for turn in range(turns):
            world.deliver(turn)
        perform(world, Rush(kind))
    world.silence()
    assert world.watch.ended
