"""A single worker in the test's process; the test sends it the coordinator's messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeworker.facts.step import Batch
from pipeworker.job.options import Options
from pipeworker.plan.actions import format_actions
from pipeworker.plan.connect import forward_only
from pipeworker.plan.placement import Placement
from pipeworker.trace.clocks import BestSamples
from pipeworker.wire.messages.directions import Advance, FromWorker
from pipeworker.wire.messages.plan import Plan, Ready, StageRange
from pipeworker.wire.messages.presence import Welcome
from pipeworker.wire.messages.step import RunStep, StepDone
from pipeworker.wire.messages.store import StoreOperation, StoreReply
from pipeworker.worker.control import Control
from pipeworker.worker.settings import Settings
from pipeworker.worker.worker import Worker
from support.in_process.transport import ENDPOINT, MEMBERSHIP, LocalStore
from support.pure.orders import build

MICROBATCHES = 2


class _Control(Control):
    """A control connection that only answers the store's operations."""

    def __init__(self) -> None:
        self.name, self.ended_pass = "rank 0", -1
        self.clock = BestSamples()
        self._request = LocalStore().connect()

    def suspended(self) -> float:
        return 0.0

    def send(self, message: FromWorker) -> None: ...

    def request(
        self,
        operation: StoreOperation,
        keys: tuple[str, ...],
        value: bytes = b"",
        timeout: float | None = None,
    ) -> StoreReply:
        return self._request(operation, keys, value, timeout)


def restored_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the interpreter after a test (a fixture): loading a job file changes its state."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    # Private, because only a test runs a job file in a process that goes on to use launcher.
    monkeypatch.setattr("pipeworker.job.file._forget_own_modules", lambda: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)


class SingleWorker:
    """The worker of a job of one stage; `settings` are more of :class:`Settings`."""

    def __init__(self, local_rank: int = 0, **settings: Any) -> None:
        made = Settings(0, ENDPOINT, MEMBERSHIP.token, local_rank, to_log=False, **settings)
        self.worker, self.tracker = Worker(made, _Control()), made.tracker
        self.batch: Batch | None = None
        self.epoch_length = 0
        self._actions = ""

    def begin(
        self, folder: Path, text: str, recompute: str = "always", **more: Any
    ) -> Batch | None:
        """Build the stage of a job file; return the mini-batch that is ready, also in `batch`.

        `more` are further options.
        """
        path = folder / "job.py"
        path.write_text(text)
        options = Options(
            *(str(path), 1, MICROBATCHES),
            recompute=recompute,
            **{"steps": 5, "evaluate_every": 1, "balance": "even", **more},
        )
        placement = Placement.identity(1)
        run_dir = folder / "run"
        run_dir.mkdir(exist_ok=True)
        welcome = Welcome(options.to_json(), str(run_dir), placement.held, placement.replicas)
        described: Any = self.worker.handle(welcome)
        evaluation = format_actions(forward_only(placement).workers[0])
        layers = StageRange(0, 0, len(described.layers), recompute)
        ready = self.worker.handle(Plan((layers,), (), (), (), evaluation, ((0,),)))
        assert isinstance(ready, Ready)
        order = build("gpipe", 1, MICROBATCHES, recompute)
        self._actions = format_actions(order.workers[0])
        self.batch, self.epoch_length = ready.batch, ready.epoch_length
        return self.batch

    def step(self, step: int, batch: Batch, *, last: bool = False) -> StepDone:
        """Run a step with a mini-batch."""
        done = self.worker.handle(Advance(RunStep(step, batch, last, self._actions)))
        assert isinstance(done, StepDone)
        self.batch = done.batch
        return done
