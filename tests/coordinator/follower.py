"""A worker as far as the coordinator can tell: it does what it is told, and says so."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator

from coordinator.lives import Life
from pipeworker.wire.messages.advance import Advance, Finish
from pipeworker.wire.messages.calls import Call, CallKind, Wait
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.directions import FromWorker, ToWorker
from pipeworker.wire.messages.evaluation import Evaluate, Evaluation, EvaluationDone
from pipeworker.wire.messages.failure import Abort
from pipeworker.wire.messages.plan import Described, Plan
from pipeworker.wire.messages.presence import Hello, Welcome
from pipeworker.wire.messages.step import Batch, RunStep, StepDone, Upcoming, Update
from support.coordinator import Scripted, ready_of

Memory = dict[int, int | None]
"""By slot, the step whose state is in it as a whole; None while it is being overwritten."""


class Follower:
    """One rank, in one generation; what it has to say is in `outbox`.

    Args:
        memory: outlives it.
        strict: it is told what can be done; not, where others speak in its name.

    Attributes:
        writes: checkpoints that are still to be written, beside steps.
        full: so many of them will fail.
    """

    def __init__(
        self, script: Scripted, rank: int, life: Life, memory: Memory, *, strict: bool
    ) -> None:
        self.script = script
        self.rank = rank
        self.generation = script.number
        self.memory = memory
        self.outbox: deque[FromWorker] = deque([Hello(rank, "host", 1000 + rank)])
        self.heard: list[ToWorker] = []
        self.writes: deque[Copy] = deque()
        self.full = 0
        self.gone = False
        self._life = life
        self._strict = strict
        self._at = 0
        self._data: Iterator[Batch] = iter(())
        self._calls = iter(life.calls)
        self._call: Call | None = None
        self._copying: Copy | None = None
        self._copied = -1

    def hears(self, message: ToWorker) -> None:
        if self.gone:
            return
        self.heard.append(message)
        script, rank = self.script, self.rank
        match message:
            case Welcome():
                self._begin(message.restore)
                self._say(Described(rank, script.layers, ()))
            case Plan():
                self._say(ready_of(rank, message, script.layers, next(self._data, None)))
            case Advance():
                self._advance(message)
            case Abort():
                self.leave()

    def leave(self) -> None:
        """It says nothing more."""
        self.gone = True
        self.outbox.clear()
        self.writes.clear()

    def write(self) -> None:
        """One more part is on disk."""
        copy = self.writes.popleft()
        if copy == self._copying:
            self._settle()
        self._put(copy.step, copy.slot)

    def _begin(self, restore: Restore | None) -> None:
        self._at = restore.step if restore else 0
        if self.rank == self.script.first:
            done = sum(map(len, self._life.cut[: self._at]))
            self._data = iter(self._life.data[done:])

    def _advance(self, told: Advance) -> None:
        if isinstance(told.update, Update):
            self._settle()
            self._at = told.update.step
        if told.copy and (told.copy.save or self._has_room(told.copy.step)):
            self._check(told.copy.step == self._at)
            self._settle()
            self._copying = told.copy
            self.memory[told.copy.slot] = None
            if told.copy.save:
                self.writes.append(told.copy)
        match told.next:
            case RunStep() as run:
                self._run(run)
            case Evaluate(step):
                self._evaluate(step)
            case Save(step, slot):
                self._save(step, slot)
            case Wait():
                if self._call and self._call.loaded:
                    self._at = self._call.loaded.step
                self._make_call()
            case Finish():
                self.outbox.clear()

    def _has_room(self, step: int) -> bool:
        """Whether a snapshot may take memory; else the coordinator waits for it in vain."""
        return (self.rank, step) not in self._life.crowded

    def _run(self, run: RunStep) -> None:
        self._check(run.step == self._at + 1)
        batch = None if run.last else next(self._data, None)
        if batch is not None and batch.microbatches != run.batch.microbatches:
            self._say(Upcoming(self.rank, batch.microbatches))
        if not self._life.slow[(self.rank + run.step) % len(self._life.slow)]:
            self._settle()
        losses = (0.25 * run.step, 0.5) if self.rank == self.script.last else ()
        overflows = run.step in self._life.overflows
        squares = (math.inf if overflows else float(self.rank + run.step),)
        done = StepDone(self.rank, run.step, losses, (), squares, 0.5, 0.1, run.step, batch)
        self._say(dataclasses.replace(done, copied=self._copied))
        if self._call and not self._call.last:
            self._make_call()

    def _evaluate(self, step: int) -> None:
        self._check(step == self._at)
        if self._call and self._call.kind is CallKind.PREDICT:
            self._make_call()
            return
        result = Evaluation(step, 0.5) if self.rank == self.script.last else None
        self._say(EvaluationDone(self.rank, step, 1000, result))

    def _save(self, step: int, slot: int) -> None:
        """At once, behind what is still being written."""
        self._check(step == self._at)
        self._settle()
        while self.writes:
            self.write()
        self.memory[slot] = step
        self._put(step, slot)

    def _settle(self) -> None:
        """What is being copied is whole before the state changes."""
        if self._copying:
            self.memory[self._copying.slot] = self._copied = self._copying.step
            self._copying = None

    def _put(self, step: int, slot: int) -> None:
        self._check(self.memory[slot] == step)  # what goes to disk is what was to
        error = "no space left" if self.full else ""
        self.full = max(0, self.full - 1)
        self._say(Saved(self.rank, step, error=error))

    def _make_call(self) -> None:
        self._call = next(self._calls, None)
        if self._call is None:  # others called what was not in the script
            return
        batch = self._call.batch if self.rank == self.script.first else None
        self._say(dataclasses.replace(self._call, rank=self.rank, batch=batch))

    def _say(self, message: FromWorker) -> None:
        self.outbox.append(message)

    def _check(self, holds: bool) -> None:
        assert holds or not self._strict
