"""The lifecycle of a generation: its members, their silence, and its end. Pure.

A failure or an interrupt leads from any state to OVER. The first cause is kept: a secondary
failure, as a closed connection that a neighbour reports, becomes the cause only if no other arrives
in time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeworker.coordinator import report
from pipeworker.coordinator.effects import Dropped, Effect, Log
from pipeworker.coordinator.ending import INTERRUPTED, End, FirstCause, JobEnd, Lost, Status
from pipeworker.coordinator.roster import Member
from pipeworker.coordinator.waiting import BEFORE_STEPS, COMPUTING, SAVES, State, Waiting
from pipeworker.errors import UsageError
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.wire.lines import CannotStart, HostLost, Warned, WorkerExited
from pipeworker.wire.messages.directions import Advance, Finish
from pipeworker.wire.messages.presence import Abort, Failed, Heartbeat, Signalled
from pipeworker.wire.messages.step import EndPass

_COMPILING_INTERVAL = 20.0
"""Seconds between two notes that a layer is being compiled."""
_SAVE_SIGNAL = "SIGUSR1"
"""The signal that clusters send before they take a node away."""
MAX_FAILED_SAVES = 1
"""Checkpoints in a row that may fail before the job ends."""
_LOSSES = (Cause.LOST, Cause.HUNG, Cause.PEER, Cause.SNAPSHOT, Cause.TRANSIENT)
"""Causes that need not occur again."""

_NOT_SAVED = (Cause.LOST, Cause.HUNG, Cause.PEER, Cause.DIVERGED)
"""Causes after which a script's job writes no last checkpoint."""


@dataclass(slots=True)
class Lifecycle(Waiting):
    """The part of a generation that watches its workers and ends it.

    Attributes:
        abort: the message sent to workers at its end, unless the job was done.
        interrupted: the time at which the user asked to stop, if so.
        stopped: the end of the job once the interrupt takes effect.
        last_end: the end of a script's job, while its last checkpoint is written.
        last_state: the state in which it ended.
    """

    end: End | None = field(default=None, init=False)
    abort: Abort | None = field(default=None, init=False)
    interrupted: float | None = field(default=None, init=False)
    stopped: JobEnd = field(default=INTERRUPTED, init=False)
    last_end: JobEnd | None = field(default=None, init=False)
    last_state: State = field(default=State.JOINING, init=False)
    _cause: FirstCause = field(init=False)
    _next_note: float = field(default=0.0, init=False)
    _standstill_limit: float = field(init=False)
    _ending_since: float | None = field(default=None, init=False)
    _stays: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        Waiting.__post_init__(self)
        self._cause = FirstCause(self.roster)
        self._standstill_limit = self.roster.limit

    # Events.

    def protocol_violation(self, peer: bytes, text: str) -> list[Effect]:
        """End the job because a member sent an invalid message; do nothing for other peers."""
        member = self.roster.member(peer)
        if member is None:
            return []
        message = f"{member.full_name} sent an invalid message: {text}"
        return self.fail(member.failure(Cause.INTERNAL, message))

    def worker_exited(self, report: WorkerExited, now: float) -> list[Effect]:
        """Handle the exit of a worker process that was not asked to end."""
        return self._failure_reported(self._cause.worker_exited(report), now)

    def cannot_start(self, report: CannotStart) -> list[Effect]:
        """End the generation because the system cannot start one of its workers."""
        return self.over(Lost(self._named(Failure(Cause.LOST, report.text, rank=report.rank))))

    def host_lost(self, report: HostLost) -> list[Effect]:
        """End the generation because a host, and the state in its memory, is gone."""
        self.snapshots.host_lost(survives=report.survives)
        names = [self.placement.names(rank) for rank in report.ranks if rank < self.placement.ranks]
        return self.over(Lost(Failure(Cause.LOST, report.text, stage=", ".join(names))))

    def interrupt(self, now: float) -> list[Effect]:
        """Stop the job at the end of the step, or at once if no step has begun.

        An evaluation pass of a job file ends with what has been read.
        """
        if self.interrupted is not None:
            return []
        self.interrupted = now
        unsaved = self.progress.has_unsaved(self.progress.steps)
        if self.options.evaluate_only or (self.state in BEFORE_STEPS and not unsaved):
            return self.over(self.stopped)
        effects: list[Effect] = []
        if self.state is State.EVALUATING and not self.options.own_loop:
            reader = self.roster.members[self.placement.rank_of(0)]
            effects.append(self.send(reader.peer, EndPass(self._step)))
        return [*effects, Log(f"interrupted: stopping at the end of the step, {self.waiting}")]

    def tick(self, now: float, suspended: float) -> list[Effect]:
        """Act on timeouts; the seconds for which the coordinator was suspended count for none."""
        self.roster.suspended(suspended, now)
        self._cause.suspended(suspended)
        if self.interrupted is not None:
            self.interrupted = min(now, self.interrupted + suspended)
        if self._ending_since is not None:
            self._ending_since = min(now, self._ending_since + suspended)
        if self.last_end is not None:
            return self._last_save_expired(self.last_end, now)
        if self._interrupt_expired(now):
            return self._give_up(now)
        failure = self._cause.expired(now)
        if failure is not None and failure.cause is Cause.SIGNAL:
            if ends := self._signalled(failure, now):
                return ends
            failure = None  # the worker is watched as before
        failure = failure or self._timed_out(now)
        return self._standstill(now) if failure is None else self._ended_by(failure)

    def checkpoint_requested(self) -> list[Effect]:
        """Save a checkpoint at the end of this step."""
        self.progress.save_requested = True
        return [Log("a checkpoint was requested")]

    def fail(self, failure: Failure) -> list[Effect]:
        """End the job by a failure; a user's mistake before the first step has status 2."""
        status = 1
        raised_early = failure.cause is Cause.USER and self.state in BEFORE_STEPS
        if self.progress.started:
            if failure.cause in (Cause.USAGE, Cause.EXIT):
                failure = replace(failure, cause=Cause.USER)
        elif failure.cause is Cause.EXIT:
            status = failure.status
        elif failure.cause in (Cause.USAGE, Cause.DIVERGED) or raised_early:
            status = UsageError.exit_status
        return self.over(JobEnd(Status.FAILED, status, self._named(failure)))

    # Messages that are handled in every state.

    def on_heartbeat(self, member: Member, message: Heartbeat, now: float) -> list[Effect]:
        """Store a worker's position, and note from time to time that a layer is being compiled."""
        member.heartbeat(message, now)
        if member.beat.position.phase is not Phase.COMPILING or now < self._next_note:
            return []
        self._next_note = now + _COMPILING_INTERVAL
        at = report.location(replace(member.failure(Cause.USER, ""), stage=member.name))
        return [Warned(f"compiling: {at}; each new shape takes seconds", note=True)]

    def on_failed(self, member: Member, message: Failed, now: float) -> list[Effect]:
        """Handle a failure that a worker reports."""
        self._stays = self._stays or message.stays
        interrupts = self.options.own_loop and message.failure.cause is Cause.SIGNAL
        if interrupts and self.last_end is None:  # else the interrupt has reached several ranks
            return self.over(self.stopped)  # KeyboardInterrupt has left the user's loop
        return self._failure_reported(replace(message.failure, rank=message.rank), now)

    def on_signalled(self, member: Member, message: Signalled, now: float) -> list[Effect]:
        """Save, interrupt the job or lose the worker, by the signal and the state."""
        if message.signal == _SAVE_SIGNAL:
            return self.checkpoint_requested()
        text = f"the worker of {member.name} was ended by {message.signal}"
        if self.launched or self.state in BEFORE_STEPS:
            # No position: no layer is the cause, and the worker runs on until it is replaced.
            return self._failure_reported(member.failure(Cause.SIGNAL, text, Position()), now)
        return self.interrupt(now)

    # Timeouts.

    def _interrupt_expired(self, now: float) -> bool:
        """Return whether a job that was interrupted does not reach the end of its step.

        A loop of the user's own may never make another call. Checkpoints are always completed, and
        new workers, which are to save a snapshot, may take as long to build as the first ones.
        """
        builds = self.state in BEFORE_STEPS and not self.roster.missing
        if self.interrupted is None or self.state in SAVES or builds:
            return False
        elapsed, limit = now - self.interrupted, self.roster.limit
        if self.options.own_loop:
            return elapsed > self.timings.interrupt
        return elapsed > limit and self.roster.none_moved(limit, now)

    def _give_up(self, now: float) -> list[Effect]:
        """End a job that was interrupted without its step, which new workers may save."""
        roster, limit = self.roster, self.roster.limit
        if not self.launched:
            return self.over(self.stopped)
        if self.state in BEFORE_STEPS:
            text = f"step {self.progress.steps} is not saved: {roster.absent(limit).message}"
            return [Warned(text), *self.over(self.stopped)]
        failure = roster.unheard(now) or roster.stalled(now, limit)
        failure = failure or roster.deadlock(self.awaited, limit)
        return self.over(Lost(self._named(failure), stops=True))

    def _timed_out(self, now: float) -> Failure | None:
        """Return the failure of the first limit that is exceeded, or None.

        A worker that no launcher started may stand in a debugger, so it may stall.
        """
        failure = self.roster.unheard(now)
        if failure is None and self.state is not State.CALLING:
            failure = self.roster.deadlocked(self.awaited)
        if failure is None and self.launched and self.state in COMPUTING:
            failure = self.roster.stalled(now, self.roster.stall_limit)
        return failure

    def _standstill(self, now: float) -> list[Effect]:
        """Note where workers make no progress; the next note takes twice as long.

        The stack is as old as the limit when it arrives.
        """
        seconds = self._standstill_limit
        if not self.launched or self.state not in COMPUTING:
            return []
        member = self.roster.standing(seconds + self.timings.ping, now)
        if member is None or member.beat.position.phase is Phase.COMPILING:
            return []
        self._standstill_limit = 2 * seconds
        return [Warned(report.standstill(member, seconds, self.roster.stall_limit), note=True)]

    def _last_save_expired(self, end: JobEnd, now: float) -> list[Effect]:
        """End the job without its last checkpoint if a worker is lost or does not answer.

        A worker between two calls of the user's loop answers only if it makes another call.
        """
        if self._ending_since is None:
            self._ending_since = now
        awaited = [self.roster.members[rank] for rank in sorted(self.awaited)]
        if any(member.beat.position.phase is Phase.SAVING for member in awaited):
            self._ending_since = now
        idle = all(member.beat.waiting for member in awaited)
        limit = self.timings.interrupt if idle else self.roster.limit
        lost = self.roster.unheard(now)
        if lost is None and (not awaited or now - self._ending_since <= limit):
            return []
        names = ", ".join(member.name for member in awaited)
        reason = lost.message if lost else f"{names} did not answer within {limit:g} s"
        return [Warned(f"step {self.progress.steps} is not saved: {reason}"), *self.over(end)]

    # Endings.

    def _failure_reported(self, failure: Failure, now: float) -> list[Effect]:
        if self.last_end is not None and failure.cause is not Cause.LOST:
            return [Log(f"rank {failure.rank}, at the end: {failure.message}")]
        repeated = failure.rank in self._cause.reporters
        cause = self._cause.report(failure, now)
        if cause is None:
            text = f"secondary failure of rank {failure.rank}: {failure.message}"
            return [Dropped(text) if repeated else Log(text)]
        return self._ended_by(cause)

    def _signalled(self, failure: Failure, now: float) -> list[Effect]:
        """End the worker, or the job, that a signal without another cause was meant for.

        Without a launcher no exit is reported, so silence counts as one.
        """
        if self.interrupted is None:
            return self.over(Lost(self._named(failure)) if self.launched else self.stopped)
        if not self.launched and failure.rank in self.roster.silent(now):
            return self.over(self.stopped)
        return []  # the whole job was signalled, and the worker stays until the step ends

    def _ended_by(self, failure: Failure) -> list[Effect]:
        """End the generation by a worker's failure, or by its loss."""
        if failure.cause is Cause.SNAPSHOT:
            self.snapshots.last = None  # the next generation begins with a checkpoint
        if failure.cause in _LOSSES:
            return self.over(Lost(self._named(failure)))
        return self.fail(failure)

    def _named(self, failure: Failure) -> Failure:
        """Return a failure with the name of its layer's stage, or of all stages of its rank.

        The host is part of it if the job has several, unless the message has it.
        """
        if failure.rank < 0 or failure.rank >= self.placement.ranks:
            return failure
        name = self.placement.names(failure.rank)
        stage = self.blueprint.stage_at(failure.position) if self.blueprint else -1
        if self.placement.replicas == 1 and stage in self.placement.stages_of(failure.rank):
            name = f"stage {stage}"
        member = self.roster.members.get(failure.rank)
        if member and self.roster.has_several_hosts and member.hello.host not in failure.message:
            name = f"{name} on {member.hello.host}"
        return replace(failure, stage=name)

    def saves_before(self, end: JobEnd) -> bool:
        """Return whether a last checkpoint is written before the end of a script's job.

        No memory outlasts its workers, so they save what they have learned, unless one is lost.
        """
        failure, progress = end.failure, self.progress
        stays = self.options.own_loop or (self._stays and end.status is Status.FAILED)
        if not stays or self.state in BEFORE_STEPS:
            return False
        if self.state is State.EVALUATING and not self.options.own_loop:
            return False  # the state of this step includes its evaluation
        if failure is not None and failure.cause in _NOT_SAVED:
            return False
        if self.state in SAVES and failure is not None and failure.rank in self.awaited:
            return False  # it has failed in its part of the checkpoint
        return progress.has_unsaved(progress.steps) and progress.failed_saves <= MAX_FAILED_SAVES

    def over(self, end: End) -> list[Effect]:
        """End the generation, and its workers; a user's own loop may first write a checkpoint."""
        if self.last_end is not None:
            return self._end(self.last_end)
        if isinstance(end, JobEnd) and self.saves_before(end):
            self.last_end = end
            return [Log(f"{report.end_status(end)}; saving first"), *self.save_last()]
        return self._end(end)

    def _end(self, end: End) -> list[Effect]:
        waiting, self.last_state = self.waiting, self.state
        self.state, self.end = State.OVER, end
        peers = self.roster.peers
        if isinstance(end, JobEnd) and end.status is Status.DONE:
            finish = Advance(Finish())
            return [Log("ended: done"), *(self.send(peer, finish) for peer in peers)]
        abort = self.abort = report.abort_message(end)
        return [
            Log(f"ended: {report.end_status(end)}: {abort.reason}, while {waiting}"),
            *(self.send(peer, abort) for peer in peers),
        ]
