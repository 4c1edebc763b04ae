"""A worker alone in the test's process, with the messages of a coordinator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeworker.job.options import Options
from pipeworker.plan import orders
from pipeworker.plan.actions import format_actions
from pipeworker.plan.connect import forward_only
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.directions import FromWorker
from pipeworker.wire.messages.plan import Plan, Ready, StageRange
from pipeworker.wire.messages.presence import Welcome
from pipeworker.wire.messages.step import Batch, RunStep, StepDone
from pipeworker.wire.messages.store import StoreOperation, StoreReply
from pipeworker.worker.settings import Settings
from pipeworker.worker.worker import Worker
from support.transport import ENDPOINT, Meeting

MICROBATCHES = 2


class _Line:
    name = "rank 0"
    patience: float | None = None

    def __init__(self) -> None:
        self._ask = Meeting().ask()

    def send(self, message: FromWorker) -> None: ...

    def ask(
        self,
        operation: StoreOperation,
        keys: tuple[str, ...],
        value: bytes,
        expected: bytes,
        seconds: float | None = None,
    ) -> StoreReply:
        return self._ask(operation, keys, value, expected, seconds)


def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture: loading a job file changes what Python finds."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr("pipeworker.job.file._clear_the_way", lambda: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)


class Alone:
    """A job of one stage."""

    def __init__(self) -> None:
        self.worker = Worker(Settings(0, ENDPOINT, "", 0, to_log=False), _Line())
        self.batch: Batch | None = None
        self.length = 0
        self._actions = ""

    def begin(
        self, folder: Path, text: str, recompute: str = "always", *, deterministic: bool = False
    ) -> Batch | None:
        """Build the stage of a job file; returns the mini-batch that is ready, as is `batch`."""
        path = folder / "job.py"
        path.write_text(text)
        options = Options(
            *(str(path), 1, MICROBATCHES),
            steps=5,
            evaluate_every=1,
            recompute=recompute,
            deterministic=deterministic,
        )
        alone = Placement.identity(1)
        welcome = Welcome(options.to_json(), str(folder / "run"), alone.held, alone.replicas)
        described: Any = self.worker.handle(welcome)
        evaluation = format_actions(forward_only(alone).workers[0])
        layers = StageRange(0, 0, len(described.layers))
        ready = self.worker.handle(Plan((layers,), (), (), (), evaluation))
        assert isinstance(ready, Ready)
        order = orders.build("gpipe", 1, MICROBATCHES, recompute)
        self._actions = format_actions(order.workers[0])
        self.batch, self.length = ready.batch, ready.length
        return self.batch

    def step(self, step: int, batch: Batch, *, last: bool = False) -> StepDone:
        """Run a mini-batch."""
        done = self.worker.handle(Advance(RunStep(step, batch, last, self._actions)))
        assert isinstance(done, StepDone)
        self.batch = done.batch
        return done
