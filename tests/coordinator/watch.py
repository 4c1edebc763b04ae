"""What must hold of a job whatever happens, looked at after every event."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from pipeworker.coordinator.effects import Commit, Discard, Effect, Ended, Send
from pipeworker.coordinator.events import Arrived, Committed, Event
from pipeworker.wire.lines import Again
from pipeworker.wire.messages.advance import Advance, Finish, Next
from pipeworker.wire.messages.calls import Call, Wait
from pipeworker.wire.messages.checkpoint import Copy, Save, Saved
from pipeworker.wire.messages.evaluation import Evaluate
from pipeworker.wire.messages.failure import Abort
from pipeworker.wire.messages.presence import Hello, Welcome
from pipeworker.wire.messages.step import RunStep, StepDone, StepResult, Update
from support.coordinator import ends, of


@dataclass
class Watch:
    """What has been done so far, and what may be done next.

    Attributes:
        ran: by step and first micro-batch, what was told, to compare when it runs again.
        rows: the last step that is recorded; `lost`, that it was when a worker was lost.
        updated: the last step that workers were told to apply, in this generation.
        parts: of each checkpoint that is being written, who has written theirs.
        tried: of each attempt at a checkpoint that has come to its end, whether it is there.
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
    ended: bool = False

    def before(self, event: Event) -> None:
        """What a worker says for itself, in this generation."""
        if isinstance(event, Committed):
            self.tried.append(True)
        if not isinstance(event, Arrived) or event.generation != self.number:
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
        """Of an event; `ranks`: how many there are then."""
        late = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Abort)]
        assert not (self.ended and effects != late)  # who comes too late hears why
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
                case Commit():
                    assert self.parts.pop(effect.step) == self.ranks
                case Again():
                    self._begin_again(effect, ranks)
        self._verdict(effects)

    def _begin_again(self, again: Again, ranks: int) -> None:
        assert again.generation == self.number + 1
        assert not self.parts  # all discarded
        self.ranks, self.number = frozenset(range(ranks)), again.generation
        self.joined, self.done, self.running = {}, set(), None
        self.updated, self.lost = 0, self.rows

    def _verdict(self, effects: list[Effect]) -> None:
        verdicts = of(effects, Ended)
        told = sorted(send.peer for send in ends(effects) if send.peer in self.joined)
        assert told == (sorted(self.joined) if verdicts else [])
        if verdicts:
            assert effects[-1:] == verdicts
            assert verdicts[0].steps == self.rows
            self.ended = True
        elif self.joined:
            assert self.rows == max(self.updated, self.lost)

    def _advances(self, effects: list[Effect]) -> None:
        """All are told the same, or nobody is told anything."""
        sends = [s for s in of(effects, Send) if isinstance(s.message, Advance)]
        told = [s.message for s in sends if isinstance(s.message, Advance)]
        if not told or isinstance(told[0].next, Finish):
            return
        assert [self.joined[send.peer] for send in sends] == sorted(self.ranks)
        told = [dataclasses.replace(advance, next=_bare(advance.next)) for advance in told]
        assert all(advance == told[0] for advance in told)
        following, update, copy = told[0].next, told[0].update, told[0].copy
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
            self.parts[following.step] = set()
        if copy is not None:
            self._copies(copy, following)

    def _runs(self, run: RunStep) -> None:
        assert run.step == self.updated + 1
        assert self.running is None or self.done == self.ranks
        assert self.ran.setdefault((run.step, run.first), run) == run  # as the first time
        self.running, self.done = run, set()

    def _copies(self, copy: Copy, beside: Next) -> None:
        """Beside the first mini-batch of a step, whose weights stand still."""
        assert isinstance(beside, RunStep)
        assert beside.first == 0
        assert copy.step == self.updated
        if copy.save:
            self.parts[copy.step] = set()


def _bare(following: Next) -> Next:
    """Without the actions, which are each worker's own."""
    if isinstance(following, RunStep):
        return dataclasses.replace(following, actions="")
    return following
