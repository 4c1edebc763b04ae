"""A job: the state that outlasts its generations of workers. Pure: events in, effects out.

Time is an argument; nothing here reads a clock, a file or a socket. The same events give the same
effects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from typing_extensions import assert_never

from pipeworker.coordinator import events
from pipeworker.coordinator.effects import Discard, Dropped, Effect, JobState, Log, Send, Withdraw
from pipeworker.coordinator.ending import JobEnd, Lost, Status
from pipeworker.coordinator.events import Event, MessageReceived
from pipeworker.coordinator.generation import Generation
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.report import describe, with_location
from pipeworker.coordinator.restart_policy import ElasticPolicy, RestartPolicy
from pipeworker.coordinator.steps.progress import Progress, Start
from pipeworker.coordinator.steps.snapshots import Snapshots, snapshot_line
from pipeworker.coordinator.waiting import BEFORE_STEPS, State
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.job.options import Options
from pipeworker.plan.figures import plural
from pipeworker.plan.placement import Placement
from pipeworker.plan.text import name_of
from pipeworker.timings import DEFAULT, Timings
from pipeworker.wire import lines
from pipeworker.wire.lines import CannotStart, Restart, Warned, WorkerExited
from pipeworker.wire.messages.presence import Hello

SLOTS = 2
"""Slots for copies of a worker's state if workers can be replaced: one is always complete."""
_NEW_JOB = Start()


@dataclass(frozen=True, slots=True)
class _Recovery:
    """A restart that has not yet run a step: its cause, the steps done before it, and when."""

    cause: str
    steps: int
    at: float


class Job:
    """One job, from the first Hello to the verdict.

    Args:
        started: the time, in seconds; the first generation begins at once.
        generation: the number of the first generation.
        replaceable: whether lost workers can be replaced.
        launched: whether a launcher, rather than a rank of the job, is the coordinator's parent.
        start: the state from which the job continues.
        cores: cores of the coordinator's host.
    """

    def __init__(
        self,
        options: Options,
        run_dir: str,
        started: float,
        *,
        timings: Timings = DEFAULT,
        generation: int = 1,
        replaceable: bool = False,
        launched: bool = False,
        start: Start = _NEW_JOB,
        cores: int = 1,
    ) -> None:
        self._options, self._run_dir, self._timings = options, run_dir, timings
        self._started = started - start.elapsed
        least = options.min_stages or options.stages
        present = start.stages or options.stages
        self._elastic = ElasticPolicy(options.stages, least, timings.grow, present)
        limit = options.max_restarts if replaceable else 0
        self._restarts = RestartPolicy(limit, list(start.causes))
        scaler = LossScaler() if options.precision == "fp16" else None
        self._initial, self._layers = JobState(0, scaler), start.layers
        self.progress = Progress.after(start, options, started)
        slots = SLOTS if replaceable and options.max_restarts else 1
        self.snapshots = Snapshots(slots, options.snapshot_every, cores)
        self.snapshots.last = start.snapshot
        if start.on_disk:
            state, restore = start.on_disk
            self.snapshots.on_disk = replace(state, scaler=state.scaler or scaler), restore
        self.progress.roll_back(self._newest_state)
        self._launched = launched or replaceable
        self._recovery: _Recovery | None = None
        if start.causes:  # the last one is the loss of the earlier coordinator
            self._recovery = _Recovery(start.causes[-1], start.recorded, started)
        self._pending_end: JobEnd | None = None  # takes effect once the last snapshot is saved
        self._peaks: tuple[int, ...] = ()
        self._activity = lines.Activity()
        self.generation = self._begin(generation, started)
        self.end: JobEnd | None = None

    @property
    def placement(self) -> Placement:
        """The worker of each stage, which a plan may change."""
        return self.generation.placement

    @property
    def peers(self) -> list[bytes]:
        """The transport identities of all workers that have joined."""
        return self.generation.roster.peers

    @property
    def restored_step(self) -> int:
        """The step of the checkpoint that workers are about to read; -1 if there is none."""
        restore = self.generation.restore
        reads = restore and restore.path and self.generation.state in BEFORE_STEPS
        return restore.step if restore and reads else -1

    def now(self, now: float) -> dict[str, Any]:
        """Return what the job does at present, as JSON has it."""
        generation = self.generation
        return {
            "generation": generation.number,
            "restarts": len(self._restarts.causes),
            "doing": generation.state.name.lower(),
            "workers": generation.roster.now(now),
        }

    @property
    def awaits_late_workers(self) -> bool:
        """Whether workers may still join a job that has failed: a launcher ends its own."""
        return bool(self.generation.roster.missing) and not self._launched

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle an event; return the effects to perform, in order."""
        if self.end:
            return self._handle_late(event, now)
        before = self.snapshots.last
        effects = self._dispatch(event, now)
        last, end = self.snapshots.last, self.generation.end
        if last and last is not before:  # reported before its predecessor is overwritten
            effects = [snapshot_line(*last), *effects]
        if end is None:
            effects += self._report_recovery(now)
            if isinstance(event, events.Tick):
                effects += self._new_activity()
            if self._may_grow(now):
                self._elastic.grow()
                text = f"the job tries again with all {self._workers_text}"
                return [*effects, *self._restart([], text, now, recovers=False)]
            return effects
        if self._pending_end is not None:
            if end is not self._pending_end and end.failure:
                text = with_location(end.failure)
                effects.append(Warned(f"step {self.progress.steps} is not saved: {text}"))
            end = self._pending_end
        elif isinstance(end, JobEnd) and end.failure and self._is_worth_saving(end.failure):
            return self._save_first(end, end.failure, effects, now)
        if isinstance(end, Lost) and self._would_save_nothing:
            effects += self._not_saved(end)
            end = self.generation.stopped
        if isinstance(end, Lost):
            cannot_start, room = False, -1
            if isinstance(event, CannotStart):
                cannot_start, room = True, event.capacity // self._options.replicas
            # A lost snapshot belongs to the restart from it, and is not restored a second time.
            falls_back = before is not None and end.failure.cause is Cause.SNAPSHOT
            early = self.generation.last_state in BEFORE_STEPS and not falls_back
            ranks = event.ranks if isinstance(event, lines.HostLost) else ()
            is_same = self._restarts.is_same_incident(ranks, early=early)
            is_free = cannot_start or falls_back or is_same
            refusal = "" if is_free else self._restarts.refusal(end.failure, now)
            fewer = self._elastic.shrink(now, cannot_start=cannot_start, early=early, room=room)
            if fewer or not (refusal or cannot_start):
                cause = with_location(end.failure)
                if fewer:
                    cause = f"{cause}; the job continues with {self._workers_text}{self._fallback}"
                self._restarts.record(cause, now, counts=not is_free)
                return self._restart(effects, cause, now)
            if refusal and self._restarts.causes:
                effects.append(Warned(f"the job is not restarted: {refusal}"))
            lost, end = end, JobEnd(Status.FAILED, 1, end.failure)
            stops = lost.stops or (cannot_start and self.generation.interrupted is not None)
            if stops:
                end = self.generation.stopped
            if self._holds_unsaved and self._elastic.shrink_to_save(room):
                return self._save_first(end, lost.failure, effects, now)
            if stops:
                effects += self._not_saved(lost)
        self.end = end
        return [*effects, *self._withdrawn(end), self._verdict(end, now)]

    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        generation = self.generation
        number = generation.number
        match event:
            case MessageReceived() | WorkerExited() | CannotStart() if event.generation != number:
                stale = event.message if isinstance(event, MessageReceived) else event
                return [Dropped(f"{type(stale).__name__} of generation {event.generation}")]
            case MessageReceived():
                return generation.message_received(event.peer, event.message, now)
            case WorkerExited():
                return generation.worker_exited(event, now)
            case CannotStart():
                return generation.cannot_start(event)
            case lines.HostLost():
                return generation.host_lost(event)
            case lines.Starting() | lines.Waiting():
                generation.roster.started = now  # its workers cannot join yet
                return []
            case lines.Interrupt():
                return generation.interrupt(now)
            case lines.SaveRequest():
                return generation.checkpoint_requested()
            case events.InvalidFrame():
                dropped = Dropped(event.text)
                return generation.protocol_violation(event.peer, event.text) or [dropped]
            case events.VersionMismatch():
                if generation.state is not State.JOINING:
                    return [Dropped(event.text)]
                text = f"{event.text}; install the same version of pipeworker on all hosts"
                return generation.fail(Failure(Cause.USAGE, text))
            case events.Disconnected():
                generation.roster.disconnected(event.peer, now)
                return []
            case events.Tick():
                return generation.tick(now, event.suspended)
            case events.Moved():
                self._run_dir = generation.run_dir = event.path
                text = f"run directory: was moved to {event.path}; the job continues there"
                return [Warned(text)]
            case events.PlanMade():
                return generation.plan_made(event)
            case events.CheckpointEnded():
                return generation.checkpoint_ended(event, now)
            case events.ParentReads():
                self.snapshots.parent_reads(event.reads)
                return []
            case events.ParentLost():
                failure = Failure(Cause.LOST, event.text)
                if event.rank < 0:
                    return generation.over(JobEnd(Status.LOST, 1, failure))
                member = generation.roster.members.get(event.rank)
                return generation.fail(member.gone() if member else failure)
            case events.EffectFailed():
                return generation.fail(Failure(Cause.INTERNAL, event.text))
        return assert_never(event)

    def _handle_late(self, event: Event, now: float) -> list[Effect]:
        """Send a worker that joins a failed job the reason, because it waits for an answer.

        A checkpoint that was being completed at the end may fail.
        """
        generation, abort = self.generation, self.generation.abort
        match event:
            case MessageReceived(peer, generation.number, Hello() as hello) if abort:
                roster = generation.roster
                if roster.missing and not roster.member(peer) and roster.admit(peer, hello, now):
                    return [Send(peer, abort, generation.number)]
            case events.CheckpointEnded(step, _, error) if error:
                return [Discard(step), Warned(f"the checkpoint of step {step} failed: {error}")]
        return []

    def _may_grow(self, now: float) -> bool:
        """Return whether it is time to restart with all workers, after the loss of some."""
        runs = self.generation.state is State.STEPPING and self.generation.interrupted is None
        return runs and self._elastic.may_grow(now)

    def _is_worth_saving(self, failure: Failure) -> bool:
        """Return whether the user's code has failed and memory has steps that the disk lacks.

        Weights that gave NaN, which is a failure of the whole step's loss, are not worth it.
        """
        if failure.cause is not Cause.USER:
            return False
        gave_nan = failure.rank < 0 and failure.position.phase is Phase.LOSS
        return not gave_nan and self._holds_unsaved

    @property
    def _holds_unsaved(self) -> bool:
        """Whether memory has steps that the disk lacks, and the workers have not saved them."""
        own_loop = self._options.own_loop  # its workers have saved it themselves, if they could
        return not own_loop and self.progress.has_unsaved(self._newest_state.step)

    def _save_first(
        self, end: JobEnd, failure: Failure, effects: list[Effect], now: float
    ) -> list[Effect]:
        """Start one more generation that only writes the last snapshot, then end by `end`.

        The failed workers cannot save it themselves, because they are in the middle of a step, or
        because their host is gone and the copies in another one's memory are left.
        """
        self._pending_end = end
        effects = self._restart(effects, with_location(failure), now, recovers=False)
        self._recovery = None
        self.generation.interrupted, self.generation.stopped = now, end
        what = "failed" if end.failure else "stops"
        text = f"the job {what}; step {self.progress.steps} is saved before it ends"
        if self._elastic.workers < self._elastic.target:
            text += f", with the {self._workers_text} for which there is room"
        return [*effects, Warned(text)]

    def _not_saved(self, end: Lost) -> list[Effect]:
        """Return why a job that the user stopped ends without a checkpoint of its last step."""
        if not self.progress.has_unsaved(self.progress.steps):
            return []
        text = with_location(end.failure)
        return [Warned(f"step {self.progress.steps} is not saved: {text}")]

    @property
    def _would_save_nothing(self) -> bool:
        """Whether an interrupted job has no reason to restart after a loss."""
        interrupted = self._restarts.limit > 0 and self.generation.interrupted is not None
        return interrupted and not self.progress.has_unsaved(self._newest_state.step)

    @property
    def _newest_state(self) -> JobState:
        """The state from which the job resumes after a loss."""
        newest = self.snapshots.newest
        return newest[0] if newest else self._initial

    @property
    def _workers_text(self) -> str:
        """The current number of workers, as ``2 workers`` or ``2 workers per replica``."""
        text = plural(self._elastic.workers, "worker")
        return text if self._options.replicas == 1 else f"{text} per replica"

    @property
    def _fallback(self) -> str:
        """The schedule of fewer workers, if it is not that of the job; else an empty string."""
        own, now = (name_of(o.schedule) for o in (self._options, self._current_options))
        return "" if own == now else f" and {now}, because --schedule {own} is for all"

    @property
    def _current_options(self) -> Options:
        """The options of the job with its current number of workers."""
        return self._options.with_stages(self._elastic.workers)

    def _restart(
        self, effects: list[Effect], cause: str, now: float, *, recovers: bool = True
    ) -> list[Effect]:
        """Begin another generation, from the newest state.

        Workers of this one that are left are killed, so messages to them are not sent.
        """
        performed = [effect for effect in effects if not isinstance(effect, Send)]
        lost = self.snapshots.workers_lost()
        discarded = [Discard(step) for step in lost]
        self.progress.evaluations.lose(lost)
        if discarded:
            self.progress.save_requested = True
        at, causes = now, cause
        if self._recovery:
            at, causes = self._recovery.at, f"{self._recovery.cause}; {cause}"
        self._recovery = _Recovery(causes, self.progress.recorded, at)
        self.progress.roll_back(self._newest_state)
        before, self._peaks = self.generation, self._peak_memory()
        self.generation = self._begin(before.number + 1, now)
        if before.interrupted is not None:  # the snapshot is saved before the job ends
            self.generation.interrupted, self.generation.stopped = now, before.stopped
        return [
            *performed,
            *discarded,
            Log(f"lost: {cause}; resuming after step {self.progress.steps}"),
            Restart(self.generation.number, cause, self._elastic.workers, recovers),
        ]

    def _report_recovery(self, now: float) -> list[Effect]:
        """Report a restart to the user once steps run again."""
        recovery = self._recovery
        if recovery is None or self.generation.state in BEFORE_STEPS:
            return []
        self._recovery = None
        self._elastic.steps_run(now)
        count = recovery.steps - self.progress.steps
        repeated = f"{count or 'no'} step{'' if count in (0, 1) else 's'} repeated"
        resumed = f"resumed after step {self.progress.steps}, {repeated}"
        return [Warned(f"{recovery.cause}; {resumed}, in {now - recovery.at:.1f} s")]

    def _new_activity(self) -> list[Effect]:
        """Return what the workers do at present, if it has changed."""
        before, self._activity = self._activity, self.generation.activity
        return [] if self._activity == before else [self._activity]

    def _withdrawn(self, end: JobEnd) -> list[Effect]:
        """Return the request to remove the row of the last step if a worker failed in its update.

        The row is recorded when the update begins. A state that was saved after it shows that the
        update was complete, whatever the last known position of a lost worker is.
        """
        position = end.failure.position if end.failure else Position()
        step = self.progress.recorded
        if (position.phase, position.step) != (Phase.UPDATE, step):
            return []
        # A loop of the user's own may have left the newest state by loading an earlier one.
        own_loop, progress = self._options.own_loop, self.progress
        if step <= (progress.saved if own_loop else self._newest_state.step):
            return []
        self.progress.recorded -= 1
        return [Withdraw(step), Log(f"step {step} is not recorded: its update failed")]

    def _verdict(self, end: JobEnd, now: float) -> lines.Verdict:
        failure, causes = end.failure, tuple(self._restarts.causes)
        return lines.Verdict(
            end.status.value,
            end.exit_status,
            self.progress.recorded,
            now - self._started,
            self._peak_memory(),
            self.progress.bubble,
            describe(failure) if failure else None,
            causes,
            self.progress.busy,
            job_exited=failure is not None and failure.cause is Cause.EXIT,
            stopped_early=self.generation.loop.stopped_early if end.status is Status.DONE else "",
            speed=self.progress.speed,
        )

    def _peak_memory(self) -> tuple[int, ...]:
        """Return the peak memory in bytes of each rank, over all generations so far."""
        pairs = zip_longest(self.generation.roster.peak_memory(), self._peaks, fillvalue=0)
        return tuple(max(pair) for pair in pairs)[: self.placement.ranks]

    def _begin(self, number: int, now: float) -> Generation:
        self.progress.attempts += 1
        return Generation(
            number=number,
            options=self._current_options,
            run_dir=self._run_dir,
            timings=self._timings,
            progress=self.progress,
            started=now,
            snapshots=self.snapshots,
            layers=self._layers,
            launched=self._launched,
        )
