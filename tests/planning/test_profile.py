"""Profiles of steps."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from pipeworker.errors import UsageError
from pipeworker.facts.step import Batch
from pipeworker.job.options import Options
from pipeworker.record.files.atomic_file import is_partial_file
from pipeworker.record.rundir import RunDir
from pipeworker.trace.timeline import read_timeline
from pipeworker.wire.messages.directions import Advance, Finish
from pipeworker.wire.messages.step import RunStep, Update
from pipeworker.worker.step.profiler import StepProfiler
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Reference
from support.real_jobs.sources import DIES, JOB
from support.slow import slow

WORDS = ("--stages", "2", "--microbatches", "2", "--recompute", "never")


@slow
def test_each_worker_profiles_the_steps_once(jobs: Jobs, reference: Reference) -> None:
    run = jobs.train(*WORDS, "--steps", "5", "--profile", "2:3", source=JOB)
    folder = run.path / "profile"
    assert {path.name for path in folder.iterdir()} == {
        "worker-0-steps-2-3.json.gz",
        "worker-1-steps-2-3.json.gz",
    }
    with gzip.open(folder / "worker-1-steps-2-3.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = Counter(event.get("name") for event in events if event.get("cat") == "user_annotation")
    assert names["1F0"] == names["1F1"] == names["1B1"] == 2  # one a step
    assert any("SGD.step" in str(name) for name in names)
    assert f"profile: {folder} (https://ui.perfetto.dev opens its files)\n" in run.stdout
    assert_same(run, reference(*WORDS, "--steps", "5", source=JOB))
    again = ("launch", "--resume", "--run-dir", str(run.path), "--profile", "6:9", "--steps", "7")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert jobs.pipeworker(*again, str(jobs.folder / "job.py")).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (folder / "worker-0-steps-6-7.json.gz").exists()  # the job ended before step 9


def test_a_worker_in_place_of_a_lost_one_profiles_what_has_no_file(jobs: Jobs) -> None:
    words = (*WORDS, "--steps", "5", "--profile-steps", "1:4", "--snapshot-every", "1", "--trace")
    run = jobs.train(*words, "--", "kill", source=DIES)
    names = sorted(path.name for path in (run.path / "profile").iterdir())
    assert [re.sub(r"-\d-4", "", name) for name in names] == [
        "worker-0-steps.json.gz",
        "worker-1-steps.json.gz",
    ]
    assert read_timeline(RunDir(run.path)).recorded[-1] == 5  # also once actions are not labelled


def test_a_worker_that_is_killed_leaves_only_files_that_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, names = torch.profiler.profile.export_chrome_trace, list[str]()

    def observed(profile: torch.profiler.profile, path: str) -> None:
        export(profile, path)
        names.extend(path.name for path in run.profiles.iterdir())

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", observed)
    run = RunDir(tmp_path)
    profiler = StepProfiler(run.profiles, 0, (1, 1), torch.device("cpu"), lambda _: None)
    profiler.advance(Advance(RunStep(1, Batch(0, 1, 1, 0), last=True)))
    profiler.advance(Advance(Finish(), Update(1)))
    assert names
    assert all(is_partial_file(run.profiles / name) for name in names)
    (written,) = run.profiles.iterdir()
    assert written.name == "worker-0-steps-1-1.json.gz"
    assert "traceEvents" in json.loads(gzip.decompress(written.read_bytes()))


@pytest.mark.parametrize("text", ["3", "0:2", "4:3", "a:b", "1:2:3", ":", "1:"])
def test_a_range_of_steps_is_checked(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--profile {text}: must be the first and the last step"):
        Options("job.py", 1, 1, profile_steps=text)
    assert Options("job.py", 1, 1, profile_steps="3:3").profiled == (3, 3)
