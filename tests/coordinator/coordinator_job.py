"""A machine, its workers as plain messages, and time by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pipeworker.coordinator.effects import (
    Effect,
    Ended,
    Send,
    Status,
)
from pipeworker.coordinator.machine import Machine, State
from pipeworker.coordinator.roster import Exited
from pipeworker.job.options import Options
from pipeworker.wire.messages import (
    Batch,
    Described,
    Evaluation,
    EvaluationDone,
    Failure,
    Finish,
    FromWorker,
    Hello,
    Position,
    Ready,
    Saved,
    StepDone,
    ToWorker,
)

T = TypeVar("T")

LAYERS = ("Linear", "ReLU", "Linear", "Tanh", "Linear")
BATCH = Batch(signature=1, samples=10, microbatches=4, epoch=0)
PATIENCE = 60.0
NOWHERE = Position()


class Job:
    """A machine, its workers as plain messages, and everything it ever did."""

    def __init__(self, stages: int = 2, **options: Any) -> None:
        options = {"microbatches": 4, "steps": 3, **options}
        self.options = Options("job.py", stages, **options)
        self.stages = stages
        self.now = 100.0
        self.machine = Machine(self.options, "runs/x", self.now)
        self.effects: list[Effect] = []

    def did(self, effects: list[Effect]) -> list[Effect]:
        self.effects += effects
        return effects

    def says(self, message: FromWorker, peer: bytes | None = None) -> list[Effect]:
        """A message arrives from the worker whose rank it bears, or from `peer`."""
        sender = b"w%d" % message.rank if peer is None else peer
        return self.did(self.machine.received(sender, message, self.now))

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        return self.did(self.machine.tick(self.now))

    def exited(self, rank: int, code: int, position: Position = NOWHERE) -> list[Effect]:
        return self.did(self.machine.exited(Exited(rank, code, position), self.now))

    def interrupt(self) -> list[Effect]:
        return self.did(self.machine.interrupt(self.now))

    # A happy life, in pieces.

    def join(self, *ranks: int) -> list[Effect]:
        for rank in ranks or range(self.stages):
            effects = self.says(Hello(rank, "host", 1000 + rank))
        return effects

    def describe(self, layers: tuple[str, ...] = LAYERS) -> list[Effect]:
        for rank in range(self.stages):
            effects = self.says(Described(rank, layers, ()))
        return effects

    def ready(self, batch: Batch | None = BATCH) -> list[Effect]:
        for rank in range(self.stages):
            message = Ready(rank, ("Linear", "ReLU"), 8, "cpu", batch if rank == 0 else None)
            effects = self.says(message)
        return effects

    def running(self) -> Job:
        self.join()
        self.describe()
        self.ready()
        assert self.machine.state is State.RUNNING
        return self

    def done(self, rank: int, step: int, **more: Any) -> list[Effect]:
        last = rank == self.stages - 1
        message = StepDone(
            rank,
            step,
            losses=(0.25, 0.5) if last else (),
            counts=(),
            squares=(1.0,),
            busy=0.5,
            learning_rate=0.1,
            peak_memory=100 * rank + step,
            batch=BATCH if rank == 0 else None,
        )
        return self.says(dataclasses.replace(message, **more))

    def step(self, step: int, **more: Any) -> list[Effect]:
        """Every stage is done; returns what the last one's message caused. `more` is for all."""
        for rank in range(self.stages):
            effects = self.done(rank, step, **more)
        return effects

    def saved(self) -> list[Effect]:
        for rank in range(self.stages):
            effects = self.says(Saved(rank, 3))
        return effects

    # What it did.

    def sent(self, rank: int, kind: type[T]) -> list[T]:
        return [m for m in sent_to(self.effects, rank) if isinstance(m, kind)]

    @property
    def ended(self) -> Ended:
        (ended,) = of(self.effects, Ended)
        return ended

    @property
    def failure(self) -> Failure:
        """Of a job that failed: told once, to everyone who joined."""
        assert self.ended.status is Status.FAILED
        assert self.ended.failure
        assert self.machine.state is State.ENDED
        finished = [s for s in of(self.effects, Send) if isinstance(s.message, Finish)]
        assert [s.peer for s in finished] == self.machine.peers
        for message in (s.message for s in finished):
            assert isinstance(message, Finish)
            assert message.exit_status == self.ended.exit_status
            assert message.reason.startswith(self.ended.failure.message)
        return self.ended.failure


def of(effects: list[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent_to(effects: list[Effect], rank: int) -> list[ToWorker]:
    return [effect.message for effect in of(effects, Send) if effect.peer == b"w%d" % rank]


def of_messages(effects: list[Effect], kind: type[T]) -> list[T]:
    return [m for m in (s.message for s in of(effects, Send)) if isinstance(m, kind)]


def evaluation(job: Job, step: int, loss: float = 0.5) -> list[Effect]:
    for rank in range(job.stages):
        result = Evaluation(step, loss, ("accuracy",), (0.75,))
        last = rank == job.stages - 1
        effects = job.says(EvaluationDone(rank, step, 1000, result if last else None))
    return effects
