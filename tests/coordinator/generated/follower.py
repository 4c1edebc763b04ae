"""A simulated worker, as the coordinator sees one: it follows commands and reports."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator

from coordinator.generated.lives import Life
from pipeworker.facts.step import Batch, Evaluation
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.directions import Advance, Finish, FromWorker, ToWorker
from pipeworker.wire.messages.plan import Described, Plan
from pipeworker.wire.messages.presence import Abort, Hello, Welcome
from pipeworker.wire.messages.step import (
    Call,
    CallKind,
    Evaluate,
    EvaluationDone,
    RunStep,
    StepDone,
    Upcoming,
    Update,
    Wait,
)
from support.pure.coordinator import ScriptedJob, ready_of

Memory = dict[int, int | None]
"""By slot, the step whose complete state it holds; None while it is overwritten."""


class Follower:
    """One rank in one generation.

    Args:
        script: the job.
        rank: its rank.
        life: what it does.
        memory: its slots, which outlast it.
        strict: whether all commands must be possible; not if others send in its name.

    Attributes:
        outbox: the messages that it has sent and that have not arrived.
        received: the messages that it has received.
        writes: the checkpoints that it has to write beside steps.
        full: checkpoints that it will fail to write.
    """

    def __init__(
        self, script: ScriptedJob, rank: int, life: Life, memory: Memory, *, strict: bool
    ) -> None:
        self.script = script
        self.rank = rank
        self.generation = script.number
        self.memory = memory
        self.outbox: deque[FromWorker] = deque([Hello(rank, "host", 1000 + rank)])
        self.received: list[ToWorker] = []
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

    def receive(self, message: ToWorker) -> None:
        if self.gone:
            return
        self.received.append(message)
        script, rank = self.script, self.rank
        match message:
            case Welcome():
                self._begin(message.restore)
                self._send(Described(rank, script.layers, ()))
            case Plan():
                self._send(ready_of(rank, message, script.layers, next(self._data, None)))
            case Advance():
                self._advance(message)
            case Abort():
                self.leave()

    def leave(self) -> None:
        """Send nothing more."""
        self.gone = True
        self.outbox.clear()
        self.writes.clear()

    def write(self) -> None:
        """Write one part to disk."""
        copy = self.writes.popleft()
        if copy == self._copying:
            self._finish_copy()
        self._write_part(copy.step, copy.slot)

    def _begin(self, restore: Restore | None) -> None:
        self._at = restore.step if restore else 0
        if self.rank == self.script.first:
            done = sum(map(len, self._life.cut[: self._at]))
            self._data = iter(self._life.data[done:])

    def _advance(self, advance: Advance) -> None:
        if isinstance(advance.update, Update):
            self._finish_copy()
            self._at = advance.update.step
        if advance.copy and (advance.copy.save or self._has_room(advance.copy.step)):
            self._check(advance.copy.step == self._at)
            self._finish_copy()
            self._copying = advance.copy
            self.memory[advance.copy.slot] = None
            if advance.copy.save:
                self.writes.append(advance.copy)
        match advance.next:
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
        """Return whether there is memory for a snapshot of a step."""
        return (self.rank, step) not in self._life.crowded

    def _run(self, run: RunStep) -> None:
        self._check(run.step == self._at + 1)
        batch = None if run.last else next(self._data, None)
        if batch is not None and batch.microbatches != run.batch.microbatches:
            self._send(Upcoming(self.rank, batch.microbatches))
        if not self._life.slow[(self.rank + run.step) % len(self._life.slow)]:
            self._finish_copy()
        losses = (0.25 * run.step, 0.5) if self.rank == self.script.last else ()
        overflows = run.step in self._life.overflows
        squares = (math.inf if overflows else float(self.rank + run.step),)
        done = StepDone(self.rank, run.step, losses, (), squares, 0.5, 0.1, run.step, batch)
        self._send(dataclasses.replace(done, snapshot_step=self._copied))
        if self._call and not self._call.last:
            self._make_call()

    def _evaluate(self, step: int) -> None:
        self._check(step == self._at)
        predicts = self._call and self._call.kind is CallKind.PREDICT
        ends = self.rank == self.script.last and not predicts
        result = Evaluation(step, self._life.loss(step)) if ends else None
        self._send(EvaluationDone(self.rank, step, 1000, result))

    def _save(self, step: int, slot: int) -> None:
        """Write a checkpoint at once, after those still being written."""
        self._check(step == self._at)
        self._finish_copy()
        while self.writes:
            self.write()
        self.memory[slot] = step
        self._write_part(step, slot)

    def _finish_copy(self) -> None:
        """Complete the copy before the state changes."""
        if self._copying:
            self.memory[self._copying.slot] = self._copied = self._copying.step
            self._copying = None

    def _write_part(self, step: int, slot: int) -> None:
        self._check(self.memory[slot] == step)  # the requested state is written
        error = "no space left" if self.full else ""
        self.full = max(0, self.full - 1)
        self._send(Saved(self.rank, step, error=error))

    def _make_call(self) -> None:
        self._call = next(self._calls, None)
        if self._call is None:  # other peers called what the script does not have
            return
        batch = self._call.batch if self.rank == self.script.first else None
        self._send(dataclasses.replace(self._call, rank=self.rank, batch=batch))

    def _send(self, message: FromWorker) -> None:
        self.outbox.append(message)

    def _check(self, holds: bool) -> None:
        assert holds or not self._strict
