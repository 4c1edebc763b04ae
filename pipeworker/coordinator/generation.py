"""One incarnation of a job's workers: a pure state machine.

The table at the end of the class says which messages each state accepts, and which method handles
them. All other messages are dropped. The usual course::

    JOINING ── all Described ──▶ BUILDING ── all Ready ──▶ STEPPING ── all StepDone ──▶ STEPPING ...
    ── the loop returns Finish ──▶ SAVING ── all Saved ──▶ COMMITTING ── committed ──▶ OVER

MEASURING stands between JOINING and BUILDING, if facts of layers are wanted and not known, and
PLANNING if there are facts (:mod:`pipeworker.coordinator.fact_finding`), EVALUATING between two
steps, CALLING while the next call of the user's own loop is awaited. Training waits in SAVING and
COMMITTING, at the end of a job or for the disk; a checkpoint that is written beside steps has no
state. A failure or an interrupt leads from any state to OVER
(:mod:`pipeworker.coordinator.lifecycle`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pipeworker.coordinator import consistency, report
from pipeworker.coordinator.blueprint import Blueprint
from pipeworker.coordinator.effects import Discard, Dropped, Effect, Log
from pipeworker.coordinator.ending import JobEnd, Status
from pipeworker.coordinator.events import CheckpointEnded
from pipeworker.coordinator.fact_finding import FactFinding
from pipeworker.coordinator.lifecycle import MAX_FAILED_SAVES, Lifecycle
from pipeworker.coordinator.roster import Member
from pipeworker.coordinator.steps.call_loop import CallLoop
from pipeworker.coordinator.steps.loop import Due, FileLoop, common_batch
from pipeworker.coordinator.store import KeyValueStore
from pipeworker.coordinator.waiting import SAVES, State
from pipeworker.errors import AGAIN, ProtocolError, UsageError
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.step import Batch, Evaluation
from pipeworker.plan.figures import plural
from pipeworker.wire.lines import Activity, Joined, Warned
from pipeworker.wire.messages.checkpoint import Saved
from pipeworker.wire.messages.directions import Advance, Finish, FromWorker
from pipeworker.wire.messages.plan import Described, Ready
from pipeworker.wire.messages.presence import Abort, Failed, Heartbeat, Hello, Signalled, Welcome
from pipeworker.wire.messages.profile import Measured
from pipeworker.wire.messages.step import (
    Call,
    Evaluate,
    EvaluationDone,
    RunStep,
    StepDone,
    Upcoming,
    Wait,
)
from pipeworker.wire.messages.store import StoreRequest


@dataclass(slots=True)
class Generation(FactFinding):
    """One incarnation of a job's workers, and the messages that each of its states accepts."""

    _store: KeyValueStore = field(init=False, default_factory=KeyValueStore)
    _evaluation: Evaluation | None = field(init=False, default=None)
    _pass_failure: Failure | None = field(init=False, default=None)

    # Events.

    def message_received(self, peer: bytes, message: FromWorker, now: float) -> list[Effect]:
        """Handle a message of this generation, by the table of states."""
        name = type(message).__name__
        if isinstance(message, Hello):
            return self._on_hello(peer, message, now)
        member = self.roster.member(peer)
        if member is None or member.hello.rank != message.rank:
            text = f"{name} as rank {message.rank}"
            dropped = Dropped(f"{text}, which is not its sender's rank")
            return self.protocol_violation(peer, text) or [dropped]
        member.last_heard, member.unreachable_since = now, None
        handler = self.ALWAYS.get(type(message)) or self.LEGAL[self.state].get(type(message))
        if handler is None:
            return [Dropped(f"{name} while {self.waiting}")]
        if isinstance(message, StepDone | EvaluationDone) and message.step != self._step:
            return [Dropped(f"{name} of step {message.step} in step {self._step}")]
        try:
            return handler(self, member, message, now)
        except UsageError as error:  # no plan, or no schedule for a mini-batch of this size
            return self.fail(Failure(Cause.USAGE, str(error)))
        except ProtocolError as error:
            return self.protocol_violation(peer, f"{name}: {error}")

    def checkpoint_ended(self, event: CheckpointEnded, now: float) -> list[Effect]:
        """Continue after a checkpoint that is complete, or handle its failure."""
        step = event.step
        if not self.snapshots.checkpoint_ended(step, event.path):
            return [Dropped(f"the checkpoint of step {step} while {self.waiting}")]
        if event.error:
            return self._save_failed(step, event.error, now)
        self.progress.saved, self.progress.failed_saves, self.progress.outdated = step, 0, False
        if self.state is not State.COMMITTING or step != self._step:
            return [Log(f"the checkpoint of step {step} is complete")]
        if self.last_end is not None:
            return self.over(self.last_end)
        if self.interrupted is not None and (self.stopped.failure or not self.loop.finished):
            return self.over(self.stopped)
        return self._advance(self._due, now)

    @property
    def activity(self) -> Activity:
        """The present activity of the workers, from their last heartbeats."""
        memory, reader = self.roster.memory(), self.roster.members.get(self.placement.rank_of(0))
        if self.state is not State.EVALUATING or reader is None:
            return Activity(memory)
        return Activity(memory, reader.beat.evaluated, reader.beat.evaluation_length)

    # Messages, by the table at the end.

    def _on_hello(self, peer: bytes, hello: Hello, now: float) -> list[Effect]:
        if self.roster.member(peer):
            return [Dropped(f"Hello of rank {hello.rank}: its sender has joined")]
        if not self.roster.admit(peer, hello, now):
            reason = f"rank {hello.rank} has already joined or is not part of this job"
            return [
                Dropped(f"Hello of {hello.host}/{hello.pid}: {reason}"),
                self.send(peer, Abort(reason, AGAIN)),  # of an earlier or a later job
            ]
        placement, options = self.placement, self.options.to_json()
        welcome = Welcome(options, self.run_dir, placement.held, placement.replicas, self.restore)
        effects: list[Effect] = [
            Log(f"rank {hello.rank} joined: pid {hello.pid} on {hello.host}"),
            self.send(peer, welcome),
        ]
        if not self.roster.missing:
            effects.append(Log("all ranks joined"))
            if mismatch := consistency.version_mismatch(self.members):
                effects += self.fail(Failure(Cause.USAGE, mismatch))
        return effects

    def _on_store(self, member: Member, message: StoreRequest, now: float) -> list[Effect]:
        replies = self._store.handle(member.peer, message)
        return [self.send(peer, reply) for peer, reply in replies]

    def _on_described(self, member: Member, message: Described, now: float) -> list[Effect]:
        if len(self.awaited) == self.placement.ranks:  # reject it before other workers start
            Blueprint.balance(self.options, self.placement, message)
        member.described = message
        if not self.is_last(message.rank):
            return [Joined(message.rank)]
        members = self.members
        mismatch = consistency.source_mismatch(members) or consistency.settings_mismatch(members)
        if mismatch:
            return self.fail(Failure(Cause.USAGE, mismatch))
        return [*self._changed_sources(), *self.find_facts(now)]

    def _changed_sources(self) -> list[Effect]:
        """Warn of files that have changed since earlier workers of the job loaded them."""
        members, known = self.members, self.progress.sources
        changed = consistency.changed_sources(members, known)
        known.update(
            (s.name, s.digest) for m in members if m.described for s in m.described.sources
        )
        if not changed:
            return []
        text = f"{', '.join(changed)}: changed while the job runs; from here on the workers run"
        return [Warned(f"{text} the changed code, whose numbers may differ")]

    def _on_ready(self, member: Member, message: Ready, now: float) -> list[Effect]:
        assert self.blueprint
        self._check_batch(message.batch)
        self.blueprint.check_built(message)
        member.ready = message
        if not self.is_last(message.rank):
            return []
        workers = [(m.hello, m.ready) for m in self.members if m.ready]
        self.blueprint.check_apart(ready for _, ready in workers)
        batch = common_batch(self.placement, [ready.batch for _, ready in workers], 1)
        plan, line = report.planned(self.blueprint, workers, self.progress.facts)
        self.loop.start(batch, line.steps)
        effects: list[Effect] = [plan, line]
        if left_out := sum(ready.unmatched for _, ready in workers):
            are, them = ("is", "it") if left_out == 1 else ("are", "them")
            names = f"{plural(left_out, 'name')} of the model or of --init-from {are} left out"
            effects.append(Warned(f"--no-init-strict: {names}; the workers' logs list {them}"))
        if self.is_first:
            shared = report.shared_accelerators(workers, self.placement.names)
            effects += [Warned(shared)] if shared else []
        is_best = self.progress.lacks_best  # the earlier workers had not written it
        can_save = is_best or self.interrupted is not None
        return [*effects, *self._advance(Due(can_save=can_save, is_best=is_best), now)]

    def _on_upcoming(self, member: Member, message: Upcoming, now: float) -> list[Effect]:
        """Make the schedule of a mini-batch of another size while the current one drains."""
        assert self.blueprint
        limit, count = self.options.microbatches, message.microbatches
        if message.rank != self.placement.rank_of(0) or count > limit:
            raise ProtocolError(f"a mini-batch of {count} micro-batches, not {limit}")
        self.blueprint.prepare(count)
        return []

    def _on_step_done(self, member: Member, message: StepDone, now: float) -> list[Effect]:
        self._check_batch(message.batch)
        member.done = message
        member.peak_memory = max(member.peak_memory, message.peak_memory)
        if not self.is_last(message.rank):
            return []
        done = [m.done for m in self.members if m.done]
        if uses := [use for one in done for use in one.borrowed]:
            assert self.blueprint
            self.blueprint.check_borrowed([m.ready for m in self.members if m.ready], uses)
        lacks, self.lacks = self.lacks, []
        warnings = [Warned(text) for text in self.snapshots.step_done(done, self.writers)]
        warnings += [Warned(text, note=True) for one in done for text in one.notes]
        due = self.loop.step_done(done, now)
        if self.interrupted is not None and isinstance(self.loop, FileLoop) and self.loop.evaluates:
            due = self.loop.leave_evaluation(due)
        return [*lacks, *warnings, *self._advance(due, now)]

    def _on_evaluated(self, member: Member, message: EvaluationDone, now: float) -> list[Effect]:
        if message.result and message.rank != self.placement.rank_of(self.placement.stages - 1):
            raise ProtocolError("a result from a worker without the last stage")
        member.peak_memory = max(member.peak_memory, message.peak_memory)
        if message.failure and not isinstance(self.loop, CallLoop):
            raise ProtocolError("a pass that failed, in a job that ends with its first failure")
        self._evaluation = message.result or self._evaluation
        if message.failure and not self._pass_failure:
            self._pass_failure = self._named(replace(message.failure, rank=message.rank))
        if not self.is_last(message.rank):
            return []
        if isinstance(self.loop, CallLoop) and (self._pass_failure or self.loop.predicts):
            return self._advance(self.loop.pass_done(self._pass_failure), now)
        if self.interrupted is not None and isinstance(self.loop, FileLoop):
            return self._advance(self.loop.leave_evaluation(Due()), now)
        if self._evaluation is None:
            text = "no worker reported the result of the evaluation pass"
            return self.fail(Failure(Cause.INTERNAL, text))
        return self._advance(self.loop.evaluation_done(self._evaluation), now)

    def _on_call(self, member: Member, message: Call, now: float) -> list[Effect]:
        early = self.state is State.STEPPING and message.rank in self.awaited
        if early or not isinstance(self.loop, CallLoop):
            return [Dropped(f"Call while {self.waiting}")]
        self._check_batch(message.batch)
        self.awaited.discard(message.rank)
        due = self.loop.call_received(message)
        return [] if due is None else self._advance(due, now)

    def _on_saved(self, member: Member, message: Saved, now: float) -> list[Effect]:
        step = message.step
        writing = self.snapshots.part_written(message)
        if writing is None:
            return [Dropped(f"Saved of step {step}, which is not being written")]
        if not writing.beside:
            self.awaited.discard(message.rank)
        if writing.awaited:
            return []
        if writing.errors:
            return self._save_failed(step, writing.errors[0], now)
        if not writing.beside:
            self.state = State.COMMITTING
        assert self.blueprint
        return [self.blueprint.commit(writing)]

    def _check_batch(self, batch: Batch | None) -> None:
        """Raise ProtocolError if `batch` has more micro-batches than the job, or none."""
        limit = self.options.microbatches
        if batch is not None and not 0 < batch.microbatches <= limit:
            raise ProtocolError(f"a mini-batch of {batch.microbatches} micro-batches, not {limit}")

    # Commands.

    def _advance(self, due: Due, now: float) -> list[Effect]:
        """Perform what is due, then send the next command, or end, or save a checkpoint first."""
        if due.failure and not due.loses_nothing:
            return [*due.effects, *self.fail(due.failure)]
        if due.failure:
            self.interrupted, self.stopped = now, JobEnd(Status.FAILED, 1, due.failure)
        stops = due.can_save and self.interrupted is not None
        steps = self.progress.steps
        complete = self.progress.saved >= steps and not self.progress.outdated
        is_completing = self.snapshots.is_completing(steps)
        saved = self.progress.saved >= steps or is_completing
        if stops and complete:
            return [*due.effects, *self.over(self.stopped)]
        if due.can_save and (complete or is_completing):
            self.progress.save_requested = False
        save_due = due.can_save and not saved and (due.is_best or self.save_is_due(now))
        blocks = stops or self.loop.finished or (save_due and self.save_blocks(due))
        if due.must_save or (blocks and not complete):
            return self.save(due, now)
        command = self.loop.next(now)
        match command:
            case Finish():
                return [*due.effects, *self.over(JobEnd(Status.DONE, 0))]
            case None:
                self.await_all(State.CALLING)
                return list(due.effects)
            case RunStep():
                return self._run(command, due, now, save=save_due)
            case Evaluate():
                self._step, self._evaluation, self._pass_failure = command.step, None, None
                self.await_all(State.EVALUATING)
            case Wait():
                self.await_all(State.CALLING)
        return self.send_all([Advance(command, due.update)] * self.placement.ranks, due.effects)

    def _run(self, run: RunStep, due: Due, now: float, *, save: bool) -> list[Effect]:
        """Run a mini-batch; between two steps the state may be copied, and saved, meanwhile."""
        assert self.blueprint
        self._step = run.step
        self.await_all(State.STEPPING)
        effects = [*due.effects]
        if self.is_first and not self.blueprint.has_run:
            ready = [member.ready for member in self.members if member.ready]
            effects += report.small_batches(run.batch, ready, self.options)
        copy = self.begin_copy(now, save=save) if due.can_save else None
        if save and copy is None:
            step = self.progress.steps
            effects.append(Log(f"no checkpoint of step {step}: earlier ones are being written"))
        cost, sampling = self.blueprint.cost_to_record(run.batch), self.progress.sampling
        if self.options.trace or sampling.takes(cost, now, begins=not run.first):
            run = replace(run, recorded=True)
        return self.send_all(self.blueprint.run_messages(run, due.update, copy), effects)

    # Checkpoints.

    def _save_failed(self, step: int, text: str, now: float) -> list[Effect]:
        """Retry a checkpoint that failed if training waits for it; end the job after the second."""
        effects: list[Effect] = [Discard(step)]
        self.progress.failed_saves += 1
        if self.last_end is not None:
            warning = Warned(f"step {step} is not saved: {text}")
            ends = step == self._step  # else the last checkpoint comes behind it
            return [*effects, warning, *(self.over(self.last_end) if ends else ())]
        if self.progress.failed_saves > MAX_FAILED_SAVES:
            return [*effects, *self.fail(Failure(Cause.INTERNAL, text))]
        blocks = self.state in SAVES and step == self._step
        more = "retrying" if blocks else "training continues until the next one"
        effects.append(Warned(f"the checkpoint of step {step} failed: {text}; {more}"))
        if blocks:
            return [*effects, *self.save(self._due, now)]
        self.progress.evaluations.lose([step])
        return effects

    _Handler = Callable[["Generation", Member, Any, float], list[Effect]]
    ALWAYS: ClassVar[dict[type, _Handler]] = {
        Heartbeat: Lifecycle.on_heartbeat,
        Failed: Lifecycle.on_failed,
        Signalled: Lifecycle.on_signalled,
        Saved: _on_saved,
        StoreRequest: _on_store,
    }
    """The messages that are handled in every state."""
    LEGAL: ClassVar[dict[State, dict[type, _Handler]]] = {
        State.JOINING: {Described: _on_described},
        State.MEASURING: {Measured: FactFinding.on_measured},
        State.PLANNING: {},
        State.BUILDING: {Ready: _on_ready},
        State.STEPPING: {StepDone: _on_step_done, Upcoming: _on_upcoming, Call: _on_call},
        State.EVALUATING: {EvaluationDone: _on_evaluated},
        State.CALLING: {Call: _on_call},
        State.SAVING: {},
        State.COMMITTING: {},
        State.OVER: {},
    }
    """The messages that each state accepts besides."""
