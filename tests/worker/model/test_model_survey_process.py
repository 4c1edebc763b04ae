"""The process that surveys a job's model, and the forks of a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.processes.fork_threads import FILE
from support.processes.interpreter import PRELOAD
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import JOB
from support.real_jobs.torchrun import Torchrun
from support.slow import slow

MENTIONS = JOB.replace("import torch", "import pipeworker\n    import torch", 1)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")


def variables(folder: Path) -> dict[str, str]:
    return {**os.environ, PRELOAD: "support.processes.fork_threads", FILE: str(folder / "forks")}


@slow
def test_every_process_of_a_job_forks_with_one_thread(jobs: Jobs) -> None:
    """The agent forks the workers, and the first worker the process of the survey."""
    run = jobs.train("--stages", "2", source=MENTIONS, env=variables(jobs.folder))
    threads = (jobs.folder / "forks").read_text().split()
    assert len(threads) >= 3
    assert set(threads) == {"1"}
    assert "needs real tensors" not in run.log("worker-0")


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
            ("def model():", "def model():\n    while True: pass"),
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
