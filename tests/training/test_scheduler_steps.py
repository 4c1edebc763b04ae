"""A scheduler that is given the number of steps of the run."""

from __future__ import annotations

import pytest

from pipeworker.job.options import Options
from support.real_jobs.jobs import Jobs, Record
from support.slow import slow

JOB = """
    import torch
    from torch import nn

    def model():
        return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)]

    loss = nn.MSELoss()

    def optimizer(params):
        return torch.optim.SGD(params, lr=1.0)

    def scheduler(optimizer, steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0.5)

    def data():
        return [(torch.ones(4, 4), torch.ones(4, 1))] * 3
"""
CHAINED = JOB.replace(
    "return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0.5)",
    """schedules = torch.optim.lr_scheduler
        cosine = schedules.CosineAnnealingLR(optimizer, steps, eta_min=0.5)
        return schedules.ChainedScheduler([schedules.LinearLR(optimizer, 0.5, 1, 1), cosine])""",
)
WITHOUT_LENGTH = f"{JOB}\n    data = iter(data())\n"
WORDS = ("--stages", "2", "--microbatches", "2", "--accumulate", "2")


@slow
@pytest.mark.parametrize(
    ("source", "first"), [(JOB, [1.0, 0.927, 0.75, 0.573]), (CHAINED, [0.5, 0.927, 0.75, 0.573])]
)
def test_a_scheduler_follows_the_steps_of_the_run_and_of_its_continuation(
    jobs: Jobs, source: str, first: list[float]
) -> None:
    """A resumed run is on the curve of its new number of steps, also where the first one ended."""
    run = jobs.train(*WORDS, "--epochs", "2", source=source)
    assert [row["lr"] for row in run.metrics] == pytest.approx(first, abs=1e-3)
    job_file = str(jobs.folder / "job.py")
    resume = ("launch", "--resume", "--run-dir", str(run.path), "--stages", "1")
    assert jobs.pipeworker(*resume, "--epochs", "4", job_file).returncode == 0
    uncut = jobs.train(*WORDS, "--epochs", "4", source=source)
    rates = [row["lr"] for row in uncut.metrics]
    continued = Record(run.path)  # `run` has read its metrics before
    assert [row["lr"] for row in continued.metrics][4:] == rates[4:]
    assert rates[4] == pytest.approx(0.75, abs=1e-3)


def test_data_without_a_length_needs_the_number_of_steps(jobs: Jobs) -> None:
    failed = jobs.run(*WORDS, source=WITHOUT_LENGTH)
    assert failed.status == 2
    assert failed.stderr.splitlines()[-1].endswith(
        "scheduler(optimizer, steps): data() has no length, so the number of steps is unknown; "
        "give --steps"
    )


@pytest.mark.parametrize(
    ("options", "length", "steps"),
    [
        ({"steps": 7}, 0, 7),
        ({"epochs": 3, "accumulate": 2}, 5, 9),
        ({}, 5, 5),
        ({"epochs": 3}, 0, 0),
    ],
)
def test_the_steps_of_a_run(options: dict[str, int], length: int, steps: int) -> None:
    assert Options("job.py", 1, 1, **options).total_steps(length) == steps  # type: ignore[arg-type]
