"""One incarnation of a job's workers: who is there, what it waits for, what ends it. Pure.

What may happen is a table: by state, the messages that are expected and what is done with them.
Everything else is dropped. The usual life::

    JOINING ── all Described ──▶ BUILDING ── all Ready ──▶ STEPPING ── all StepDone ──▶ STEPPING ...
    ── the loop says Finish ──▶ SAVING ── all Saved ──▶ COMMITTING ── Committed ──▶ OVER

EVALUATING stands between two steps, CALLING while the user's own loop is to make its next call.
SAVING and COMMITTING may follow any step, and then the loop goes on. Any state ends in OVER by a
failure or an interrupt. The first cause is kept: a closed connection that a neighbour reports
becomes the cause only when nothing better arrives in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pipeworker.coordinator.blueprint import Blueprint
from pipeworker.coordinator.cause import FirstCause
from pipeworker.coordinator.effects import (
    Commit,
    Dropped,
    Effect,
    Log,
    Send,
    Status,
)
from pipeworker.coordinator.loop import Due, Loop
from pipeworker.coordinator.progress import Progress
from pipeworker.coordinator.rendezvous import Rendezvous
from pipeworker.coordinator.report import place
from pipeworker.coordinator.roster import Member, Roster
from pipeworker.coordinator.states import End, Lost, State, Verdict, Waiting
from pipeworker.errors import ProtocolError, UsageError
from pipeworker.job.options import Every, Options
from pipeworker.plan.actions import format_actions
from pipeworker.plan.placement import Placement
from pipeworker.timings import Timings
from pipeworker.wire.lines import Joined, WorkerExited
from pipeworker.wire.messages import (
    Abort,
    Advance,
    Batch,
    Call,
    Cause,
    Described,
    Evaluate,
    Evaluation,
    EvaluationDone,
    Failed,
    Failure,
    Finish,
    FromWorker,
    Heartbeat,
    Hello,
    Next,
    Ready,
    RunStep,
    Save,
    Saved,
    StepDone,
    StoreRequest,
    ToWorker,
    Upcoming,
    Wait,
    Welcome,
)

_AT_ONCE = (State.JOINING, State.BUILDING)
"""Where an interrupt finds no step that could be completed."""


@dataclass(slots=True)
class Generation:
    """See the module.

    Args:
        number: marks every message of it; another number's are not its own.
        loop: says what is next.
        progress: of the job, which outlasts it.
    """

    number: int
    options: Options
    run_dir: str
    placement: Placement
    timings: Timings
    loop: Loop
    progress: Progress
    started: float
    state: State = State.JOINING
    end: End | None = None
    roster: Roster = field(init=False)
    blueprint: Blueprint | None = None
    _rendezvous: Rendezvous = field(default_factory=Rendezvous)
    _awaited: set[int] = field(default_factory=set)
    _step: int = 0
    _sent_schedule: int = 0
    _evaluation: Evaluation | None = None
    _cause: FirstCause = field(init=False)
    _save_asked: bool = False
    _saved: int = -1
    _saved_at: float = 0.0
    _interrupted: float | None = None

    def __post_init__(self) -> None:
        self.roster = Roster(self.placement, self.started, self.timings)
        self._cause = FirstCause(self.roster)
        self._saved_at = self.started
        self._await(State.JOINING)

    # Events.

    def arrived(self, peer: bytes, message: FromWorker, now: float) -> list[Effect]:
        """A message of this generation."""
        if isinstance(message, Hello):
            return self._hello(peer, message, now)
        member = self.roster.sender(peer, message.rank)
        if member is None:
            said = f"{type(message).__name__} as rank {message.rank}"
            return self.lied(peer, said) or [Dropped(f"{said}, which its sender is not")]
        member.heard, member.unreachable = now, None
        handler = self._ALWAYS.get(type(message)) or self._LEGAL[self.state].get(type(message))
        if handler is None:
            return [Dropped(f"{type(message).__name__} while {self.waiting}")]
        try:
            return handler(self, member, message, now)
        except UsageError as error:  # no plan, or no schedule for a mini-batch of this size
            return self.fail(Failure(Cause.USAGE, str(error)))
        except ProtocolError as error:
            return self.lied(peer, f"{type(message).__name__}: {error}")

    def lied(self, peer: bytes, what: str) -> list[Effect]:
        """Something arrived that cannot be: a member is named, and the job ends; else nothing."""
        member = self.roster.member(peer)
        if member is None:
            return []
        who = f"{member.name} (pid {member.hello.pid} on {member.hello.host})"
        return self.fail(member.failure(Cause.INTERNAL, f"{who} sent what cannot be: {what}"))

    def exited(self, report: WorkerExited, now: float) -> list[Effect]:
        """The process of a worker ended before it was told to."""
        return self._reported(self._cause.exited(report), now)

    def interrupt(self, now: float) -> list[Effect]:
        """The user asked to stop: at the end of the step if there is one, else at once."""
        if self._interrupted is not None:
            return []
        self._interrupted = now
        if self.state in _AT_ONCE:
            return self._over(Verdict(Status.INTERRUPTED, 130))
        return [Log(f"interrupted: stopping at the end of the step, {self.waiting}")]

    def ticked(self, now: float) -> list[Effect]:
        """Time passed: look for what is overdue."""
        if self._interrupted is not None and now - self._interrupted > self.timings.interrupt:
            return self._over(Verdict(Status.INTERRUPTED, 130))
        patience = self.options.worker_timeout
        failure = self._cause.overdue(now, patience)
        if failure is None and self.state is not State.CALLING:
            failure = self.roster.stuck(self._awaited, now, patience)
        if failure is None:
            return []
        if failure.cause is Cause.SIGNAL:
            return self._over(Verdict(Status.INTERRUPTED, 130))
        return self._ended_by(failure)

    def save_asked(self) -> list[Effect]:
        """Somebody wants a checkpoint: it is taken at the end of this step."""
        self._save_asked = True
        return [Log("a checkpoint is asked for")]

    def committed(self, step: int, now: float) -> list[Effect]:
        """The checkpoint of `step` is complete: go on."""
        if self.state is not State.COMMITTING or step != self._step:
            return [Dropped(f"the checkpoint of step {step} while {self.waiting}")]
        self._saved, self._saved_at = step, now
        if self._interrupted is not None and not self.loop.finished:
            return self._over(Verdict(Status.INTERRUPTED, 130))
        return self._go_on(Due(), now)

    def fail(self, failure: Failure) -> list[Effect]:
        """The job ends by a failure."""
        status = 2 if failure.cause is Cause.USAGE else 1
        return self._over(Verdict(Status.FAILED, status, self._named(failure)))

    @property
    def waiting(self) -> Waiting:
        """What it waits for."""
        return Waiting(self.state, tuple(sorted(self._awaited)))

    # Messages, by the table at the end.

    def _hello(self, peer: bytes, hello: Hello, now: float) -> list[Effect]:
        if self.roster.knows(peer):
            return [Dropped(f"Hello of rank {hello.rank}: its sender has joined")]
        if not self.roster.admit(peer, hello, now):
            reason = f"rank {hello.rank} is taken or not part of this job"
            return [
                Dropped(f"Hello of {hello.host}/{hello.pid}: {reason}"),
                self._send(peer, Abort(reason, 1)),
            ]
        effects: list[Effect] = [
            Log(f"rank {hello.rank} joined: pid {hello.pid} on {hello.host}"),
            self._send(peer, self._welcome()),
        ]
        if not self.roster.missing:
            effects.append(Log("all ranks joined"))
        return effects

    def _welcome(self) -> Welcome:
        placement = self.placement
        return Welcome(self.options.to_json(), self.run_dir, placement.held, placement.replicas)

    def _on_heartbeat(self, member: Member, message: Heartbeat, now: float) -> list[Effect]:
        member.beats(message, now)
        return []

    def _on_failed(self, member: Member, message: Failed, now: float) -> list[Effect]:
        return self._reported(replace(message.failure, rank=message.rank), now)

    def _on_store(self, member: Member, message: StoreRequest, now: float) -> list[Effect]:
        answers = self._rendezvous.handle(member.peer, message)
        return [self._send(peer, reply) for peer, reply in answers]

    def _on_described(self, member: Member, message: Described, now: float) -> list[Effect]:
        if len(self._awaited) == self.placement.ranks:  # refused before all others are started
            Blueprint.balance(self.options, self.placement, len(message.layers))
        member.described = message
        if not self._last_awaited(message.rank):
            return [Joined(message.rank)]
        described = [m.described for m in self._members if m.described]
        self.blueprint = Blueprint.draw(self.options, self.placement, described)
        self._await(State.BUILDING)
        return [
            *map(Log, self.blueprint.reasons()),
            *(self._send(m.peer, self.blueprint.plan(m.hello.rank)) for m in self._members),
        ]

    def _on_ready(self, member: Member, message: Ready, now: float) -> list[Effect]:
        assert self.blueprint
        self._check_batch(message.batch)
        held = self.placement.stages_of(message.rank)
        ranges = {stage: self.blueprint.ranges[stage] for stage in held}
        built = {b.stage: (b.first, b.first + len(b.layers)) for b in message.stages}
        if built != ranges:
            raise ProtocolError(f"stages {built} where {ranges} were planned")
        member.ready = message
        if not self._last_awaited(message.rank):
            return []
        assert self.blueprint
        workers = [(m.hello, m.ready) for m in self._members if m.ready]
        self.loop.begin(workers[self.placement.rank_of(0)][1].batch)
        return [self.blueprint.planned(workers), *self._go_on(Due(), now)]

    def _on_upcoming(self, member: Member, message: Upcoming, now: float) -> list[Effect]:
        """A mini-batch of another size is read: its schedule is made while this one drains."""
        assert self.blueprint
        most = self.options.microbatches
        if message.rank != self.placement.rank_of(0) or message.microbatches > most:
            raise ProtocolError(f"a mini-batch of {message.microbatches} micro-batches, not {most}")
        self.blueprint.schedule(message.microbatches)
        return []

    def _on_step_done(self, member: Member, message: StepDone, now: float) -> list[Effect]:
        if message.step != self._step:
            return [Dropped(f"StepDone of step {message.step} in step {self._step}")]
        self._check_batch(message.batch)
        member.done = message
        member.peak_memory = max(member.peak_memory, message.peak_memory)
        if not self._last_awaited(message.rank):
            return []
        done = [m.done for m in self._members if m.done]
        return self._go_on(self.loop.ran(done, now), now)

    def _on_evaluated(self, member: Member, message: EvaluationDone, now: float) -> list[Effect]:
        if message.step != self._step:
            return [Dropped(f"EvaluationDone of step {message.step} in step {self._step}")]
        if message.result and message.rank != self.placement.rank_of(self.placement.stages - 1):
            raise ProtocolError("a result where the last stage is not")
        member.peak_memory = max(member.peak_memory, message.peak_memory)
        self._evaluation = message.result or self._evaluation
        if not self._last_awaited(message.rank):
            return []
        if self._evaluation is None:
            return self.fail(Failure(Cause.INTERNAL, "no worker gave the evaluation's result"))
        return self._go_on(self.loop.evaluated(self._evaluation), now)

    def _on_call(self, member: Member, message: Call, now: float) -> list[Effect]:
        early = self.state is State.STEPPING and message.rank in self._awaited
        if early or not self.options.own_loop:
            return [Dropped(f"Call while {self.waiting}")]
        self._check_batch(message.batch)
        if self.state is State.CALLING:
            self._awaited.discard(message.rank)
        due = self.loop.called(message)
        return [] if due is None else self._go_on(due, now)

    def _on_saved(self, member: Member, message: Saved, now: float) -> list[Effect]:
        if message.step != self._step:
            return [Dropped(f"Saved of step {message.step} in step {self._step}")]
        member.saved = message.files
        if not self._last_awaited(message.rank):
            return []
        assert self.blueprint
        self.state = State.COMMITTING
        ties = tuple(tuple(map(self.blueprint.named, t.names)) for t in self.blueprint.ties)
        files = tuple(file for m in self._members for file in m.saved)
        return [Commit(self._step, self.progress.scaler, ties, self.blueprint.names, files)]

    def _check_batch(self, batch: Batch | None) -> None:
        """Raise ProtocolError when it has more micro-batches than the job."""
        most = self.options.microbatches
        if batch is not None and batch.microbatches > most:
            raise ProtocolError(f"a mini-batch of {batch.microbatches} micro-batches: not {most}")

    # Decisions.

    def _go_on(self, due: Due, now: float) -> list[Effect]:
        """What is due, and then what the loop says is next; an end or a checkpoint comes first."""
        if due.failure:
            return [*due.effects, *self.fail(due.failure)]
        if due.boundary and self._interrupted is not None:
            return [*due.effects, *self._over(Verdict(Status.INTERRUPTED, 130))]
        saved = self._saved == self.progress.steps
        asked = self._save_asked or self._save_due(now)
        wanted = self.loop.finished or (due.boundary and not due.evaluates and asked)
        if wanted:
            self._save_asked = False
        if wanted and not saved:
            self._step = self.progress.steps
            self._await(State.SAVING)
            return self._tell(self._alike(Save(self._step), due), due)
        following = self.loop.next(now)
        match following:
            case Finish():
                return [*due.effects, *self._over(Verdict(Status.DONE, 0))]
            case None:
                self._await(State.CALLING)
                return list(due.effects)
            case RunStep():
                self._step = following.step
                self._await(State.STEPPING)
                return self._tell(self._runs(following, due), due)
            case Evaluate():
                self._step, self._evaluation = following.step, None
                self._await(State.EVALUATING if self.loop.answered else State.CALLING)
            case Wait():
                self._await(State.CALLING)
        return self._tell(self._alike(following, due), due)

    def _save_due(self, now: float) -> bool:
        """Whether it is time for another checkpoint."""
        if self.options.checkpoint_every is None:
            return False
        every = Every.parse(self.options.checkpoint_every)
        return every.due(self.progress.steps, now - self._saved_at)

    def _tell(self, told: Sequence[Advance], due: Due) -> list[Effect]:
        """Tell each worker what is next, where stage 0 is before what has been is recorded.

        It begins at once; the others have time until its first activation.
        """
        sends = [
            self._send(member.peer, advance)
            for member, advance in zip(self._members, told, strict=True)
        ]
        first = sends.pop(self.placement.rank_of(0))
        return [first, *due.effects, *sends]

    def _alike(self, following: Next, due: Due) -> list[Advance]:
        """The same for all: one object, which is encoded once."""
        return [Advance(following, due.update)] * self.placement.ranks

    def _runs(self, run: RunStep, due: Due) -> list[Advance]:
        """By rank; with its actions where they are not those of the step before."""
        assert self.blueprint
        built, _ = self.blueprint.schedule(run.batch.microbatches)
        if self._sent_schedule == built.microbatches:
            return self._alike(run, due)
        self._sent_schedule = built.microbatches
        texts = [format_actions(actions) for actions in built.workers]
        return [
            Advance(replace(run, actions=texts[self.placement.worker_of(rank)]), due.update)
            for rank in self.roster.members
        ]

    @property
    def _members(self) -> list[Member]:
        """Those that joined, by rank."""
        return list(self.roster.members.values())

    def _send(self, peer: bytes, message: ToWorker) -> Send:
        return Send(peer, message, self.number)

    def _await(self, state: State) -> None:
        self.state = state
        self._awaited = set(range(self.placement.ranks))

    def _last_awaited(self, rank: int) -> bool:
        """Whether all have now done what is waited for."""
        if rank not in self._awaited:
            return False  # said twice, counted once
        self._awaited.discard(rank)
        return not self._awaited

    # Endings.

    def _reported(self, failure: Failure, now: float) -> list[Effect]:
        known = self._cause.echoed(failure.rank)
        cause = self._cause.reported(failure, now)
        if cause is None:
            echo = f"echo from rank {failure.rank}: {failure.message}"
            return [Dropped(echo) if known else Log(echo)]
        return self._ended_by(cause)

    def _ended_by(self, failure: Failure) -> list[Effect]:
        """By a worker: what it reports, or that it is gone."""
        if failure.cause in (Cause.LOST, Cause.HUNG):
            return self._over(Lost(self._named(failure)))
        return self.fail(failure)

    def _named(self, failure: Failure) -> Failure:
        """With the stage: of its layer, or all that its rank holds."""
        if failure.rank < 0 or failure.rank >= self.placement.ranks:
            return failure
        stage = self.blueprint.stage_at(failure.position) if self.blueprint else -1
        held = self.placement.stages_of(failure.rank)
        if self.placement.replicas == 1 and stage in held:
            return replace(failure, stage=f"stage {stage}")
        return replace(failure, stage=self.placement.names(failure.rank))

    def _over(self, end: End) -> list[Effect]:
        was, self.state, self.end = self.waiting, State.OVER, end
        peers = self.roster.peers
        if isinstance(end, Verdict) and end.status is Status.DONE:
            finish = Advance(Finish())
            return [Log("ended: done"), *(self._send(peer, finish) for peer in peers)]
        how, status = ("lost", 1) if isinstance(end, Lost) else (end.status.value, end.exit_status)
        reason = how
        if end.failure:
            at = f" ({place(end.failure)})" if end.failure.position.step >= 0 else ""
            reason = end.failure.message + at
        abort = Abort(reason, status)
        return [
            Log(f"ended: {how}: {reason}; it was {was}"),
            *(self._send(peer, abort) for peer in peers),
        ]

    _Handler = Callable[["Generation", Member, Any, float], list[Effect]]
    _ALWAYS: ClassVar[dict[type, _Handler]] = {
        Heartbeat: _on_heartbeat,
        Failed: _on_failed,
        StoreRequest: _on_store,
    }
    _LEGAL: ClassVar[dict[State, dict[type, _Handler]]] = {
        State.JOINING: {Described: _on_described},
        State.BUILDING: {Ready: _on_ready},
        State.STEPPING: {StepDone: _on_step_done, Upcoming: _on_upcoming, Call: _on_call},
        State.EVALUATING: {EvaluationDone: _on_evaluated},
        State.CALLING: {Call: _on_call},
        State.SAVING: {Saved: _on_saved},
        State.COMMITTING: {},
        State.OVER: {},
    }
