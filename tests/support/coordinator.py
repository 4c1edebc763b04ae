"""A job, its workers as plain messages, and time by hand."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from pipeworker.coordinator.effects import Commit, Effect, Ended, Send, Status
from pipeworker.coordinator.events import Arrived, Committed, Event, SaveAsked, Ticked
from pipeworker.coordinator.job import Job
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.states import State
from pipeworker.job.options import Options
from pipeworker.plan.orders import Order
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.timings import DEFAULT
from pipeworker.wire.lines import Interrupt, WorkerExited
from pipeworker.wire.messages import (
    Abort,
    Advance,
    Batch,
    Built,
    Call,
    CallKind,
    Described,
    Evaluate,
    Evaluation,
    EvaluationDone,
    Failure,
    Finish,
    FromWorker,
    Hello,
    Plan,
    Position,
    Ready,
    RunStep,
    Save,
    Saved,
    StepDone,
    ToWorker,
    Upcoming,
    Update,
    Wait,
    Welcome,
)

T = TypeVar("T")

LAYERS = ("Linear", "ReLU", "Linear", "Tanh", "Linear")
BATCH = Batch(signature=1, samples=10, microbatches=4, epoch=0)
PATIENCE = 60.0
NOWHERE = Position()
TIMINGS = DEFAULT
LOOPED = Order(gpipe, lambda workers: Placement.looped(workers, 2))
"""Two stages a worker. Tests register it under a name of their own."""


def commit(step: int, scaler: Scaler | None = None) -> Commit:
    """Of a job of the usual layers."""
    return Commit(step, scaler, layers=tuple(map(str, range(len(LAYERS)))))


def ready_of(rank: int, plan: Plan, layers: tuple[str, ...], batch: Batch | None) -> Ready:
    """What a worker says when it has built what `plan` asks."""
    built = tuple(Built(r.stage, r.first, layers[r.first : r.stop], 8) for r in plan.ranges)
    return Ready(rank, built, "cpu", batch)


def identity(rank: int) -> bytes:
    """The transport identity of the worker of a rank; of a stranger, where there is no such."""
    return b"w%d" % rank


class Scripted:
    """A job, its workers as plain messages, and everything it ever did."""

    def __init__(
        self,
        workers: int = 2,
        *,
        generation: int = 1,
        layers: tuple[str, ...] = LAYERS,
        **options: Any,
    ) -> None:
        options = {"microbatches": 4, "steps": 3, **options}
        self.options = Options("job.py", workers, **options)
        self.number = generation
        self.layers = layers
        self.now = 100.0
        self.job = Job(self.options, "runs/x", self.now, timings=TIMINGS, generation=generation)
        self.placement = self.job.placement
        self.ranks = range(self.placement.ranks)
        self.first = self.placement.rank_of(0)
        self.last = self.placement.rank_of(self.placement.stages - 1)
        self.effects: list[Effect] = []

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
        return self.handle(Committed(self.job.progress.steps if step is None else step))

    # A happy life, in pieces.

    def join(self, *ranks: int) -> list[Effect]:
        for rank in ranks or self.ranks:
            effects = self.says(Hello(rank, "host", 1000 + rank))
        return effects

    def describe(self, layers: tuple[str, ...] | None = None) -> list[Effect]:
        for rank in self.ranks:
            effects = self.says(Described(rank, layers or self.layers, ()))
        return effects

    def ready(self, batch: Batch | None = BATCH) -> list[Effect]:
        for rank in self.ranks:
            (plan,) = self.sent(rank, Plan)
            mine = batch if rank == self.first else None
            effects = self.says(ready_of(rank, plan, self.layers, mine))
        return effects

    def running(self) -> Scripted:
        self.join()
        self.describe()
        self.ready()
        assert self.state() is (State.CALLING if self.options.own_loop else State.STEPPING)
        return self

    def done(self, rank: int, step: int, **more: Any) -> list[Effect]:
        message = StepDone(
            rank,
            step,
            losses=(0.25, 0.5) if rank == self.last else (),
            counts=(),
            squares=(1.0,),
            busy=0.5,
            learning_rate=0.1,
            peak_memory=100 * rank + step,
            batch=BATCH if rank == self.first else None,
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
            result = Evaluation(step, loss, ("accuracy",), (0.75,))
            last = rank == self.last
            effects = self.says(EvaluationDone(rank, step, 1000, result if last else None))
        return effects

    def called(self, kind: CallKind, *ranks: int, **more: Any) -> list[Effect]:
        """The user's own loop makes a call, on all ranks or on these."""
        for rank in ranks or self.ranks:
            batch = BATCH if kind is CallKind.STEP and rank == self.first else None
            effects = self.says(Call(rank, kind, batch, **more))
        return effects

    def saved(self, step: int | None = None) -> list[Effect]:
        for rank in self.ranks:
            effects = self.says(Saved(rank, self.job.progress.steps if step is None else step))
        return effects

    # What it did.

    def sent(self, rank: int, kind: type[T]) -> list[T]:
        return [m for m in sent_to(self.effects, rank) if isinstance(m, kind)]

    def runs(self, rank: int) -> list[RunStep]:
        """What it was told to run."""
        return [a.next for a in self.sent(rank, Advance) if isinstance(a.next, RunStep)]

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
            assert message.exit_status == self.ended.exit_status
            assert message.reason.startswith(self.ended.failure.message)
        return self.ended.failure


class Worker:
    """One that follows the protocol: what it hears makes it say things, in `outbox`.

    Args:
        data: of a job file, its mini-batches, of which the worker with stage 0 tells.
        calls: of the user's own loop.
    """

    def __init__(
        self, script: Scripted, rank: int, data: Sequence[Batch], calls: Sequence[Call]
    ) -> None:
        self.script = script
        self.rank = rank
        self.outbox: deque[FromWorker] = deque([Hello(rank, "host", 1000 + rank)])
        self.heard: list[ToWorker] = []
        self._data = iter(data if rank == script.first else ())
        self._calls = iter(calls)
        self._call: Call | None = None

    def hears(self, message: ToWorker) -> None:
        self.heard.append(message)
        script, rank = self.script, self.rank
        match message:
            case Welcome():
                self._say(Described(rank, script.layers, ()))
            case Plan():
                self._say(ready_of(rank, message, script.layers, next(self._data, None)))
            case Advance(RunStep() as run):
                self._run(run)
            case Advance(Evaluate(step)):
                result = Evaluation(step, 0.5) if rank == script.last else None
                if self._call and self._call.kind is CallKind.PREDICT:
                    self._make_call()
                else:
                    self._say(EvaluationDone(rank, step, 1000, result))
            case Advance(Save(step)):
                self._say(Saved(rank, step))
            case Advance(Wait()):
                self._make_call()
            case Advance(Finish()) | Abort():
                self.outbox.clear()

    def _run(self, run: RunStep) -> None:
        batch = None if run.last else next(self._data, None)
        if batch is not None and batch.microbatches != run.batch.microbatches:
            self._say(Upcoming(self.rank, batch.microbatches))
        losses = (0.25 * run.step, 0.5) if self.rank == self.script.last else ()
        squares = (float(self.rank + run.step),)
        self._say(StepDone(self.rank, run.step, losses, (), squares, 0.5, 0.1, run.step, batch))
        if self._call and not self._call.last:
            self._make_call()

    def _make_call(self) -> None:
        self._call = next(self._calls, None)
        if self._call is None:  # others called what was not in the script
            return
        batch = self._call.batch if self.rank == self.script.first else None
        self._say(dataclasses.replace(self._call, rank=self.rank, batch=batch))

    def _say(self, message: FromWorker) -> None:
        self.outbox.append(message)


def own(workers: int = 2, **options: Any) -> Scripted:
    """With a loop of the user's own, before its first call."""
    return Scripted(workers, own_loop=True, steps=None, **options).running()


def of(effects: list[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent_to(effects: list[Effect], rank: int) -> list[ToWorker]:
    return [effect.message for effect in of(effects, Send) if effect.peer == identity(rank)]


def of_messages(effects: list[Effect], kind: type[T]) -> list[T]:
    return [m for m in (s.message for s in of(effects, Send)) if isinstance(m, kind)]


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
