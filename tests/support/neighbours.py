"""Files of the user's with the names of ours."""

from __future__ import annotations

from support.jobs import Jobs

IMPORTS = """
    import cli, launcher.local, plan, worker

    print("mine", cli.MINE, launcher.MINE, launcher.local.MINE, plan.MINE, worker.MINE)
"""
"""What a job file begins with that lies beside them."""
SAID = "mine" + " is mine" * 5
"""In the log of a worker that has run it."""


def write_neighbours(jobs: Jobs) -> None:
    for name in ("cli.py", "launcher/__init__.py", "launcher/local.py", "plan.py", "worker.py"):
        jobs.write("MINE = 'is mine'\n", name)
