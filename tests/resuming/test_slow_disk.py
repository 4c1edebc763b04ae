"""A disk that takes long to remove an old checkpoint delays no step and does not end the job."""

from __future__ import annotations

from pipeworker.record.rundir import RunDir
from support.faults.observed_job import ObservedJob
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import CALM

WORDS = ("--stages", "2", "--max-restarts", "0", "--checkpoint-every", "4", "--keep", "1")


def test_steps_run_while_an_old_checkpoint_is_removed(jobs: Jobs) -> None:
    job = ObservedJob(jobs, CALM.replace("0.05", "0.15"), (*WORDS, "--steps", "24"))
    job.failpoints.set("removing", "wait")
    job.start()
    job.until(lambda: job.failpoints.triggered("removing"))
    removed_after = job.step
    job.until(lambda: job.step >= removed_after + 8)
    job.failpoints.release()
    assert job.end() == 0
    assert (job.run.summary["steps"], job.run.summary["causes"]) == (24, [])
    assert RunDir(job.path).checkpoints.steps() == [24]
    assert not [*RunDir(job.path).checkpoints.path.glob(".*")]
