"""A scripted job: its workers are plain messages, and its time is set by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pipeworker.coordinator.effects import Commit, Effect, JobState, MakePlan, Send
from pipeworker.coordinator.events import (
    CheckpointEnded,
    Event,
    MessageReceived,
    Tick,
)
from pipeworker.coordinator.job import Job
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.service import make_plan
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.errors import AGAIN
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.outline import LayerKind, Machine, Outline
from pipeworker.facts.position import Position
from pipeworker.facts.step import Batch, Evaluation, StepResult
from pipeworker.job.options import Options
from pipeworker.plan.orders import Order
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.timings import DEFAULT
from pipeworker.wire.lines import Interrupt, SaveRequest, Verdict, WorkerExited
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.directions import Advance, Finish, FromWorker, ToWorker
from pipeworker.wire.messages.plan import Built, Described, Plan, Ready
from pipeworker.wire.messages.presence import Abort, Hello, Welcome
from pipeworker.wire.messages.step import (
    Call,
    CallKind,
    EvaluationDone,
    RunStep,
    StepDone,
    Update,
    Wait,
)

T = TypeVar("T")

LAYERS = ("Linear", "ReLU", "Linear", "Tanh", "Linear")
BATCH = Batch(signature=1, samples=10, microbatches=4, epoch=0)
PATIENCE = 60.0
NOWHERE = Position()
TIMINGS = DEFAULT
_LOSSES = (Cause.LOST, Cause.HUNG, Cause.PEER, Cause.TRANSIENT)
"""Causes after which a job may restart."""
MACHINE = Machine("a processor", "", 3000, 50)
OUTLINE = Outline(
    (LayerKind("kind 0", 0, b""), LayerKind("kind 1", 1, b""), LayerKind("kind 2", 5, b"")),
    (0, 1, 1, 1, 1),
    loss=2,
)
"""The outline of the usual layers, if facts are wanted."""
LOOPED = Order("looped", gpipe, virtual_stages=2)
"""An order with two stages per worker, which tests register under a name."""


def commit(
    step: int, scaler: LossScaler | None = None, evaluation: Evaluation | None = None
) -> Commit:
    """Return the Commit of a job of the usual layers."""
    names = tuple(map(str, range(len(LAYERS))))
    return Commit(JobState(step, scaler, evaluation), layers=names)


def evaluation_of(step: int, loss: float = 0.5) -> Evaluation:
    """Return the result of an evaluation pass."""
    return Evaluation(step, loss, ("accuracy",), (0.75,))


def ready_of(rank: int, plan: Plan, layers: tuple[str, ...], batch: Batch | None) -> Ready:
    """Return the message of a worker that has built the stages of `plan`."""
    built = tuple(Built(r.stage, r.first, layers[r.first : r.stop], 8) for r in plan.ranges)
    return Ready(rank, built, "cpu", batch)


def peer_of(rank: int) -> bytes:
    """Return the transport identity of the worker of a rank; any other belongs to no worker."""
    return b"w%d" % rank


class ScriptedJob:
    """A job whose workers are plain messages, and all of its effects.

    Args:
        workers: workers of a replica.
        generation: the number of the first generation.
        layers: the classes of the model's layers.
        replaceable: as in :class:`Job`.
        start: as in :class:`Job`.
        makes_plans: whether a plan that is requested is made at once.
        options: more options of the job.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        generation: int = 1,
        layers: tuple[str, ...] = LAYERS,
        replaceable: bool = False,
        start: Start | None = None,
        makes_plans: bool = True,
        **options: Any,
    ) -> None:
        self.makes_plans = makes_plans
        options = {"balance": "even", "microbatches": 4, "steps": 3, **options}
        self.options = Options("job.py", workers, **options)
        self.layers = layers
        self.now = 100.0
        self._arguments = {
            "generation": generation,
            "replaceable": replaceable,
            "start": start or Start(),
        }
        self.job = self.new_job()
        self.effects: list[Effect] = []

    def new_job(self) -> Job:
        """Return a job in the initial state of this one."""
        arguments: Any = self._arguments
        return Job(self.options, "runs/x", 100.0, timings=TIMINGS, **arguments)

    @property
    def number(self) -> int:
        """The number of the generation."""
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
        """The ranks that hold the first stage of a replica."""
        return self.placement.ranks_of(0)

    @property
    def lasts(self) -> list[int]:
        """The ranks that hold the last stage of a replica."""
        return self.placement.ranks_of(self.placement.stages - 1)

    def state(self) -> State:
        """Return the generation's state; not a property, so mypy does not assume it stays."""
        return self.job.generation.state

    # Events.

    def handle(self, event: Event) -> list[Effect]:
        effects = self.job.handle(event, self.now)
        self.effects += effects
        for request in of(effects, MakePlan) if self.makes_plans else ():
            effects = [*effects, *self.handle(make_plan(request))]
        return effects

    def receive(self, message: FromWorker, peer: bytes | None = None) -> list[Effect]:
        """Handle a message from the worker of its rank, or from `peer`."""
        sender = peer_of(message.rank) if peer is None else peer
        return self.handle(MessageReceived(sender, self.number, message))

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        return self.handle(Tick())

    def exited(self, rank: int, code: int, position: Position = NOWHERE) -> list[Effect]:
        return self.handle(WorkerExited(rank, self.number, code, position))

    def interrupt(self) -> list[Effect]:
        return self.handle(Interrupt())

    def request_checkpoint(self) -> list[Effect]:
        return self.handle(SaveRequest())

    def checkpoint_committed(self, step: int | None = None) -> list[Effect]:
        """Complete the checkpoint of `step`, or of the last Commit."""
        step = of(self.effects, Commit)[-1].state.step if step is None else step
        return self.handle(CheckpointEnded(step, f"checkpoints/{step}"))

    def checkpoint_failed(self, text: str = "no space left") -> list[Effect]:
        """Fail the checkpoint of the last Commit."""
        return self.handle(CheckpointEnded(of(self.effects, Commit)[-1].state.step, error=text))

    # The usual course, in pieces.

    def join(self, *ranks: int) -> list[Effect]:
        for rank in ranks or self.ranks:
            effects = self.receive(Hello(rank, "host", 1000 + rank))
        return effects

    def describe(self, layers: tuple[str, ...] | None = None) -> list[Effect]:
        for rank in self.ranks:
            described = Described(rank, layers or self.layers, ())
            if self.options.is_planned and self.options.balance is None:
                outline = OUTLINE if rank == self.first else None
                described = dataclasses.replace(described, outline=outline, machine=MACHINE)
            effects = self.receive(described)
        return effects

    def ready(self, batch: Batch | None = BATCH, unit: str = "") -> list[Effect]:
        """Let all workers report that they are ready, on one accelerator if there is a `unit`."""
        for rank in self.ranks:
            plan = self.sent(rank, Plan)[-1]
            first = batch if rank in self.firsts else None
            ready = ready_of(rank, plan, self.layers, first)
            effects = self.receive(dataclasses.replace(ready, accelerator=unit))
        return effects

    def described(self) -> ScriptedJob:
        """Let the workers of the generation join, and describe the layers; return the job."""
        self.join()
        self.describe()
        return self

    def start(self) -> list[Effect]:
        """Let the workers of the generation join and build, up to the first step."""
        return self.described().ready()

    def running(self) -> ScriptedJob:
        self.start()
        assert self.state() is (State.CALLING if self.options.own_loop else State.STEPPING)
        return self

    def done(self, rank: int, step: int, **more: Any) -> list[Effect]:
        """Let a rank complete a mini-batch and its copies; `more` replaces fields."""
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
            snapshot_step=max(copied, default=-1),
        )
        return self.receive(dataclasses.replace(message, **more))

    def step(self, step: int, **more: Any) -> list[Effect]:
        """Let every rank complete a mini-batch; return the effects of the last message."""
        for rank in self.ranks:
            effects = self.done(rank, step, **more)
        return effects

    def evaluated(self, step: int, loss: float = 0.5) -> list[Effect]:
        """Let every rank complete an evaluation pass."""
        for rank in self.ranks:
            result = evaluation_of(step, loss) if rank == self.last else None
            effects = self.receive(EvaluationDone(rank, step, 1000, result))
        return effects

    def predicted(self, step: int) -> list[Effect]:
        """Let every rank complete a prediction."""
        for rank in self.ranks:
            effects = self.receive(EvaluationDone(rank, step, 1000, None))
        return effects

    def called(self, kind: CallKind, *ranks: int, **more: Any) -> list[Effect]:
        """Let the user's loop make a call, on all ranks or on these."""
        for rank in ranks or self.ranks:
            batch = BATCH if kind is CallKind.STEP and rank in self.firsts else None
            effects = self.receive(Call(rank, kind, **{"batch": batch, **more}))
        return effects

    def saved(self, step: int | None = None, error: str = "") -> list[Effect]:
        """Let the first replica write its parts of `step`, or of the last requested checkpoint."""
        for rank in range(self.placement.workers):
            last = self.saves_requested(rank)[-1] if step is None else step
            effects = self.receive(Saved(rank, last, error=error))
        return effects

    def checkpointed(self) -> None:
        """Let the first replica write its parts of the last requested checkpoint; complete it."""
        self.saved()
        self.checkpoint_committed()

    # Effects so far.

    def sent(self, rank: int, kind: type[T]) -> list[T]:
        return [m for m in sent_to(self.effects, rank) if isinstance(m, kind)]

    def runs(self, rank: int) -> list[RunStep]:
        """Return the mini-batches that a rank was directed to run."""
        return [a.next for a in self.sent(rank, Advance) if isinstance(a.next, RunStep)]

    @property
    def rows(self) -> list[int]:
        """The steps that are recorded."""
        return [row.step for row in of(self.effects, StepResult)]

    def copies(self, rank: int) -> list[Copy]:
        """Return the copies that a rank was directed to make, in this generation."""
        sends = of(self.effects, Send)
        own = [s for s in sends if s.peer == peer_of(rank) and s.generation == self.number]
        advances = [s.message for s in own if isinstance(s.message, Advance)]
        return [advance.copy for advance in advances if advance.copy]

    def saves_requested(self, rank: int) -> list[int]:
        """Return the steps that a rank was directed to save, beside a step or at once."""
        found = []
        for advance in self.sent(rank, Advance):
            found += [advance.copy.step] if advance.copy and advance.copy.save else []
            found += [advance.next.step] if isinstance(advance.next, Save) else []
        return found

    @property
    def ended(self) -> Verdict:
        (ended,) = of(self.effects, Verdict)
        return ended

    @property
    def failure(self) -> Failure:
        """The failure of a failed job, which was sent to every member once."""
        assert self.ended.status in ("failed", "lost")
        assert self.job.end
        failure = self.job.end.failure
        assert failure
        assert self.state() is State.OVER
        aborted = [s for s in of(self.effects, Send) if isinstance(s.message, Abort)]
        assert [s.peer for s in aborted] == self.job.peers
        for message in (s.message for s in aborted):
            assert isinstance(message, Abort)
            lost = failure.cause in _LOSSES
            assert message.exit_status == (AGAIN if lost else self.ended.exit_status)
            assert message.reason.startswith(failure.message)
        return failure


def reply_of(effects: list[Effect]) -> Failure:
    """Return the failure that every rank gets as the reply to a call, which changed nothing."""
    reply, *others = messages_of(effects, Advance)
    assert others == [reply] * len(others)
    assert isinstance(reply.next, Wait)
    assert isinstance(reply.next.result, Failure)
    assert reply.update is None
    return reply.next.result


def own_loop_job(workers: int = 2, **options: Any) -> ScriptedJob:
    """Return a job with a loop of the user's own, before its first call."""
    return ScriptedJob(workers, own_loop=True, steps=None, **options).running()


def replaceable_job(workers: int = 2, **options: Any) -> ScriptedJob:
    """Return a job whose lost workers are replaced, with a snapshot at every step."""
    options = {"steps": 9, "snapshot_every": 1, **options}
    return ScriptedJob(workers, replaceable=True, **options)


def restores(job: ScriptedJob) -> list[Restore | None]:
    """Return the state with which each generation of worker 1 began."""
    return [welcome.restore for welcome in job.sent(1, Welcome)]


def of(effects: list[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent_to(effects: list[Effect], rank: int) -> list[ToWorker]:
    return [effect.message for effect in of(effects, Send) if effect.peer == peer_of(rank)]


def messages_of(effects: list[Effect], kind: type[T]) -> list[T]:
    return [m for m in (s.message for s in of(effects, Send)) if isinstance(m, kind)]


def runs(effects: list[Effect]) -> list[RunStep]:
    """Return the mini-batches that workers are directed to run, in the order of messages."""
    return [a.next for a in messages_of(effects, Advance) if isinstance(a.next, RunStep)]


def saves(effects: list[Effect]) -> list[Advance]:
    """Return the messages that direct workers to save before anything else runs."""
    return [a for a in messages_of(effects, Advance) if isinstance(a.next, Save)]


def copies(effects: list[Effect]) -> list[Copy]:
    """Return the copies to be made beside a step, in the order of messages."""
    return [a.copy for a in messages_of(effects, Advance) if a.copy]


def updates(effects: list[Effect]) -> list[Update]:
    """Return the updates that workers are directed to apply, in the order of messages."""
    return [a.update for a in messages_of(effects, Advance) if isinstance(a.update, Update)]


def ends(effects: list[Effect]) -> list[Send]:
    """Return the messages that end the job for the workers."""
    return [
        send
        for send in of(effects, Send)
        if isinstance(send.message, Abort)
        or (isinstance(send.message, Advance) and isinstance(send.message.next, Finish))
    ]


def closed(job: ScriptedJob) -> list[Effect]:
    """Close the job and return its effects."""
    effects = job.called(CallKind.CLOSE)
    if job.state() is State.SAVING:
        effects += [*job.saved(), *job.checkpoint_committed()]
    assert job.ended.status == "done"
    return effects
