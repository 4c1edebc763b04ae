"""Neighbours: files beside a job file that have the names of modules of pipeworker."""

from __future__ import annotations

from support.real_jobs.jobs import Jobs

IMPORTS = """
    import cli, launcher.local, plan, worker

    print("found", cli.OWNER, launcher.OWNER, launcher.local.OWNER, plan.OWNER, worker.OWNER)
"""
"""The first lines of a job file beside them, which import them."""
PRINTED = "found" + " the user's" * 5
"""The output of these lines, in the log of a worker."""


def write_neighbours(jobs: Jobs) -> None:
    for name in ("cli.py", "launcher/__init__.py", "launcher/local.py", "plan.py", "worker.py"):
        jobs.write('OWNER = "the user\'s"\n', name)
