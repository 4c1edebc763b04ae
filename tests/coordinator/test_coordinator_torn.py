"""What the launcher knows of snapshots, should the coordinator be lost."""

from __future__ import annotations

from pipeworker.coordinator.effects import Send
from pipeworker.coordinator.job import Job
from pipeworker.wire.lines import Snapshot
from pipeworker.wire.messages.advance import Advance
from support.coordinator import TIMINGS, Scripted


def test_a_snapshot_is_known_before_the_one_before_it_is_overwritten() -> None:
    job = Scripted(2, steps=9, snapshot_every=1)
    job.job = Job(job.options, "runs/x", job.now, timings=TIMINGS, replaceable=True)
    job.running()
    told: dict[int, int] = {}  # by slot, the step that the launcher would go back to
    for step in range(1, 6):
        for effect in job.step(step, copied=step - 1):
            match effect:
                case Snapshot():
                    told = {effect.slot: effect.step}
                case Send(_, Advance(_, _, copy)) if copy is not None:
                    assert copy.slot not in told
                    assert copy.step == step
        assert step == 1 or list(told.values()) == [step - 1]
