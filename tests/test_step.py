"""The life of a step: what it costs on the control plane, and the shapes it may have."""

from __future__ import annotations

import re

import pytest
from conftest import JOB, Jobs


def control_messages(jobs: Jobs, *words: str) -> tuple[int, int]:
    """Control messages of a job of three stages, without heartbeats: (received, sent)."""
    run = jobs.train("--stages", "3", *words)
    found = re.search(r"control messages: (\d+) received, (\d+) sent", run.log("coordinator"))
    assert found
    return int(found[1]), int(found[2])


def test_two_control_messages_a_worker_a_step_whatever_m_is(jobs: Jobs) -> None:
    few = control_messages(jobs, "--microbatches", "2", "--steps", "3")
    assert control_messages(jobs, "--microbatches", "10", "--steps", "3") == few
    more = control_messages(jobs, "--microbatches", "10", "--steps", "8")
    assert [a - b for a, b in zip(more, few, strict=True)] == [3 * 5, 3 * 5]


@pytest.mark.parametrize("microbatches", ["1", "2", "16"])
def test_fewer_micro_batches_than_stages_or_more_than_samples(
    jobs: Jobs, microbatches: str
) -> None:
    runs = [jobs.train("--stages", stages, "--microbatches", microbatches) for stages in ("1", "4")]
    losses = [[row["loss"] for row in run.metrics] for run in runs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_the_tuple_that_is_proven_is_in_the_plan(jobs: Jobs) -> None:
    run = jobs.train("--stages", "2", "--microbatches", "2", "--steps", "1", source=JOB)
    assert run.plan["actions"] == [
        "gpipe stages=2 microbatches=2",
        "0: F0 >A0 >T0 F1 >A1 >T1 L0 R0 <G0 B0 R1 <G1 B1",
        "1: <A0 <T0 F0 <A1 <T1 F1 R0 B0 >G0 R1 B1 >G1",
    ]
    assert run.plan["balance"] == [3, 2]
    assert run.plan["stages"][1]["classes"] == ["Tanh", "Linear"]
