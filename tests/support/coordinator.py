"""A job, its workers as plain messages, and time by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pipeworker.coordinator.effects import Commit, Effect, Ended, Send, Status
from pipeworker.coordinator.events import Arrived, Committed, Event, Ticked, Uncommitted
from pipeworker.coordinator.job import Job, Start
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.states import State
from pipeworker.errors import AGAIN
from pipeworker.job.options import Options
from pipeworker.plan.orders import Order
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.timings import DEFAULT
from pipeworker.wire.lines import Interrupt, SaveAsked, WorkerExited
from pipeworker.wire.messages.advance import Advance, Finish
from pipeworker.wire.messages.calls import Call, CallKind
from pipeworker.wire.messages.checkpoint import Copy, Save, Saved
from pipeworker.wire.messages.directions import FromWorker, ToWorker
from pipeworker.wire.messages.evaluation import Evaluation, EvaluationDone
from pipeworker.wire.messages.failure import Abort, Cause, Failure
from pipeworker.wire.messages.plan import Built, Described, Plan, Ready
from pipeworker.wire.messages.position import Position
from pipeworker.wire.messages.presence import Hello
from pipeworker.wire.messages.step import Batch, RunStep, StepDone, StepResult, Update

T = TypeVar("T")

LAYERS = ("Linear", "ReLU", "Linear", "Tanh", "Linear")
BATCH = Batch(signature=1, samples=10, microbatches=4, epoch=0)
PATIENCE = 60.0
NOWHERE = Position()
TIMINGS = DEFAULT
_LOSSES = (Cause.LOST, Cause.HUNG, Cause.PEER, Cause.TRANSIENT)
"""After which another start may go on."""
LOOPED = Order(gpipe, lambda workers: Placement.looped(workers, 2))
"""Two stages a worker. Tests register it under a name of their own."""


def commit(step: int, scaler: Scaler | None = None, evaluation: Evaluation | None = None) -> Commit:
    """Of a job of the usual layers."""
    names = tuple(map(str, range(len(LAYERS))))
    return Commit(step, scaler, layers=names, evaluation=evaluation)


def passed(step: int, loss: float = 0.5) -> Evaluation:
    """What an evaluation pass gives."""
    return Evaluation(step, loss, ("accuracy",), (0.75,))


def ready_of(rank: int, plan: Plan, layers: tuple[str, ...], batch: Batch | None) -> Ready:
    """What a worker says when it has built what `plan` asks."""
    built = tuple(Built(r.stage, r.first, layers[r.first : r.stop], 8) for r in plan.ranges)
    return Ready(rank, built, "cpu", batch)


def identity(rank: int) -> bytes:
    """The transport identity of the worker of a rank; of a stranger, where there is no such."""
    return b"w%d" % rank


class Scripted:
    """A job, its workers as plain messages, and everything it ever did.

    Args:
        replaceable, start: as :class:`Job` takes them.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        generation: int = 1,
        layers: tuple[str, ...] = LAYERS,
        replaceable: bool = False,
        start: Start | None = None,
        **options: Any,
    ) -> None:
        options = {"microbatches": 4, "steps": 3, **options}
        self.options = Options("job.py", workers, **options)
        self.layers = layers
        self.now = 100.0
        self._given = {
            "generation": generation,
            "replaceable": replaceable,
            "start": start or Start(),
        }
        self.job = self.begun()
        self.effects: list[Effect] = []

    def begun(self) -> Job:
        """A job as this one was at its beginning."""
        given: Any = self._given
        return Job(self.options, "runs/x", 100.0, timings=TIMINGS, **given)

    @property
    def number(self) -> int:
        """Of the generation."""
        return self.job.generation.number

    @property
    def placement(self) -> Placement:
        return self.job.generation.placement

    @property
    def ranks(self) -> range:
        return range(self.placement.ranks)

    @property
    def first(self) -> int:
        """The rank that holds the first stage."""
        return self.placement.rank_of(0)

    @property
    def last(self) -> int:
        """The rank that holds the last stage."""
        return self.placement.rank_of(self.placement.stages - 1)

    @property
    def firsts(self) -> list[int]:
        """The ranks that hold the first stage of a replica; `lasts`, the last."""
        return self.placement.ranks_of(0)

    @property
    def lasts(self) -> list[int]:
        return self.placement.ranks_of(self.placement.stages - 1)

    def state(self) -> State:
        """A method, for what is true of it now may not be true after the next event."""
        return self.job.generation.state

    # Events.

    def handle(self, event: Event) -> list[Effect]:
        effects = self.job.handle(event, self.now)
        self.effects += effects
        return effects

    def says(self, message: FromWorker, peer: bytes | None = None) -> list[Effect]:
        """A message arrives from the worker whose rank it bears, or from `peer`."""
        sender = identity(message.rank) if peer is None else peer
        return self.handle(Arrived(sender, self.number, message))

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        return self.handle(Ticked())

    def exited(self, rank: int, code: int, position: Position = NOWHERE) -> list[Effect]:
        return self.handle(WorkerExited(rank, self.number, code, position))

    def interrupt(self) -> list[Effect]:
        return self.handle(Interrupt())

    def save_asked(self) -> list[Effect]:
        return self.handle(SaveAsked())

    def committed(self, step: int | None = None) -> list[Effect]:
        """The checkpoint of `step`, or the last that was to be completed, is."""
        step = of(self.effects, Commit)[-1].step if step is None else step
        return self.handle(Committed(step, f"checkpoints/{step}"))

    def uncommitted(self, text: str = "no space left") -> list[Effect]:
        """It cannot be completed."""
        return self.handle(Uncommitted(of(self.effects, Commit)[-1].step, text))

    # A happy life, in pieces.

    def join(self, *ranks: int) -> list[Effect]:
        for rank in ranks or self.ranks:
            effects = self.says(Hello(rank, "host", 1000 + rank))
        return effects

    def describe(self, layers: tuple[str, ...] | None = None) -> list[Effect]:
        for rank in self.ranks:
            effects = self.says(Described(rank, layers or self.layers, ()))
        return effects

    def ready(self, batch: Batch | None = BATCH, unit: str = "") -> list[Effect]:
        """All are; on one accelerator, where there is a `unit`."""
        for rank in self.ranks:
            plan = self.sent(rank, Plan)[-1]
            mine = batch if rank in self.firsts else None
            ready = ready_of(rank, plan, self.layers, mine)
            effects = self.says(dataclasses.replace(ready, unit=unit))
        return effects

    def again(self) -> list[Effect]:
        """Its workers, or those in their places, come as far as the first step."""
        self.join()
        self.describe()
        return self.ready()

    def running(self) -> Scripted:
        self.again()
        assert self.state() is (State.CALLING if self.options.own_loop else State.STEPPING)
        return self

    def done(self, rank: int, step: int, **more: Any) -> list[Effect]:
        """What it was to copy is whole, if `more` does not say otherwise."""
        copied = [copy.step for copy in self.copies(rank)]
        message = StepDone(
            rank,
            step,
            losses=(0.25, 0.5) if rank in self.lasts else (),
            counts=(),
            squares=(1.0,),
            busy=0.5,
            learning_rate=0.1,
            peak_memory=100 * rank + step,
            batch=BATCH if rank in self.firsts else None,
            copied=max(copied, default=-1),
        )
        return self.says(dataclasses.replace(message, **more))

    def step(self, step: int, **more: Any) -> list[Effect]:
        """Every worker is done; returns what the last one's message caused. `more` is for all."""
        for rank in self.ranks:
            effects = self.done(rank, step, **more)
        return effects

    def evaluated(self, step: int, loss: float = 0.5) -> list[Effect]:
        """Every worker has ended an evaluation pass."""
        for rank in self.ranks:
            result = passed(step, loss) if rank == self.last else None
            effects = self.says(EvaluationDone(rank, step, 1000, result))
        return effects

    def called(self, kind: CallKind, *ranks: int, **more: Any) -> list[Effect]:
        """The user's own loop makes a call, on all ranks or on these."""
        for rank in ranks or self.ranks:
            batch = BATCH if kind is CallKind.STEP and rank in self.firsts else None
            effects = self.says(Call(rank, kind, batch, **more))
        return effects

    def saved(self, step: int | None = None, error: str = "") -> list[Effect]:
        """Every worker of the first replica has written its part of `step`, or of what it was
        last told to write."""
        for rank in range(self.placement.workers):
            told = self.told_to_write(rank)[-1] if step is None else step
            effects = self.says(Saved(rank, told, error=error))
        return effects

    # What it did.

    def sent(self, rank: int, kind: type[T]) -> list[T]:
        return [m for m in sent_to(self.effects, rank) if isinstance(m, kind)]

    def runs(self, rank: int) -> list[RunStep]:
        """What it was told to run."""
        return [a.next for a in self.sent(rank, Advance) if isinstance(a.next, RunStep)]

    @property
    def rows(self) -> list[int]:
        """The steps that are recorded."""
        return [row.step for row in of(self.effects, StepResult)]

    def copies(self, rank: int) -> list[Copy]:
        """What it was told to copy, in this generation."""
        sends = of(self.effects, Send)
        mine = [s for s in sends if s.peer == identity(rank) and s.generation == self.number]
        told = [s.message for s in mine if isinstance(s.message, Advance)]
        return [advance.copy for advance in told if advance.copy]

    def told_to_write(self, rank: int) -> list[int]:
        """The steps of the checkpoints it was told to write, beside a step or at once."""
        found = []
        for told in self.sent(rank, Advance):
            found += [told.copy.step] if told.copy and told.copy.save else []
            found += [told.next.step] if isinstance(told.next, Save) else []
        return found

    @property
    def ended(self) -> Ended:
        (ended,) = of(self.effects, Ended)
        return ended

    @property
    def failure(self) -> Failure:
        """Of a job that failed: told once, to everyone who joined."""
        assert self.ended.status is Status.FAILED
        assert self.ended.failure
        assert self.state() is State.OVER
        aborted = [s for s in of(self.effects, Send) if isinstance(s.message, Abort)]
        assert [s.peer for s in aborted] == self.job.peers
        for message in (s.message for s in aborted):
            assert isinstance(message, Abort)
            lost = self.ended.failure is not None and self.ended.failure.cause in _LOSSES
            assert message.exit_status == (AGAIN if lost else self.ended.exit_status)
            assert message.reason.startswith(self.ended.failure.message)
        return self.ended.failure


def own(workers: int = 2, **options: Any) -> Scripted:
    """With a loop of the user's own, before its first call."""
    return Scripted(workers, own_loop=True, steps=None, **options).running()


def replaced(workers: int = 2, **options: Any) -> Scripted:
    """With workers that are replaced when they are lost, and copy their state at every step."""
    options = {"steps": 9, "snapshot_every": 1, **options}
    return Scripted(workers, replaceable=True, **options)


def of(effects: list[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent_to(effects: list[Effect], rank: int) -> list[ToWorker]:
    return [effect.message for effect in of(effects, Send) if effect.peer == identity(rank)]


def of_messages(effects: list[Effect], kind: type[T]) -> list[T]:
    return [m for m in (s.message for s in of(effects, Send)) if isinstance(m, kind)]


def runs(effects: list[Effect]) -> list[RunStep]:
    """What workers are told to run, in the order they are told."""
    return [a.next for a in of_messages(effects, Advance) if isinstance(a.next, RunStep)]


def saves(effects: list[Effect]) -> list[Advance]:
    """Those by which workers are told to write a checkpoint before anything else is done."""
    return [a for a in of_messages(effects, Advance) if isinstance(a.next, Save)]


def copies(effects: list[Effect]) -> list[Copy]:
    """What workers are told to copy while they run a step, in the order they are told."""
    return [a.copy for a in of_messages(effects, Advance) if a.copy]


def updates(effects: list[Effect]) -> list[Update]:
    """What the workers are told to apply, in the order they are told."""
    return [a.update for a in of_messages(effects, Advance) if isinstance(a.update, Update)]


def ends(effects: list[Effect]) -> list[Send]:
    """Who is told that it is over."""
    return [
        send
        for send in of(effects, Send)
        if isinstance(send.message, Abort)
        or (isinstance(send.message, Advance) and isinstance(send.message.next, Finish))
    ]
