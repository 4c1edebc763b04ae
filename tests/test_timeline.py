"""What the workers of a job did and when, as its run directory has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeworker.plan.actions import COMPUTE, parse_actions
from pipeworker.trace.recorder import EVALUATION, SAVE, UPDATE, seconds
from support.jobs import Jobs
from support.sources import JOB

EVALUATED = (
    JOB
    + """
    def evaluation():
        return data()
"""
)
WORDS = ("--stages", "2", "--microbatches", "4")


def timelines(path: Path, workers: int = 2) -> list[list[Any]]:
    files = [path / "timeline" / f"worker-{rank}.jsonl" for rank in range(workers)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_every_action_of_every_step_is_recorded_with_trace(jobs: Jobs) -> None:
    words = ("--steps", "3", "--evaluate-every", "2", "--trace")
    run = jobs.train(*WORDS, *words, source=EVALUATED)
    for rank, (start, program, *rest) in enumerate(timelines(run.path)):
        assert start["worker"] == rank
        assert start["stages"] == str(rank)
        actions = parse_actions(program["actions"])
        assert {a.kind for a in actions} & COMPUTE
        steps = [row for row in rest if "times" in row]
        assert [row["step"] for row in steps] == [1, 2, 3]
        last = 0.0
        for row in steps:
            times = seconds(row["began"], row["times"])
            assert len(times) == 2 * len(actions)
            assert last <= row["received"] <= row["began"] <= times[0] <= times[-1]
            assert times[-1] <= row["answered"]
            last = row["answered"]
        names = [name for row in rest for name, *_ in row.get("spans", ())]
        assert names.count(UPDATE) >= 3  # and what evaluations change
        assert names.count(EVALUATION) == 1
        assert names.count(SAVE) == 1
