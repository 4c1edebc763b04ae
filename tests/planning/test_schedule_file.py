"""Jobs with a schedule of their own: the bits of one stage, and what remains without the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record
from support.slow import slow

RAGGED = """
    import torch
    from torch import nn

    def model():
        return nn.Sequential(
            nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.01)

    def data():
        generator = torch.Generator().manual_seed(7)
        for size in (12, 12, 3, 12, 1, 12):
            x = torch.randn(size, 8, generator=generator)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""
"""Some mini-batches have fewer samples than there are micro-batches."""

MINE = """\
mine stages=2 microbatches=4
0: 0F0 0F1 0R0 0B0 0F2 0I1 0F3 0W1 0B2 0R3 0I3 0W3
1: 1F0 1B0 1F1 1B1 1F2 1R2 1I2 1F3 1W2 1B3
"""
"""Backwards that are split and not, and some micro-batches that are recomputed."""


pytestmark = pytest.mark.usefixtures("users_defaults")


@pytest.fixture
def mine(jobs: Jobs) -> Path:
    return jobs.write(MINE, "mine.txt")


def test_a_schedule_of_the_jobs_own_gives_the_bits_of_one_stage(jobs: Jobs, mine: Path) -> None:
    one = jobs.train("--stages", "1", "--microbatches", "4", source=RAGGED)
    own = jobs.train("--stages", "2", "--schedule", str(mine), source=RAGGED)
    assert_same(one, own)
    assert "4 micro-batches, mine.txt; run directory" in own.stdout
    assert own.plan["schedule"] == "mine.txt"
    assert own.plan["actions"][2].startswith("1: 1<A0 1<T0@0 1F0 1B0 1>G0 1<A1 1<T1@0 1F1 1B1")
    recorded = json.loads((own.path / "run.json").read_text())["options"]["schedule"]
    assert recorded == MINE.replace("mine", "mine.txt")


@slow
def test_a_run_is_resumed_without_the_file(jobs: Jobs, mine: Path) -> None:
    words = ("--stages", "2", "--schedule", str(mine))
    whole = jobs.train(*words, "--steps", "6", source=RAGGED)
    first = jobs.train(*words, "--steps", "3", source=RAGGED)
    assert "--schedule mine.txt" in jobs.pipeworker("show", str(first.path)).stdout
    mine.unlink()
    resumed = jobs.pipeworker("launch", "--resume", str(first.path), "--steps", "6")
    assert resumed.returncode == 0, resumed.stderr
    assert "4 micro-batches, mine.txt; run directory" in resumed.stdout
    assert_same(whole, Record(first.path))
    other = ("--stages", "3", "--steps", "8")
    changed = jobs.pipeworker("launch", "--resume", str(first.path), *other)
    assert changed.returncode == 0, changed.stderr
    assert "4 micro-batches, gpipe; run directory" in changed.stdout


@slow
def test_replicas_run_the_schedule_with_their_parts(jobs: Jobs, mine: Path) -> None:
    words = ("--replicas", "2")
    plain = jobs.train("--stages", "1", "--microbatches", "8", *words, source=RAGGED)
    own = jobs.train("--stages", "2", "--schedule", str(mine), *words, source=RAGGED)
    assert_same(plain, own)
    assert "8 micro-batches" in own.stdout


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        (
            MINE.replace("0F1 0R0 0B0", "0R0 0B0 0F1").replace("1B0 1F1", "1F1 1B0"),
            (),
            "--schedule {mine}: schedule mine.txt deadlocks with 4 frames: worker 0 cannot run "
            "0B0: it waits for 1B0 of worker 1; worker 1 cannot run 1F1: it waits for 0F1 of "
            "worker 0",
        ),
        (MINE, ("--microbatches", "6"), "--schedule mine.txt: is for 4 micro-batches, and the job"),
        (MINE, ("--recompute", "always"), "--schedule mine.txt and --recompute always: the"),
    ],
)
def test_no_process_starts_if_the_schedule_cannot_run(
    jobs: Jobs, mine: Path, text: str, words: tuple[str, ...], why: str
) -> None:
    mine.write_text(text)
    run = jobs.run("--stages", "2", "--schedule", str(mine), *words)
    assert (run.status, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: {why.format(mine=mine)}")
    assert not run.path.exists()


def test_a_file_of_options_names_a_schedule_beside_it(jobs: Jobs, mine: Path) -> None:
    folder = jobs.folder / "project"
    jobs.write('stages = 2\nschedule = "own.txt"\n', "project/pipeworker.toml")
    mine.rename(folder / "own.txt")
    job_file = jobs.write(RAGGED, "project/job.py")
    run_dir = jobs.folder / "run"
    done = jobs.pipeworker("launch", "--steps", "1", "--run-dir", str(run_dir), str(job_file))
    assert done.returncode == 0, done.stderr
    assert "4 micro-batches, own.txt" in done.stdout
