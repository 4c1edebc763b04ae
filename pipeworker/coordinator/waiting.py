"""The commands that a generation sends to its workers, and the messages it waits for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from pipeworker.coordinator.blueprint import Blueprint
from pipeworker.coordinator.effects import Effect, Send
from pipeworker.coordinator.roster import Member, Roster
from pipeworker.coordinator.steps.call_loop import CallLoop, Loop
from pipeworker.coordinator.steps.loop import Due, FileLoop
from pipeworker.coordinator.steps.progress import Progress
from pipeworker.coordinator.steps.snapshots import Snapshots
from pipeworker.job.interval import Interval
from pipeworker.job.options import Options
from pipeworker.plan.placement import Placement
from pipeworker.timings import Timings
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save
from pipeworker.wire.messages.directions import Advance, ToWorker


class State(Enum):
    """The event that a generation waits for.

    Attributes:
        awaited_message: the name of the message that every awaited rank sends, or "".
        reason: the reason to wait, for logs and messages.
    """

    def __init__(self, awaited_message: str, reason: str) -> None:
        self.awaited_message, self.reason = awaited_message, reason

    JOINING = "Described", "the plan needs every worker's description of the model"
    MEASURING = "Measured", "the plan needs the facts of all layers"
    PLANNING = "", "the plan is being made"
    BUILDING = "Ready", "no step begins before every stage is built and connected"
    STEPPING = "StepDone", "an update happens on all stages or on none"
    EVALUATING = "EvaluationDone", "the next step begins after all stages have evaluated"
    CALLING = "Call", "every rank makes the same calls"
    SAVING = "Saved", "a checkpoint is complete or absent"
    COMMITTING = "", "the checkpoint is being completed"
    OVER = "", "the generation has ended"


SAVES = (State.SAVING, State.COMMITTING)
"""States in which the job waits for a checkpoint."""
BEFORE_STEPS = (State.JOINING, State.MEASURING, State.PLANNING, State.BUILDING)
"""States in which no step has begun."""
COMPUTING = (*BEFORE_STEPS, State.STEPPING, State.EVALUATING)
"""States in which workers run the user's code."""


@dataclass(slots=True)
class Waiting:
    """The part of a generation that sends commands, also to save, and counts the answers.

    Attributes:
        options: those of the job, with the number of workers of this generation.
        layers: the names of the layers of the checkpoint that the job was resumed from.
        launched: whether a launcher started the workers. A worker that is ended by a signal is then
            lost; otherwise the job is interrupted.
        restore: the state that the workers begin with.
        awaited: the ranks that it still waits for.
    """

    number: int
    options: Options
    run_dir: str
    timings: Timings
    progress: Progress
    started: float
    snapshots: Snapshots
    layers: tuple[str, ...]
    launched: bool
    restore: Restore | None = field(init=False)
    loop: Loop = field(init=False)
    state: State = field(init=False)
    awaited: set[int] = field(init=False)
    roster: Roster = field(init=False)
    blueprint: Blueprint | None = field(default=None, init=False)
    _step: int = field(init=False, default=0)
    _due: Due = field(init=False, default=Due())

    def __post_init__(self) -> None:
        newest, options = self.snapshots.newest, self.options
        self.restore, placement = newest[1] if newest else None, options.placement
        loop = CallLoop if options.own_loop else FileLoop
        self.loop = loop(options, placement, self.progress)
        self.roster = Roster(placement, self.started, self.timings, options.worker_timeout)
        self.await_all(State.JOINING)

    @property
    def waiting(self) -> str:
        """The message and the ranks that it waits for, and the reason, for logs and messages."""
        message, reason = self.state.awaited_message, self.state.reason
        ranks = f" of rank {', '.join(map(str, sorted(self.awaited)))}" if self.awaited else ""
        return f"waiting for {message}{ranks}: {reason}" if message else reason

    @property
    def placement(self) -> Placement:
        """The worker of each stage, which a plan may change."""
        return self.roster.placement

    @property
    def members(self) -> list[Member]:
        """The workers that have joined, by rank."""
        return list(self.roster.members.values())

    def await_all(self, state: State) -> None:
        self.state = state
        self.awaited = set(range(self.placement.ranks))

    def is_last(self, rank: int) -> bool:
        """Count a rank's message; return whether it was the last one awaited."""
        if rank not in self.awaited:
            return False  # a repeated message counts once
        self.awaited.discard(rank)
        member = self.roster.members[rank]
        member.moved_at = member.last_heard  # its heartbeat may report this only after others'
        return not self.awaited

    def send(self, peer: bytes, message: ToWorker) -> Send:
        return Send(peer, message, self.number)

    def send_all(self, messages: Sequence[Advance], effects: Sequence[Effect]) -> list[Effect]:
        """Send each worker its message: first to stage 0, then perform `effects`, then the others.

        Stage 0 begins at once; the other workers have time until its first activation arrives. A
        message that is the same object for all is encoded once.
        """
        pairs = zip(self.members, messages, strict=True)
        sends = [self.send(member.peer, message) for member, message in pairs]
        firsts = self.placement.ranks_of(0)
        others = [send for rank, send in enumerate(sends) if rank not in firsts]
        return [*(sends[rank] for rank in firsts), *effects, *others]

    @property
    def is_first(self) -> bool:
        """Whether no generation came before, in this process or an earlier one of the run."""
        return self.progress.attempts <= 1 and not self.progress.recorded

    # Checkpoints and snapshots.

    @property
    def writers(self) -> int:
        """The number of ranks, from rank 0 on, that hold the whole state together.

        That is one replica, unless each replica holds a part of the optimizer's state.
        """
        placement = self.placement
        return placement.ranks if self.options.shard_optimizer else placement.workers

    def save_blocks(self, due: Due) -> bool:
        """Return whether training waits for a checkpoint that is due, rather than skipping it.

        It always does with a loop of the user's own, which may change weights between two calls.
        """
        if self.options.own_loop:
            return True
        if self.snapshots.checkpoint_slot is not None:
            return False
        return due.is_best or self.options.waits_for_checkpoints

    def save_is_due(self, now: float) -> bool:
        """Return whether a checkpoint was requested, or it is time for the next one."""
        if self.progress.save_requested:
            return True
        every, since = self.options.checkpoint_every, now - self.progress.saved_at
        return Interval.parse(every).due(self.progress.steps, since)

    def begin_copy(self, now: float, *, save: bool) -> Copy | None:
        """Begin to copy the state while the next step runs, if a copy is due and a slot is free.

        With `save` the copy is also written, as a checkpoint.
        """
        snapshots, state = self.snapshots, self.progress.job_state
        due = snapshots.is_due(state.step, self.progress.seconds)
        slot = snapshots.checkpoint_slot if save else snapshots.free_slot if due else None
        if slot is None:
            return None
        snapshots.begin_copy(state, slot)
        if save:
            self.begin_write(slot, now, beside=True)
        return Copy(state.step, slot, save)

    def begin_write(self, slot: int, now: float, *, beside: bool) -> None:
        self.progress.save_requested, self.progress.saved_at = False, now
        self.snapshots.begin_write(self.progress.job_state, slot, self.writers, beside=beside)

    def save(self, due: Due, now: float) -> list[Effect]:
        """Save a checkpoint of this step, and wait until it is complete.

        If workers that are lost now have written it, only wait.
        """
        self._step, self._due = self.progress.steps, Due()
        if self.snapshots.is_completing(self._step):
            self.state, self._due = State.COMMITTING, replace(due, effects=())
            return list(due.effects)
        slot = self.snapshots.blocking_slot()
        self.begin_write(slot, now, beside=False)
        self.await_all(State.SAVING)
        self.awaited = set(range(self.writers))
        save = Advance(Save(self._step, slot), due.update)
        return self.send_all([save] * self.placement.ranks, due.effects)

    def save_last(self) -> list[Effect]:
        return [] if self.state in SAVES else self.save(Due(), self.progress.saved_at)
