"""Tests of the terminal output of a resumed run: warnings, and the step it continues from."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from pipeworker.display.lines import LineDisplay
from pipeworker.display.style import Style
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir
from pipeworker.runs.begin import RunRequest
from pipeworker.wire.lines import Planned
from support.real_jobs.jobs import Jobs
from support.real_jobs.ranks import Scripts, script
from support.real_jobs.sources import JOB


def test_warnings_of_a_resume_are_shown(jobs: Jobs, scripts: Scripts) -> None:
    """The command and a script show the same warnings."""
    job_file = jobs.write(JOB)
    options = {"steps": 1, "microbatches": 2}
    RunRequest(str(job_file), 1, options, jobs.folder / "run").prepare().close()
    done = jobs.pipeworker("launch", "--resume", "--run-dir", "run", "job.py")
    assert (done.returncode, done.stderr) == (
        *(
            0,
            "warning: the run in run: no complete checkpoint yet; it starts again from step 1\n",
        ),
    )
    train = """
        pipeworker.train(
            model, loss=loss, optimizer=optimizer, data=data, run_dir="run", resume=True
        )
    """
    loop = jobs.folder / "script-1" / "loop.py"
    loop.parent.mkdir()
    RunRequest(str(loop), 1, options, loop.parent / "run").prepare().close()
    (run,) = scripts.start(script(JOB, train), 1, alone=True).succeed()
    changed = f"warning: {loop} has changed since the run was last started. "
    assert run.stderr.startswith(done.stderr + changed)
    assert len(run.stderr.splitlines()) == len(done.stderr.splitlines()) + 1
    assert "done: 1 step in" in run.stdout


def test_the_banner_shows_the_step_of_a_resume() -> None:
    out = StringIO()
    for step in (0, 4):
        options = Options("job.py", 2, 8, resume_step=step)
        LineDisplay(options, RunDir(Path("/run")), Style(), out, out).show(
            Planned("gpipe", 8, (1, 2), ((0,), (1,)), 0.5)
        )
    plan = "2 stages (1,2 layers), 8 micro-batches, gpipe; run directory /run"
    new, _, old, _ = out.getvalue().splitlines()
    assert (new, old) == (plan, f"{plan}, from step 4")
