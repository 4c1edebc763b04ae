"""The coordinator's decisions as a pure state machine.

Events go in (messages, reports of processes that ended, interrupts, ticks of a clock), effects come
out. Time is an argument; nothing here reads a clock, a file or a socket. The phases::

    GATHERING ── all ranks Described ──▶ BUILDING ── all Ready ──▶ RUNNING
    ── last step ──▶ SAVING ── all Saved ──▶ ENDED

Every phase can end in ENDED by a failure or an interrupt. The first cause is kept; a closed
connection reported by a neighbour only becomes the cause when nothing better arrives in time.

In a job with a loop of the user's own, RUNNING begins with an empty Advance, waits between steps
for the next call of every rank, and SAVING begins with the call that closes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from pipeworker.coordinator.blueprint import Blueprint
from pipeworker.coordinator.calls import Calls
from pipeworker.coordinator.effects import (
    Commit,
    Dropped,
    Effect,
    Ended,
    Log,
    Send,
    Status,
    Warn,
)
from pipeworker.coordinator.report import place
from pipeworker.coordinator.roster import ECHO_GRACE, Exited, Member, Roster
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.tally import Tally
from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.plan import schedule
from pipeworker.wire.messages import (
    Advance,
    Batch,
    Call,
    CallKind,
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
    Phase,
    Position,
    Ready,
    RunStep,
    Save,
    Saved,
    StepDone,
    StepResult,
    ToWorker,
    Update,
    Welcome,
)

INTERRUPT_GRACE = 4.0
"""Seconds an interrupted job may take to finish its step."""


class State(Enum):
    GATHERING = "gathering"
    BUILDING = "building"
    RUNNING = "running"
    SAVING = "saving"
    ENDED = "ended"


@dataclass(slots=True)
class Machine:
    """See the module. One instance directs one generation of one job."""

    options: Options
    run_dir: str
    started: float
    state: State = State.GATHERING
    _roster: Roster = field(init=False)
    _awaited: set[int] = field(default_factory=set)
    _blueprint: Blueprint | None = None
    _sent_schedule: int = 0
    _batch: Batch | None = None
    _step: int = 0
    _tally: Tally = field(default_factory=lambda: Tally(0.0))
    _scaler: Scaler | None = None
    _evaluation: Evaluation | None = None
    _calls: Calls = field(init=False)
    _whole: bool = True
    _bubbles: list[float] = field(default_factory=list)
    _steps_done: int = 0
    _echo: tuple[Failure, float] | None = None
    _echoed: set[int] = field(default_factory=set)
    _interrupted: float | None = None

    def __post_init__(self) -> None:
        self._roster = Roster(self.options.stages, self.started)
        self._calls = Calls(self.options.stages)
        self._awaited = set(range(self.options.stages))
        if self.options.precision == "fp16":
            self._scaler = Scaler()

    # Events.

    def received(self, peer: bytes, message: FromWorker, now: float) -> list[Effect]:
        """A message of this generation arrived from `peer`."""
        if self.state is State.ENDED:
            return []
        if isinstance(message, Hello):
            return self._hello(peer, message, now)
        worker = self._roster.sender(peer, message.rank)
        if worker is None:
            return [Dropped(f"{type(message).__name__}: its sender is not rank {message.rank}")]
        worker.heard, worker.unreachable = now, None
        match message:
            case Heartbeat():
                worker.position = message.position
            case Failed():
                return self._failed(replace(message.failure, rank=message.rank), now)
            case Described() if self.state is State.GATHERING:
                worker.described = message
                if self._last_awaited(message.rank):
                    return self._plan()
            case Ready() if self.state is State.BUILDING:
                worker.ready = message
                if self._last_awaited(message.rank):
                    return self._start(now)
            case StepDone() if self.state is State.RUNNING and message.step == self._step:
                worker.done = message
                worker.peak_memory = max(worker.peak_memory, message.peak_memory)
                if self._last_awaited(message.rank):
                    return self._ran(now)
            case EvaluationDone() if self.state is State.RUNNING and message.step == self._step:
                worker.peak_memory = max(worker.peak_memory, message.peak_memory)
                self._evaluation = message.result or self._evaluation
                if self._last_awaited(message.rank) and self._evaluation:
                    return self._evaluated(self._evaluation, now)
            case Call() if self.state is State.RUNNING and self.options.own_loop:
                return self._called(message, now)
            case Saved() if self.state is State.SAVING:
                if self._last_awaited(message.rank):
                    assert self._blueprint
                    names = tuple(tie.names for tie in self._blueprint.ties)
                    return [Commit(self._steps_done, self._scaler, names)]
            case _:
                return [Dropped(f"{type(message).__name__} while {self.state.value}")]
        return []

    def exited(self, report: Exited, now: float) -> list[Effect]:
        """The process of a worker ended before it was told to."""
        if self.state is State.ENDED:
            return []
        echo = self._echo[0] if self._echo else None
        if echo and echo.rank == report.rank and echo.cause is Cause.SIGNAL:
            return self._fail(replace(echo, cause=Cause.LOST))
        return self._failed(self._roster.exited(report), now)

    def unreachable(self, peer: bytes, now: float) -> None:
        """The connection of `peer` is closed. It may come back; :meth:`tick` gives it time."""
        self._roster.unreachable(peer, now)

    def interrupt(self, now: float) -> list[Effect]:
        """The user asked to stop: at the end of the step if there is one, else at once."""
        if self.state is State.ENDED or self._interrupted is not None:
            return []
        self._interrupted = now
        if self.state in (State.RUNNING, State.SAVING):
            return [Log("interrupted: stopping at the end of the step")]
        return self._end(Status.INTERRUPTED, 130, None)

    def tick(self, now: float) -> list[Effect]:
        """Time passed: look for what is overdue."""
        if self.state is State.ENDED:
            return []
        if self._interrupted is not None and now - self._interrupted > INTERRUPT_GRACE:
            return self._end(Status.INTERRUPTED, 130, None)
        if self._echo is not None and now >= self._echo[1]:
            return self._end_by_echo(self._echo[0], now)
        failure = self._roster.overdue(now, self.options.worker_timeout)
        return self._fail(failure) if failure else []

    def committed(self) -> list[Effect]:
        """The checkpoint asked for by Commit is complete."""
        return self._end(Status.DONE, 0, None)

    def abandoned(self, starter: int) -> list[Effect]:
        """The process that started the coordinator is gone: a launcher, or the worker `starter`."""
        if self.state is State.ENDED:
            return []
        if starter in self._roster.members:
            return self._fail(self._roster.members[starter].gone())
        return self.lost("the process that started the job is gone")

    def lost(self, text: str) -> list[Effect]:
        """Something the job cannot do without is gone."""
        return [] if self.state is State.ENDED else self._fail(Failure(Cause.LOST, text))

    def defect(self, text: str) -> list[Effect]:
        """The shell around the machine could not perform an effect (a full disk, say)."""
        if self.state is State.ENDED:
            return []
        return self._fail(Failure(Cause.INTERNAL, text))

    @property
    def peers(self) -> list[bytes]:
        """The identities of all workers that joined."""
        return self._roster.peers

    def knows(self, peer: bytes) -> bool:
        """Whether `peer` said Hello and was accepted."""
        return self._roster.knows(peer)

    # Decisions.

    @property
    def _workers(self) -> list[Member]:
        """Those that joined, by rank: the first stage is the last to end a step, so it is the first
        to be told of the next."""
        return list(self._roster.members.values())

    def _last_awaited(self, rank: int) -> bool:
        """Whether all have done what this phase or step waits for; then all are awaited anew."""
        self._awaited.discard(rank)
        if self._awaited:
            return False
        self._awaited = set(range(self.options.stages))
        return True

    def _hello(self, peer: bytes, hello: Hello, now: float) -> list[Effect]:
        if not self._roster.admit(peer, hello, now):
            reason = f"rank {hello.rank} is taken or not part of this job"
            return [
                Dropped(f"Hello of {hello.host}/{hello.pid}: {reason}"),
                Send(peer, Finish(reason, 1)),
            ]
        effects: list[Effect] = [
            Log(f"rank {hello.rank} joined: pid {hello.pid} on {hello.host}"),
            Send(peer, Welcome(self.options.to_json(), self.run_dir)),
        ]
        if not self._roster.missing:
            effects.append(Log("all ranks joined"))
        return effects

    def _plan(self) -> list[Effect]:
        described = [w.described for w in self._workers if w.described]
        try:
            self._blueprint = blueprint = Blueprint.draw(self.options, described)
        except UsageError as error:
            return self._fail(Failure(Cause.USAGE, str(error)))
        self.state = State.BUILDING
        for (first, _), member in zip(blueprint.ranges, self._workers, strict=True):
            member.first = first
        return [
            *map(Log, blueprint.reasons()),
            *(Send(m.peer, blueprint.plan(rank)) for rank, m in enumerate(self._workers)),
        ]

    def _start(self, now: float) -> list[Effect]:
        assert self._blueprint
        workers = [(w.hello, w.ready) for w in self._workers if w.ready]
        self._batch = workers[0][1].batch
        self.state = State.RUNNING
        planned = self._blueprint.planned(workers)
        if self.options.own_loop:
            return [planned, *self._to_all(Advance(None, None))]
        return [planned, *self._advance(None, now)]

    def _to_all(self, *messages: ToWorker) -> list[Effect]:
        return [Send(worker.peer, m) for worker in self._workers for m in messages]

    def _advance(
        self, update: Update | None, now: float, evaluated: Evaluation | None = None
    ) -> list[Effect]:
        """Tell everyone to update and begin the next step, or to save when there is none."""
        if self._batch is None or self._step == self.options.steps:
            self.state = State.SAVING
            last = Advance(update, None, None, evaluated)
            return self._to_all(last, Save(self._steps_done))
        return self._begin(now, update, evaluated)

    def _begin(
        self, now: float, update: Update | None = None, evaluated: Evaluation | None = None
    ) -> list[Effect]:
        """The next step, with its first mini-batch."""
        self._step += 1
        self._tally = Tally(now)
        return self._run(update, evaluated)

    def _run(self, update: Update | None, evaluated: Evaluation | None = None) -> list[Effect]:
        """Tell everyone to run the next mini-batch of the step."""
        options, batch = self.options, self._batch
        assert batch is not None
        assert self._blueprint
        built, _ = self._blueprint.schedule(batch.microbatches)
        fresh = self._sent_schedule != built.microbatches
        self._sent_schedule = built.microbatches
        last = self._step == options.steps and self._tally.batches + 1 == options.accumulate
        scale = self._scaler.scale if self._scaler else 1.0
        run = RunStep(self._step, batch, last, "", self._tally.microbatches, scale)
        advance = Advance(update, run, None, evaluated)
        effects: list[Effect] = []
        for rank, worker in enumerate(self._workers):
            worker.done = None
            if fresh:
                actions = schedule.format_actions(built.stages[rank])
                advance = replace(advance, run=replace(run, actions=actions))
            effects.append(Send(worker.peer, advance))
        return effects

    def _ran(self, now: float) -> list[Effect]:
        """Every stage has run a mini-batch."""
        done = [d for worker in self._workers if (d := worker.done)]
        assert self._batch is not None
        self._tally.add(done, self._batch)
        if self.options.own_loop:
            return self._stepped(now) if self._whole else []
        self._batch = done[0].batch
        if self._tally.batches < self.options.accumulate and self._batch is not None:
            return self._run(None)
        return self._stepped(now)

    def _stepped(self, now: float) -> list[Effect]:
        """The gradients of a step are complete."""
        scaler, step = self._scaler, self._step
        outcome = self._tally.outcome(now, self.options.clip_grad_norm, scaler)
        self._steps_done = step
        self._bubbles.append(outcome.bubble)
        result = StepResult(
            step=step,
            loss=outcome.loss,
            samples=outcome.samples,
            seconds=outcome.seconds,
            samples_per_second=outcome.samples / outcome.seconds
            if outcome.seconds > 0
            else math.inf,
            grad_norm=outcome.norm,
            lr=outcome.learning_rate,
            bubble=outcome.bubble,
            epoch=outcome.epoch,
            loss_scale=scaler.scale if scaler else None,
        )
        effects: list[Effect] = [result]
        if not math.isfinite(outcome.loss):
            text = f"loss is {outcome.loss} at step {step}"
            if self.options.stop_on_nan:
                failure = Failure(Cause.USER, text, position=Position(Phase.LOSS, step))
                return [*effects, *self._fail(failure)]
            effects.append(Warn(f"{text}; training goes on (--stop-on-nan would stop here)"))
        if scaler:
            self._scaler = scaler.after(overflow=outcome.overflow)
        if outcome.overflow:
            effects.append(
                Log(f"step {step}: a gradient overflowed; no update, scale {self._scaler}")
            )
        if self._interrupted is not None:
            return [*effects, *self._end(Status.INTERRUPTED, 130, None)]
        epoch_ended = self._batch is None or self._batch.epoch != outcome.first_epoch
        update = Update(step, outcome.scale, outcome.overflow, epoch_ended)
        if self.options.own_loop:
            return [*self._to_all(Advance(update, None, result=result)), *effects]
        every = self.options.evaluate_every
        if every and step % every == 0:
            return [*effects, *self._to_all(Advance(update, None, Evaluate(step)))]
        # The first stage begins at once. The others have time until its first activation: the
        # record is written meanwhile, and their cores are not wanted by all of them together.
        first, *others = self._advance(update, now)
        return [first, *effects, *others]

    def _evaluated(self, evaluation: Evaluation, now: float) -> list[Effect]:
        """Every stage has ended an evaluation pass."""
        if self._interrupted is not None:
            return [evaluation, *self._end(Status.INTERRUPTED, 130, None)]
        if self.options.own_loop:
            return [evaluation, *self._to_all(Advance(None, None, evaluated=evaluation))]
        return [evaluation, *self._advance(None, now, evaluation)]

    def _called(self, call: Call, now: float) -> list[Effect]:
        """The user's loop made its next call on one rank; on the last of them it is performed."""
        if wrong := self._calls.add(call):
            return self._fail(Failure(Cause.USAGE, wrong))
        if not self._calls.complete:
            return []
        match call.kind:
            case CallKind.STEP:
                self._batch, self._whole = self._calls.batch, call.last
                return self._begin(now) if self._step == self._steps_done else self._run(None)
            case CallKind.CLOSE:
                self.state = State.SAVING
                return self._to_all(Save(self._steps_done))
        return self._to_all(Advance(None, None, Evaluate(self._steps_done)))

    # Endings.

    def _failed(self, failure: Failure, now: float) -> list[Effect]:
        if failure.cause not in (Cause.PEER, Cause.SIGNAL):
            return self._fail(failure)
        effects: list[Effect] = [Log(f"echo from rank {failure.rank}: {failure.message}")]
        self._echoed.add(failure.rank)
        if self._echo is None:
            self._echo = failure, now + ECHO_GRACE
        return effects

    def _end_by_echo(self, echo: Failure, now: float) -> list[Effect]:
        """No cause came behind an echo: a rank gone silent without a word is the likely one."""
        silent = [r for r in self._roster.silent(now) if r not in self._echoed]
        if not silent and echo.cause is Cause.SIGNAL:
            return self._end(Status.INTERRUPTED, 130, None)
        if not silent:
            return self._fail(replace(echo, message=f"{echo.message}, and nobody reported why"))
        return self._fail(self._roster.members[silent[0]].gone())

    def _fail(self, failure: Failure) -> list[Effect]:
        return self._end(Status.FAILED, 2 if failure.cause is Cause.USAGE else 1, failure)

    def _end(self, status: Status, exit_status: int, failure: Failure | None) -> list[Effect]:
        self.state = State.ENDED
        bubble = sum(self._bubbles) / len(self._bubbles) if self._bubbles else 0.0
        memory = self._roster.peak_memory()
        reason = "" if status is Status.DONE else status.value
        if failure:
            at = f" ({place(failure)})" if failure.position.step >= 0 else ""
            reason = failure.message + at
        finish = Finish(reason, exit_status)
        return [
            Log(f"ended: {status.value}{': ' + reason if reason else ''}"),
            *(Send(peer, finish) for peer in self.peers),
            Ended(status, exit_status, self._steps_done, memory, bubble, failure),
        ]
