"""One incarnation of a job's workers: who is there, what it waits for, what ends it. Pure.

What may happen is a table: by state, the messages that are expected and what is done with them.
Everything else is dropped. The usual life::

    JOINING ── all Described ──▶ BUILDING ── all Ready ──▶ STEPPING ── all StepDone ──▶ STEPPING ...
    ── the loop says Finish ──▶ SAVING ── all Saved ──▶ COMMITTING ── Committed ──▶ OVER

EVALUATING stands between two steps, CALLING while the user's own loop is to make its next call.
SAVING and COMMITTING hold up the loop; a checkpoint that is written beside steps has no state.
Any state ends in OVER by a failure or an interrupt. The first cause is kept: a closed connection
that a neighbour reports becomes the cause only when nothing better arrives in time.

It is long because its handlers share one state, and whether each leaves it right is seen only
beside the others. What has a state of its own has a module: roster, cause, snapshots, progress,
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pipeworker.coordinator import agree
from pipeworker.coordinator.blueprint import Blueprint
from pipeworker.coordinator.cause import FirstCause
from pipeworker.coordinator.effects import (
    Commit,
    Discard,
    Dropped,
    Effect,
    Log,
    Send,
    Status,
    Warn,
)
from pipeworker.coordinator.rendezvous import Rendezvous
from pipeworker.coordinator.report import few_samples, place, sharing
from pipeworker.coordinator.roster import Member, Roster
from pipeworker.coordinator.states import STOPPED, End, Lost, State, Verdict, Waiting
from pipeworker.coordinator.steps.loop import Due, Loop, alike
from pipeworker.coordinator.steps.progress import Progress
from pipeworker.coordinator.steps.snapshots import Snapshots, Writing
from pipeworker.errors import AGAIN, ProtocolError, UsageError
from pipeworker.job.options import Every, Options
from pipeworker.plan.actions import format_actions
from pipeworker.plan.placement import Placement
from pipeworker.timings import Timings
from pipeworker.wire.lines import CannotStart, HostLost, Joined, WorkerExited
from pipeworker.wire.messages.advance import Advance, Finish, Next
from pipeworker.wire.messages.calls import Call, Wait
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.directions import FromWorker, ToWorker
from pipeworker.wire.messages.evaluation import Evaluate, Evaluation, EvaluationDone
from pipeworker.wire.messages.failure import Abort, Cause, Failed, Failure, Signalled
from pipeworker.wire.messages.plan import Described, Ready
from pipeworker.wire.messages.position import Phase
from pipeworker.wire.messages.presence import Heartbeat, Hello, Welcome
from pipeworker.wire.messages.step import Batch, RunStep, StepDone, Upcoming
from pipeworker.wire.messages.store import StoreRequest

_AT_ONCE = (State.JOINING, State.BUILDING)
"""Where an interrupt finds no step that could be completed."""
_NOTE_SECONDS = 20.0
"""Between two notes that something is compiled."""
_NOTICE = "SIGUSR1"
"""What clusters send before they take a node."""


@dataclass(slots=True)
class Generation:
    """See the module.

    Args:
        number: marks every message of it; another number's are not its own.
        loop: says what is next.
        progress, snapshots: of the job, which outlast it.
        restore: what its workers begin with; `layers`, the names that are in it.
        launched: whether a worker that is told from outside to end is lost; else the job ends,
            with a checkpoint. Nor has such a worker a terminal, where somebody debugs it.
    """

    number: int
    options: Options
    run_dir: str
    placement: Placement
    timings: Timings
    loop: Loop
    progress: Progress
    started: float
    snapshots: Snapshots = field(default_factory=Snapshots)
    restore: Restore | None = None
    layers: tuple[str, ...] = ()
    launched: bool = False
    state: State = State.JOINING
    end: End | None = None
    roster: Roster = field(init=False)
    blueprint: Blueprint | None = None
    _rendezvous: Rendezvous = field(default_factory=Rendezvous)
    _awaited: set[int] = field(default_factory=set)
    _step: int = 0
    _next_note: float = 0.0  # of what is compiled
    _sent_schedule: int = -1
    _evaluation: Evaluation | None = None
    _cause: FirstCause = field(init=False)
    abort: Abort | None = None
    """What its workers were told at its end, if it was not done."""
    interrupted: float | None = None
    """When the user asked to stop."""
    stopped: Verdict = STOPPED
    """On the job, where it stops for that."""
    state_before: State = State.JOINING
    """What it waited for when it ended."""

    def __post_init__(self) -> None:
        self.roster = Roster(self.placement, self.started, self.timings)
        self._cause = FirstCause(self.roster)
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

    def cannot_start(self, report: CannotStart) -> list[Effect]:
        """The system does not start the worker of a rank."""
        return self._over(Lost(self._named(Failure(Cause.LOST, report.text, rank=report.rank))))

    def host_lost(self, report: HostLost) -> list[Effect]:
        """A host is gone, and with it what its memory held."""
        ranks, placement = report.ranks, self.placement
        if self.options.read_data == "once" and placement.rank_of(0) in ranks:
            ranks = tuple(range(placement.ranks))  # nobody else knows where the data was
        self.snapshots.forget(() if report.kept else ranks, placement.ranks)
        names = [self.placement.names(rank) for rank in report.ranks if rank < self.placement.ranks]
        rank = report.ranks[0] if report.ranks else -1
        failure = Failure(Cause.LOST, report.text, rank=rank, stage=", ".join(names))
        return self._over(Lost(failure))

    def interrupt(self, now: float) -> list[Effect]:
        """The user asked to stop: at the end of the step if there is one, else at once."""
        if self.interrupted is not None:
            return []
        self.interrupted = now
        if self.state in _AT_ONCE and not self.progress.unsaved_at(self.progress.steps):
            return self._over(self.stopped)
        return [Log(f"interrupted: stopping at the end of the step, {self.waiting}")]

    def ticked(self, now: float, stopped: float = 0.0) -> list[Effect]:
        """Time passed, for some of it nobody looked: look for what is overdue."""
        if stopped:
            self.roster.stopped(stopped, now)
            self._cause.stopped(stopped)
            if self.interrupted is not None:
                self.interrupted = min(now, self.interrupted + stopped)
        patience = self.options.worker_timeout
        if self.interrupted is not None and self._stands_still(now - self.interrupted, now):
            return self._over(self.stopped)
        failure = self._cause.overdue(now, patience)
        if failure is None and self.state is not State.CALLING:
            failure = self.roster.stuck(self._awaited, now, patience)
        if failure is None and self.launched and self.state is State.STEPPING:
            failure = self.roster.stalled(now, patience)
        if failure is None:
            return []
        if failure.cause is Cause.SIGNAL:
            return self._signalled(failure, now)
        return self._ended_by(failure)

    def _signalled(self, failure: Failure, now: float) -> list[Effect]:
        """Nothing is behind a worker's signal: that worker, or all of them, are not wanted."""
        if self.interrupted is not None and failure.rank not in self.roster.silent(now):
            return []  # the signal was the whole job's, and the worker stays to the end of the step
        if self.launched and self.interrupted is None:
            return self._over(Lost(self._named(failure)))
        return self._over(self.stopped)

    def _stands_still(self, since: float, now: float) -> bool:
        """Whether an interrupted job does not come to the end of its step.

        A loop of the user's own may never make another call.
        """
        if self.state in (State.SAVING, State.COMMITTING):
            return False
        if self.options.own_loop:
            return since > self.timings.interrupt
        return since > self.options.worker_timeout and self.roster.still(
            now, self.options.worker_timeout
        )

    def save_asked(self) -> list[Effect]:
        """Somebody wants a checkpoint: it is taken at the end of this step."""
        self.progress.asked = True
        return [Log("a checkpoint is asked for")]

    def committed(self, step: int, path: str, now: float) -> list[Effect]:
        """The checkpoint of `step` is complete, at `path`."""
        if not self.snapshots.saved(step, path):
            return [Dropped(f"the checkpoint of step {step} while {self.waiting}")]
        self.progress.saved, self.progress.unsaved = step, 0
        if self.state is not State.COMMITTING or step != self._step:
            return [Log(f"the checkpoint of step {step} is complete")]
        return self._behind_save(now)

    def uncommitted(self, step: int, text: str, now: float) -> list[Effect]:
        """The checkpoint of `step` cannot be completed."""
        if not self.snapshots.saved(step, ""):
            return [Dropped(f"the checkpoint of step {step} while {self.waiting}")]
        return self._failed_to_save(step, text, now)

    def _failed_to_save(self, step: int, text: str, now: float) -> list[Effect]:
        """There is no checkpoint of `step`: the job ends when that happens again."""
        self.progress.unsaved += 1
        again = self.progress.unsaved > 1
        effects: list[Effect] = [Discard(step)]
        if again:
            return [*effects, *self.fail(Failure(Cause.INTERNAL, text))]
        waits = self.state in (State.SAVING, State.COMMITTING) and step == self._step
        more = "it is tried again" if waits else "the job goes on until the next one"
        effects.append(Warn(f"there is no checkpoint of step {step}: {text}; {more}"))
        return [*effects, *self._save(Due(), now)] if waits else effects

    def _behind_save(self, now: float) -> list[Effect]:
        if self.interrupted is not None and not self.loop.finished:
            return self._over(self.stopped)
        return self._go_on(Due(), now)

    def fail(self, failure: Failure) -> list[Effect]:
        """The job ends by a failure; before its first step the user's is a mistake, status 2."""
        status = 1
        if self.progress.begun:
            if failure.cause in (Cause.USAGE, Cause.EXIT):
                failure = replace(failure, cause=Cause.USER)
        elif failure.cause is Cause.EXIT:
            status = failure.status
        elif failure.cause is Cause.USAGE or self._is_early(failure):
            status = UsageError.exit_status
        return self._over(Verdict(Status.FAILED, status, self._named(failure)))

    def _is_early(self, failure: Failure) -> bool:
        """Whether the user's code raised before all stages were built."""
        return failure.cause is Cause.USER and self.state in _AT_ONCE

    @property
    def _first(self) -> bool:
        """Whether nothing of the run was there before this generation: what is said once."""
        return self.progress.attempts <= 1 and not self.progress.recorded

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
                self._send(peer, Abort(reason, AGAIN)),  # of a job before this one, or after it
            ]
        effects: list[Effect] = [
            Log(f"rank {hello.rank} joined: pid {hello.pid} on {hello.host}"),
            self._send(peer, self._welcome()),
        ]
        if not self.roster.missing:
            effects.append(Log("all ranks joined"))
            if differ := agree.on_versions(self._members):
                effects += self.fail(Failure(Cause.USAGE, differ))
        return effects

    def _welcome(self) -> Welcome:
        placement = self.placement
        options = self.options.to_json()
        return Welcome(options, self.run_dir, placement.held, placement.replicas, self.restore)

    def _on_heartbeat(self, member: Member, message: Heartbeat, now: float) -> list[Effect]:
        member.beats(message, now)
        if member.position.phase is not Phase.COMPILING or now < self._next_note:
            return []
        self._next_note = now + _NOTE_SECONDS
        at = place(replace(member.failure(Cause.USER, ""), stage=member.name))
        return [Warn(f"compiling: {at}; each shape that is new takes seconds", note=True)]

    def _on_failed(self, member: Member, message: Failed, now: float) -> list[Effect]:
        return self._reported(replace(message.failure, rank=message.rank), now)

    def _on_signalled(self, member: Member, message: Signalled, now: float) -> list[Effect]:
        """A notice, when it comes to the job as a whole; else somebody wants this worker gone."""
        if message.signal == _NOTICE:
            return self.save_asked()
        text = f"the worker of {member.name} was ended by {message.signal}"
        if self.launched or self.state in _AT_ONCE:
            return self._reported(member.failure(Cause.SIGNAL, text), now)
        return self.interrupt(now)

    def _on_store(self, member: Member, message: StoreRequest, now: float) -> list[Effect]:
        answers = self._rendezvous.handle(member.peer, message)
        return [self._send(peer, reply) for peer, reply in answers]

    def _on_described(self, member: Member, message: Described, now: float) -> list[Effect]:
        if len(self._awaited) == self.placement.ranks:  # refused before all others are started
            Blueprint.balance(self.options, self.placement, len(message.layers))
        member.described = message
        if not self._last_awaited(message.rank):
            return [Joined(message.rank)]
        if differ := agree.on_sources(self._members) or agree.on_settings(self._members):
            return self.fail(Failure(Cause.USAGE, differ))
        described = [m.described for m in self._members if m.described]
        self.blueprint = Blueprint.draw(self.options, self.placement, described)
        if self.layers and self.blueprint.names != self.layers:
            return self.fail(Failure(Cause.USAGE, self._other_layers(self.blueprint.names)))
        self._await(State.BUILDING)
        notes = described[self.placement.rank_of(0)].notes if self._first else ()
        return [
            *(Warn(text, note=True) for text in notes),
            *map(Log, self.blueprint.reasons()),
            *(self._send(m.peer, self.blueprint.plan(m.hello.rank)) for m in self._members),
        ]

    def _other_layers(self, names: Sequence[str]) -> str:
        """Of another model than the one that is gone on with."""
        was, now = len(self.layers), len(names)
        if was != now:
            what = f"{now} layers, and {was} in the checkpoint"
        else:
            pairs = zip(self.layers, names, strict=True)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
            what = f"a layer {new!r}, which is {old!r} in the checkpoint"
        return f"cannot go on from step {self.progress.steps}: model() gives {what}"

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
        self.loop.begin(alike(self.placement, [ready.batch for _, ready in workers], 1))
        effects: list[Effect] = [self.blueprint.planned(workers)]
        if left_out := sum(ready.left_out for _, ready in workers):
            text = f"--init-partial: {left_out} names of the model or of --init-from are left out"
            effects.append(Warn(f"{text}: the stages' logs have them"))
        if self._first and (shared := sharing(workers, self.placement.names)):
            effects.append(Warn(shared))
        due = Due(boundary=self.interrupted is not None)
        return [*effects, *self._go_on(due, now)]

    def _on_upcoming(self, member: Member, message: Upcoming, now: float) -> list[Effect]:
        """A mini-batch of another size is read: its schedule is made while this one drains."""
        assert self.blueprint
        most = self.options.microbatches
        if message.rank != self.placement.rank_of(0) or message.microbatches > most:
            raise ProtocolError(f"a mini-batch of {message.microbatches} micro-batches, not {most}")
        self.blueprint.prepare(message.microbatches)
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
        self.snapshots.ran(done, self._keepers)
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
        writing = self.snapshots.wrote(message.rank, message.step, message.files, message.error)
        if writing is None:
            return [Dropped(f"Saved of step {message.step}, which is not being written")]
        if self.state is State.SAVING and message.step == self._step:
            self._awaited.discard(message.rank)
        if writing.awaited:
            return []
        if writing.errors:
            return self._failed_to_save(message.step, writing.errors[0], now)
        if self.state is State.SAVING and message.step == self._step:
            self.state = State.COMMITTING
        return [self._commit(writing)]

    def _commit(self, writing: Writing) -> Commit:
        assert self.blueprint
        mark, named = writing.mark, self.blueprint.named
        return Commit(
            mark.step,
            mark.scaler,
            tuple(tuple(map(named, tie.names)) for tie in self.blueprint.ties),
            self.blueprint.names,
            tuple(file for rank in sorted(writing.files) for file in writing.files[rank]),
            mark.evaluation,
        )

    def _check_batch(self, batch: Batch | None) -> None:
        """Raise ProtocolError when it has more micro-batches than the job, or none."""
        most = self.options.microbatches
        if batch is not None and not 0 < batch.microbatches <= most:
            raise ProtocolError(f"a mini-batch of {batch.microbatches} micro-batches: not {most}")

    # Decisions.

    def _go_on(self, due: Due, now: float) -> list[Effect]:
        """What is due, and then what the loop says is next; an end or a checkpoint comes first."""
        if due.failure:
            return [*due.effects, *self.fail(due.failure)]
        boundary = due.boundary and not due.evaluates
        stops = boundary and self.interrupted is not None
        saved = self.progress.saved >= self.progress.steps
        if stops and saved:
            return [*due.effects, *self._over(self.stopped)]
        if boundary and saved:
            self.progress.asked = False
        wanted = boundary and not saved and self._save_due(now)
        holds_up = stops or self.loop.finished or (wanted and self._waits_for_disk)
        if due.saves or (holds_up and not saved):
            return self._save(due, now)
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
                if self._sent_schedule < 0 and self._first:
                    few = few_samples(following.batch, self.options.microbatches)
                    due = replace(due, effects=(*due.effects, *([Warn(few)] if few else [])))
                copy = self._copy(now, save=wanted) if boundary else None
                if wanted and copy is None:
                    text = f"no checkpoint of step {self.progress.steps}: others are still written"
                    due = replace(due, effects=(*due.effects, Log(text)))
                return self._tell(self._runs(following, due, copy), due)
            case Evaluate():
                self._step, self._evaluation = following.step, None
                self._await(State.EVALUATING if self.loop.answered else State.CALLING)
            case Wait():
                self._await(State.CALLING)
        return self._tell(self._alike(following, due), due)

    def _save(self, due: Due, now: float) -> list[Effect]:
        """Nothing goes on until the checkpoint of this step is complete."""
        slot = self.snapshots.take()
        self._step = self.progress.steps
        self._write(slot, now)
        self._await(State.SAVING)
        self._awaited = set(range(self._keepers))
        return self._tell(self._alike(Save(self._step, slot), due), due)

    def _write(self, slot: int, now: float) -> None:
        """A checkpoint of what is done is on its way."""
        self.progress.asked, self.progress.saved_at = False, now
        self.snapshots.write(self.progress.mark, slot, self._keepers)

    @property
    def _keepers(self) -> int:
        """The first so many ranks have the whole state: one replica, if not each a part of it."""
        placement = self.placement
        return placement.ranks if self.options.shard_optimizer else placement.workers

    @property
    def _waits_for_disk(self) -> bool:
        """Whether a checkpoint that is due holds up training.

        A loop of the user's own may change weights between two calls.
        """
        busy = bool(self.snapshots.writing) and self.options.checkpoint_busy == "wait"
        return busy or self.options.own_loop

    def _copy(self, now: float, *, save: bool) -> Copy | None:
        """What is copied while the next step runs; a checkpoint that finds no room is not."""
        snapshots, mark = self.snapshots, self.progress.mark
        due = snapshots.due(mark.step, self.progress.seconds)
        slot = snapshots.room if save else snapshots.free if due else None
        if slot is None:
            return None
        snapshots.copy(mark, slot)
        if save:
            self._write(slot, now)
        return Copy(mark.step, slot, save)

    def _save_due(self, now: float) -> bool:
        """Whether it is time for another checkpoint, or one is asked for."""
        if self.progress.asked:
            return True
        if self.options.checkpoint_every is None:
            return False
        every = Every.parse(self.options.checkpoint_every)
        return every.due(self.progress.steps, now - self.progress.saved_at)

    def _tell(self, told: Sequence[Advance], due: Due) -> list[Effect]:
        """Tell each worker what is next, where stage 0 is before what has been is recorded.

        It begins at once; the others have time until its first activation.
        """
        sends = [
            self._send(member.peer, advance)
            for member, advance in zip(self._members, told, strict=True)
        ]
        firsts = self.placement.ranks_of(0)
        others = [send for rank, send in enumerate(sends) if rank not in firsts]
        return [*(sends[rank] for rank in firsts), *due.effects, *others]

    def _alike(self, following: Next, due: Due) -> list[Advance]:
        """The same for all: one object, which is encoded once."""
        return [Advance(following, due.update)] * self.placement.ranks

    def _runs(self, run: RunStep, due: Due, copy: Copy | None) -> list[Advance]:
        """By rank; with its actions where they are not those of the step before."""
        assert self.blueprint
        placement, count = self.placement, run.batch.microbatches
        if self._sent_schedule == count:
            return [Advance(run, due.update, copy)] * placement.ranks
        self._sent_schedule = count
        texts: dict[int, list[str]] = {}
        told = []
        for rank in self.roster.members:
            built, _ = self.blueprint.of_replica(count, placement.replica_of(rank))
            if built.microbatches not in texts:
                texts[built.microbatches] = [format_actions(actions) for actions in built.workers]
            text = texts[built.microbatches][placement.worker_of(rank)]
            told.append(Advance(replace(run, actions=text), due.update, copy))
        return told

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
        if failure.cause in (Cause.LOST, Cause.HUNG, Cause.PEER, Cause.TRANSIENT):
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
        was, self.state_before = self.waiting, self.state
        self.state, self.end = State.OVER, end
        peers = self.roster.peers
        if isinstance(end, Verdict) and end.status is Status.DONE:
            finish = Advance(Finish())
            return [Log("ended: done"), *(self._send(peer, finish) for peer in peers)]
        how, status = (
            ("lost", AGAIN) if isinstance(end, Lost) else (end.status.value, end.exit_status)
        )
        if end.failure and end.failure.cause is Cause.LOST:
            status = AGAIN
        reason = how
        if end.failure:
            at = f" ({place(end.failure)})" if end.failure.position.step >= 0 else ""
            reason = end.failure.message + at
            if end.failure.cause is Cause.EXIT:  # who says the verdict says it, once
                reason = ""
        abort = self.abort = Abort(reason, status)
        return [
            Log(f"ended: {how}: {reason}; it was {was}"),
            *(self._send(peer, abort) for peer in peers),
        ]

    _Handler = Callable[["Generation", Member, Any, float], list[Effect]]
    _ALWAYS: ClassVar[dict[type, _Handler]] = {
        Heartbeat: _on_heartbeat,
        Failed: _on_failed,
        Signalled: _on_signalled,
        Saved: _on_saved,
        StoreRequest: _on_store,
    }
    _LEGAL: ClassVar[dict[State, dict[type, _Handler]]] = {
        State.JOINING: {Described: _on_described},
        State.BUILDING: {Ready: _on_ready},
        State.STEPPING: {StepDone: _on_step_done, Upcoming: _on_upcoming, Call: _on_call},
        State.EVALUATING: {EvaluationDone: _on_evaluated},
        State.CALLING: {Call: _on_call},
        State.SAVING: {},
        State.COMMITTING: {},
        State.OVER: {},
    }
