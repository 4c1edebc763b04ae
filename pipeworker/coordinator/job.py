"""The job: what lasts while generations of workers come and go. Pure: events in, effects out.

Time is an argument; nothing here reads a clock, a file or a socket. The same events give the same
effects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from pipeworker.coordinator.effects import (
    Discard,
    Dropped,
    Effect,
    Ended,
    Log,
    Send,
    Status,
    Warn,
)
from pipeworker.coordinator.events import (
    Arrived,
    Broken,
    Committed,
    Event,
    Foreign,
    Garbled,
    StarterGone,
    Ticked,
    Uncommitted,
    Unreachable,
    Unwell,
)
from pipeworker.coordinator.generation import Generation
from pipeworker.coordinator.hands import Hands
from pipeworker.coordinator.report import place
from pipeworker.coordinator.restarts import Restarts
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.states import STOPPED, End, Lost, State, Verdict
from pipeworker.coordinator.steps.loop import loop_for
from pipeworker.coordinator.steps.progress import Progress
from pipeworker.coordinator.steps.snapshots import Mark, Snapshots
from pipeworker.job.options import Options
from pipeworker.plan import orders
from pipeworker.plan.placement import Placement
from pipeworker.timings import DEFAULT, Timings
from pipeworker.wire.lines import (
    Again,
    CannotStart,
    HostLost,
    Interrupt,
    SaveAsked,
    Snapshot,
    WorkerExited,
    never,
)
from pipeworker.wire.messages.checkpoint import Restore
from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.presence import Hello

SLOTS = 2
"""Memories for copies of a worker's state, where it can be replaced: one is always whole."""


_BEGINNING = Mark(0)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a job goes on that another process has begun.

    Attributes:
        restore: what its workers begin with; None for the initial weights.
        layers: their names.
        snapshot: what the coordinator before this one left in memory, which may be newer.
        recorded, evaluated, saved: as in :class:`Progress`.
        causes: of the losses so far.
    """

    mark: Mark = _BEGINNING
    restore: Restore | None = None
    layers: tuple[str, ...] = ()
    snapshot: tuple[Mark, Restore] | None = None
    recorded: int = 0
    evaluated: int = 0
    saved: int = -1
    causes: tuple[str, ...] = ()


_FIRST = Start()


@dataclass(frozen=True, slots=True)
class _Loss:
    """What the job is on its way back from."""

    said: str
    steps: int
    at: float


def _taken(mark: Mark, restore: Restore) -> Snapshot:
    scaler = mark.scaler or Scaler(0.0)
    return Snapshot(mark.step, restore.slot, restore.ranks, scaler.scale, scaler.good_steps)


class Job:
    """One job, from the first Hello to the verdict.

    Args:
        started: when; the first generation begins at once.
        generation: the number of the first one.
        replaceable: whether workers that are lost can be started again.
        launched: whether there is a launcher, which is told when the whole job is to end.
        start: where it goes on.
        cores: of the coordinator's host.
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
        start: Start = _FIRST,
        cores: int = 1,
    ) -> None:
        self._options = options
        self._run_dir = run_dir
        self._timings = timings
        self._hands = Hands(options.stages, options.elastic or options.stages, timings.grow)
        self._restarts = Restarts(options.restarts if replaceable else 0)
        self._start = start
        self._restarts.causes.extend(start.causes)
        self._initial = start.mark
        if options.precision == "fp16" and start.mark.scaler is None:
            self._initial = replace(start.mark, scaler=Scaler())
        self.progress = Progress(
            saved_at=started,
            recorded=start.recorded,
            evaluated=start.evaluated,
            saved=start.saved,
        )
        slots = SLOTS if replaceable and options.restarts else 1
        self.snapshots = Snapshots(slots, options.snapshot_every, cores)
        self.snapshots.last = start.snapshot
        if start.restore:
            self.snapshots.on_disk = self._initial, start.restore
        self.progress.back_to(self._back)
        self._launched = launched or replaceable
        self._loss: _Loss | None = None
        if start.causes:  # of the coordinator before this one, last
            self._loss = _Loss(start.causes[-1], start.recorded, started)
        self._held: Verdict | None = None  # that is given when what is in memory is saved
        self._peaks: tuple[int, ...] = ()
        self.generation = self._begin(generation, started)
        self.over = False

    @property
    def placement(self) -> Placement:
        """Of the stages that there are now."""
        options = self._options
        return orders.placement(options.schedule, self._hands.now, options.replicas)

    @property
    def peers(self) -> list[bytes]:
        """The identities of all workers that joined."""
        return self.generation.roster.peers

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take part in what happened; returns what is to be done, in order."""
        if self.over:
            return self._too_late(event, now)
        before = self.snapshots.last
        effects = self._pass_on(event, now)
        last, end = self.snapshots.last, self.generation.end
        if last and last is not before:  # known before anybody overwrites the one before it
            effects = [_taken(*last), *effects]
        if end is None:
            effects += self._recovered(now)
            if self._may_grow(now):
                self._hands.grow()
                text = f"the job tries to go on with {self._hands.now} stages again"
                return [*effects, *self._start_again([], text, now)]
            return effects
        if self._held is not None:
            end = self._held
        elif isinstance(end, Verdict) and self._is_worth_saving(end):
            return self._save_first(end, effects, now)
        if isinstance(end, Lost) and self._would_save_nothing:
            end = STOPPED
        if isinstance(end, Lost):
            said, cannot_start = self._said(end.failure), isinstance(event, CannotStart)
            enough = "" if cannot_start else self._restarts.enough(end.failure, now)
            early = self.generation.state_before in (State.JOINING, State.BUILDING)
            room = event.room if isinstance(event, CannotStart) else -1
            room = room // self._options.replicas if room > 0 else room  # for stages
            fewer = self._hands.lost(now, cannot_start=cannot_start, early=early, room=room)
            if fewer:
                said = f"{said}; the job goes on with {self._hands.now} stages"
            if fewer or not (enough or cannot_start):
                self._restarts.begin(said, now)
                return self._start_again(effects, said, now)
            if enough and self._restarts.causes:
                effects.append(Warn(f"the job does not go on: {enough}"))
        self.over = True
        return [*effects, self._ended(end)]

    @property
    def late(self) -> bool:
        """Whether workers that nobody ends may still be on their way to a job that has failed."""
        return not self._launched and bool(self.generation.roster.missing)

    def _too_late(self, event: Event, now: float) -> list[Effect]:
        """Who joins a job that has failed hears why; else it would wait for an answer."""
        generation = self.generation
        if not self.late or not isinstance(event, Arrived) or generation.abort is None:
            return []
        hello, peer = event.message, event.peer
        if not isinstance(hello, Hello) or not generation.roster.admit(peer, hello, now):
            return []
        return [Send(peer, generation.abort, generation.number)]

    def _may_grow(self, now: float) -> bool:
        """Whether the job begins again with all its stages, of which it had lost some."""
        runs = self.generation.state is State.STEPPING and self.generation.interrupted is None
        return runs and self._hands.may_grow(now)

    def _is_worth_saving(self, verdict: Verdict) -> bool:
        """Whether the user's code has failed, and memory has steps that the disk has not."""
        failure = verdict.failure
        users = failure is not None and failure.cause is Cause.USER and failure.rank >= 0
        return users and self.progress.unsaved_at(self._back.step)

    def _save_first(self, verdict: Verdict, effects: list[Effect], now: float) -> list[Effect]:
        """Who is in the middle of a step cannot save: others take what is in memory, and do.

        They run no step. However they end, the job ends with the verdict that there was.
        """
        assert verdict.failure
        self._held = verdict
        effects = self._start_again(effects, self._said(verdict.failure), now)
        self._loss = None
        self.generation.interrupted, self.generation.stopped = now, verdict
        saved = f"the job has failed; step {self.progress.steps} is saved before it ends"
        return [*effects, Warn(saved)]

    @property
    def _would_save_nothing(self) -> bool:
        """Whether an interrupted job has no reason to go on after a loss."""
        interrupted = self._restarts.most > 0 and self.generation.interrupted is not None
        return interrupted and not self.progress.unsaved_at(self._back.step)

    @property
    def _back(self) -> Mark:
        """Where the job goes back to when a worker is lost."""
        newest = self.snapshots.newest
        return newest[0] if newest else self._initial

    def _said(self, failure: Failure) -> str:
        where = place(failure)
        return failure.message + (f" ({where})" if where else "")

    def _start_again(self, effects: list[Effect], said: str, now: float) -> list[Effect]:
        """A generation more, from the last snapshot; who is left of this one is ended, not told."""
        kept = [effect for effect in effects if not isinstance(effect, Send)]
        discarded = [Discard(step) for step in self.snapshots.lost()]
        self.progress.asked = self.progress.asked or bool(discarded)
        at, told = (self._loss.at, f"{self._loss.said}; {said}") if self._loss else (now, said)
        self._loss = _Loss(told, self.progress.recorded, at)
        self.progress.back_to(self._back)
        before, self._peaks = self.generation, self._peak_memory()
        self.generation = self._begin(before.number + 1, now)
        if before.interrupted is not None:  # what is in memory is saved before the job ends
            self.generation.interrupted = now
        went = f"lost: {said}; going on after step {self.progress.steps}"
        return [*kept, *discarded, Log(went), Again(self.generation.number, said, self._hands.now)]

    def _recovered(self, now: float) -> list[Effect]:
        """Say so as soon as steps are run again."""
        loss, state = self._loss, self.generation.state
        if loss is None or state in (State.JOINING, State.BUILDING):
            return []
        self._loss = None
        self._hands.settled(now)
        again = loss.steps - self.progress.steps
        steps = f"{again} step{'' if again == 1 else 's'} repeated" if again else "nothing repeated"
        back = f"after step {self.progress.steps}, {steps}"
        return [Warn(f"{loss.said}; went on {back}, in {now - loss.at:.1f} s")]

    def _ended(self, end: End) -> Ended:
        """The verdict on the job, by how its last generation ended."""
        verdict = Verdict(Status.FAILED, 1, end.failure) if isinstance(end, Lost) else end
        return Ended(
            verdict.status,
            verdict.exit_status,
            self.progress.recorded,
            self._peak_memory(),
            self.progress.bubble,
            verdict.failure,
            tuple(self._restarts.causes),
            self.progress.busy,
        )

    def _peak_memory(self) -> tuple[int, ...]:
        """Bytes, by rank, of all generations so far."""
        pairs = zip_longest(self.generation.roster.peak_memory(), self._peaks, fillvalue=0)
        return tuple(max(pair) for pair in pairs)[: self.placement.ranks]

    def _begin(self, number: int, now: float) -> Generation:
        self.progress.attempts += 1
        start, last = self._start, self.snapshots.newest
        restore = last[1] if last else start.restore
        options, width = self._options, self._hands.now
        if width != options.stages:
            options = replace(options, stages=width, balance=None)
        return Generation(
            number,
            options,
            self._run_dir,
            self.placement,
            self._timings,
            loop_for(options, self.placement, self.progress),
            self.progress,
            now,
            self.snapshots,
            restore,
            start.layers,
            self._launched,
        )

    def _pass_on(self, event: Event, now: float) -> list[Effect]:
        generation = self.generation
        match event:
            case Arrived():
                if event.generation != generation.number:
                    name = type(event.message).__name__
                    return [Dropped(f"{name} of generation {event.generation}")]
                return generation.arrived(event.peer, event.message, now)
            case Garbled():
                return generation.lied(event.peer, event.text) or [Dropped(event.text)]
            case WorkerExited():
                if event.generation != generation.number:
                    return [Dropped(f"an exit of generation {event.generation}")]
                return generation.exited(event, now)
            case Foreign():
                if generation.state is not State.JOINING:
                    return [Dropped(event.text)]
                text = f"{event.text}: all hosts of a job need the same version of pipeworker"
                return generation.fail(Failure(Cause.USAGE, text))
            case Unreachable():
                generation.roster.unreachable(event.peer, now)
                return []
            case Ticked():
                return generation.ticked(now, event.stopped)
            case Interrupt():
                return generation.interrupt(now)
            case SaveAsked():
                return generation.save_asked()
            case Committed():
                return generation.committed(event.step, event.path, now)
            case Uncommitted():
                return generation.uncommitted(event.step, event.text, now)
            case StarterGone():
                member = generation.roster.members.get(event.starter)
                if member is not None:
                    return generation.fail(member.gone())
                gone = "the process that started the job is gone"
                return generation.fail(Failure(Cause.LOST, gone))
            case CannotStart():
                if event.generation != generation.number:
                    return [Dropped(f"a worker of generation {event.generation}")]
                return generation.cannot_start(event)
            case HostLost():
                return generation.host_lost(event)
            case Unwell():
                return generation.fail(Failure(Cause.LOST, event.text))
            case Broken():
                return generation.fail(Failure(Cause.INTERNAL, event.text))
        return never(event)
