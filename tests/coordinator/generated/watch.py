"""Invariants of a job, checked after every event."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from pipeworker.coordinator.effects import Commit, Discard, Effect, Send
from pipeworker.coordinator.events import CheckpointEnded, Event, MessageReceived
from pipeworker.facts.step import StepResult
from pipeworker.wire.lines import Restart, Verdict, Warned
from pipeworker.wire.messages.checkpoint import Copy, Save, Saved
from pipeworker.wire.messages.directions import Advance, Finish, Next
from pipeworker.wire.messages.presence import Abort, Hello, Welcome
from pipeworker.wire.messages.step import Call, Evaluate, RunStep, StepDone, Update, Wait
from support.pure.coordinator import ends, of


@dataclass
class Watch:
    """The history of a job, as far as the invariants need it.

    Attributes:
        ran: the commands by step and first micro-batch, which must be equal when repeated.
        rows: the last recorded step.
        lost: the value of `rows` when a worker was lost.
        updated: the last step whose update was sent in this generation.
        completing: checkpoints that the service completes; their files must not be written again.
        parts: by checkpoint being written, the ranks that have written their part.
        tried: for each checkpoint that has ended, whether it is complete.
    """

    ranks: frozenset[int]
    number: int
    joined: dict[bytes, int] = field(default_factory=dict)
    hello: int = -1
    running: RunStep | None = None
    done: set[int] = field(default_factory=set)
    ran: dict[tuple[int, int], RunStep] = field(default_factory=dict)
    rows: int = 0
    lost: int = 0
    updated: int = 0
    call: Call | None = None
    parts: dict[int, set[int]] = field(default_factory=dict)
    tried: list[bool] = field(default_factory=list)
    completing: set[int] = field(default_factory=set)
    ended: bool = False

    def before(self, event: Event) -> None:
        """Note an event before the job handles it."""
        if isinstance(event, CheckpointEnded):
            self.completing.discard(event.step)
            self.tried += [] if event.error else [True]
        if not isinstance(event, MessageReceived) or event.generation != self.number:
            return
        message = event.message
        if isinstance(message, Hello):
            self.hello = message.rank
        elif self.joined.get(event.peer) == message.rank:
            match message:
                case StepDone() if self.running and message.step == self.running.step:
                    self.done.add(message.rank)
                case Saved(error="") if message.step in self.parts:
                    self.parts[message.step].add(message.rank)
                case Call():
                    self.call = message

    def after(self, effects: list[Effect], ranks: int) -> None:
        """Check the effects of an event; `ranks` is the number of ranks after it."""
        aborts = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Abort)]
        late = [*aborts, *of(effects, Discard), *of(effects, Warned)]
        assert not (self.ended and effects != late)  # late workers learn the reason
        for discarded in of(effects, Discard):
            self.parts.pop(discarded.step, None)
            self.tried.append(False)
        for row in of(effects, StepResult):
            assert row.step == self.rows + 1  # each once, in order
            assert self.done == self.ranks
            self.rows = row.step
        self._advances(effects)
        assert {send.generation for send in of(effects, Send)} <= {self.number}
        for effect in effects:
            match effect:
                case Send(peer, Welcome(restore=restore), _):
                    assert peer not in self.joined
                    self.joined[peer] = self.hello
                    self.updated = restore.step if restore else 0
                case Commit(state):
                    assert self.parts.pop(state.step) == self.ranks
                    self.completing.add(state.step)
                case Restart():
                    self._restart(effect, ranks)
        self._verdict(effects)

    def _restart(self, restart: Restart, ranks: int) -> None:
        assert restart.generation == self.number + 1
        assert not self.parts  # all were discarded
        self.ranks, self.number = frozenset(range(ranks)), restart.generation
        self.joined, self.done, self.running = {}, set(), None
        self.updated, self.lost = 0, self.rows

    def _verdict(self, effects: list[Effect]) -> None:
        verdicts = of(effects, Verdict)
        ended = sorted(send.peer for send in ends(effects) if send.peer in self.joined)
        assert ended == (sorted(self.joined) if verdicts else [])
        if verdicts:
            assert effects[-1:] == verdicts
            assert verdicts[0].steps == self.rows
            self.ended = True
        elif self.joined:
            assert self.rows == max(self.updated, self.lost)

    def _advances(self, effects: list[Effect]) -> None:
        """Check that all workers receive the same command, or none does."""
        sends = [s for s in of(effects, Send) if isinstance(s.message, Advance)]
        advances = [s.message for s in sends if isinstance(s.message, Advance)]
        if not advances or isinstance(advances[0].next, Finish):
            return
        assert [self.joined[send.peer] for send in sends] == sorted(self.ranks)
        advances = [dataclasses.replace(one, next=_bare(one.next)) for one in advances]
        assert all(one == advances[0] for one in advances)
        following, update, copy = advances[0].next, advances[0].update, advances[0].copy
        if isinstance(update, Update):
            assert update.step == self.updated + 1
            assert self.running
            assert update.step == self.running.step
            assert self.done == self.ranks
            rows = [row.step for row in of(effects, StepResult)]
            assert rows == ([update.step] if update.step > self.lost else [])
            self.updated = update.step
        match following:
            case RunStep():
                self._runs(following)
            case Evaluate() | Save():
                assert following.step == self.updated
            case Wait(None) if self.call and self.call.loaded:
                self.rows = self.updated = self.call.loaded.step
                self.lost, self.call = 0, None
                self.ran.clear()
        if isinstance(following, Save):
            self._saves(following.step)
        if copy is not None:
            self._copies(copy, following)

    def _runs(self, run: RunStep) -> None:
        assert run.step == self.updated + 1
        assert self.running is None or self.done == self.ranks
        assert self.ran.setdefault((run.step, run.first), run) == run  # equal to the first time
        self.running, self.done = run, set()

    def _copies(self, copy: Copy, beside: Next) -> None:
        """Check that a copy is made beside the first mini-batch of a step."""
        assert isinstance(beside, RunStep)
        assert beside.first == 0
        assert copy.step == self.updated
        if copy.save:
            self._saves(copy.step)

    def _saves(self, step: int) -> None:
        assert step not in self.completing
        self.parts[step] = set()


def _bare(following: Next) -> Next:
    """Return a command without its actions, which differ between workers."""
    if isinstance(following, RunStep):
        return dataclasses.replace(following, actions="")
    return following
