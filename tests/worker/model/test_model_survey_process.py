"""The process that surveys a job's model, and the forks of a job."""

from __future__ import annotations

import os
import pickle
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeworker.job.options import Options
from pipeworker.worker.model import survey_process
from support.processes.fork_threads import FILE
from support.processes.interpreter import PRELOAD
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import JOB
from support.real_jobs.torchrun import Torchrun
from support.slow import slow

MENTIONS = JOB.replace("import torch", "import pipeworker\n    import torch", 1)


def variables(folder: Path) -> dict[str, str]:
    return {**os.environ, PRELOAD: "support.processes.fork_threads", FILE: str(folder / "forks")}


def test_every_process_of_a_job_forks_with_one_thread(jobs: Jobs) -> None:
    """The agent forks the workers, and the first worker the process of the survey."""
    words = ("--stages", "2", "--steps", "1")
    run = jobs.train(*words, source=MENTIONS, env=variables(jobs.folder))
    threads = (jobs.folder / "forks").read_text().split()
    assert len(threads) >= 3
    assert set(threads) == {"1"}
    assert "needs real tensors" not in run.log("worker-0")


@slow
def test_ranks_of_torchrun_fork_with_one_thread(jobs: Jobs, torchrun: Torchrun) -> None:
    """Each rank forks its guard, and rank 0 the process of the survey."""
    run = torchrun(source=MENTIONS, env=variables(jobs.folder)).end()
    assert run.status == 0, run.stderr
    threads = (jobs.folder / "forks").read_text().split()
    assert len(threads) >= 3
    assert set(threads) == {"1"}
    assert "needs real tensors" not in run.log("worker-0")


IGNORED = """
import signal
from pipeworker.worker.model.survey_process import SurveyProcess

process = SurveyProcess()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
process.close()
"""


def test_a_job_file_may_ignore_the_end_of_children(jobs: Jobs) -> None:
    process = jobs.python("-c", IGNORED)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr


SURVEYED = """
import sys
from pathlib import Path

import torch
from pipeworker.job.options import Options
from pipeworker.worker.model import survey_process

survey_process.LEAST = float(sys.argv[3])
process = survey_process.SurveyProcess()
value = eval(sys.argv[2])
asked = {"stages": 1, "microbatches": 1, "worker_timeout": 0.1}
options = Options.of({**asked, "job_file": sys.argv[1]})
print(process.survey(Path(sys.argv[1]), options, value))
process.close()
"""


@pytest.mark.parametrize(
    ("value", "change", "found"),
    [
        ("torch.ones(2, 8)", ("", ""), "{'events': [[], [], []], 'classes': ["),
        ("lambda: 0", ("", ""), "the input cannot be pickled: "),
        (
            "torch.ones(2, 8)",
            ("def model():", "def model():\n    os._exit(0)"),
            "its process ended",
        ),
        ("torch.ones(2, 8)", ("def model():", "def model():\n    1 / 0"), "ZeroDivisionError"),
        (
            "torch.ones(2, 8)",
            ("def model():", "def model():\n    import time; time.sleep(600)"),
            "it took more than 2 s",
        ),
    ],
    ids=["found", "not pickled", "ended", "raised", "hangs"],
)
def test_a_survey_returns_what_it_found_or_its_error(
    jobs: Jobs, value: str, change: tuple[str, str], found: str
) -> None:
    path = jobs.write(
        """
        import os
        import torch
        from torch import nn

        print("hidden")

        def model():
            return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

        def loss(output, target):
            return nn.functional.cross_entropy(output, target)

        def optimizer(params):
            return torch.optim.SGD(params, lr=0.1)

        def data():
            yield torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
        """
    )
    path.write_text(path.read_text().replace(*change))
    limit = "2" if "took" in found else "60"
    stdout, stderr = jobs.python("-c", SURVEYED, str(path), value, limit).communicate(timeout=90)
    assert found in stdout, stderr
    assert "hidden" not in stdout


ALIKE = """
import pipeworker
import torch
from torch import nn
from base import data, loss, optimizer

class Block(nn.Module):
    def __init__(self, save_name=None):
        super().__init__()
        self.linear, self.save_name = nn.Linear(8, 8), save_name

    def forward(self, x):
        if self.save_name:
            pipeworker.stash(self.save_name, x)
        return self.linear(x)

class Add(nn.Module):
    def forward(self, x):
        return x + pipeworker.pop("a")

def model():
    return nn.Sequential(nn.Linear(8, 8), Block(), Block("a"), Add())
"""
NORMS = """
from torch import nn
from base import data, loss, optimizer

def model():
    one, other = (nn.BatchNorm1d(8, affine=False) for _ in range(2))
    return nn.Sequential(nn.Linear(8, 8), one, nn.Linear(8, 8), other, nn.Linear(8, 8), other)
"""
BASE = """
import torch

def loss(output, target):
    return output.sum()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def data():
    yield torch.ones(2, 8), torch.zeros(2)
"""


def surveyed_here(folder: Path, job: str) -> dict[str, Any]:
    """Return what a survey finds that draws the outline too, in this process."""
    (folder / "base.py").write_text(BASE)
    path = folder / "job.py"
    path.write_text(job)
    here, there = Pipe()
    for message in (b"surroundings", pickle.dumps(torch.ones(2, 8))):
        here.send_bytes(message)
    options = Options(str(path), stages=2, microbatches=2)
    found: dict[str, Any] = survey_process._survey(path, options.to_json(), there)
    assert "outline" in found, found
    return found


@pytest.mark.usefixtures("as_a_worker")
def test_a_layer_that_stashes_may_be_like_one_that_does_not(tmp_path: Path) -> None:
    found = surveyed_here(tmp_path, ALIKE)
    assert found["events"] == [[], [], [("stash", "a")], [("pop", "a")]]


@pytest.mark.usefixtures("as_a_worker")
def test_a_shared_buffer_may_be_in_a_layer_that_is_like_an_earlier_one(tmp_path: Path) -> None:
    changing = surveyed_here(tmp_path, NORMS)["changing"]
    assert [bool(names) for names in changing] == [False, True, False, True, False, True]
