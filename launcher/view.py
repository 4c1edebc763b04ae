"""What is shown of a job, as it is said on the command line. None of it changes the job."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from launcher.cluster import slurm
from pipeworker.environment import TORCHRUN_JOB
from pipeworker.session.show.view import View, Ways, typed

_POD = "KUBERNETES_SERVICE_HOST"
"""Of the environment: a container there is started by something else than its user."""


def take(chosen: dict[str, Any], context: click.Context) -> View:
    """What is shown, taken from what a command was given; the rest is of the job.

    Raises:
        UsageError: it makes no sense.
    """
    name = context.find_root().info_name or "pipeworker"
    said = {one: chosen.pop(one) for one in ("quiet", "verbose", "log_every", "output")}
    return View(**said, ways=ways_of(name, context.params, os.environ))


def ways_of(name: str, said: Mapping[str, Any], environment: Mapping[str, str]) -> Ways:
    """How the user of a command gets on from its run.

    Args:
        name: the command line's own, as it was called.
        said: on it.
    """
    program = _program(name)
    files = (typed(said["job_file"]),)
    if TORCHRUN_JOB in environment:
        world = environment.get("WORLD_SIZE", "")
        here = world == environment.get("LOCAL_WORLD_SIZE") and _POD not in environment
        begin = (*_torchrun(), "--nproc-per-node", world, "-m", "pipeworker")
        return Ways(program, begin if here else (), files)
    if slurm.is_inside(environment):  # the command may be that of a script of ours
        return Ways(program, (), files)
    hosts = [
        word
        for option in ("hosts", "hosts_file")
        if said.get(option)
        for word in (f"--{option.replace('_', '-')}", said[option])
    ]
    return Ways(program, (*program, "launch", *hosts), files)


def _program(name: str) -> tuple[str, ...]:
    """What runs the command line, as it is found from here."""
    if name == "pipeworker":
        return (name if shutil.which(name) else typed(sys.argv[0]),)
    return (*_python(), "-m", "pipeworker")


def _torchrun() -> tuple[str, ...]:
    name = "torchrun"
    return (name,) if shutil.which(name) else (*_python(), "-m", "torch.distributed.run")


def _python() -> tuple[str, ...]:
    name = Path(sys.executable).name
    return (name if shutil.which(name) == sys.executable else sys.executable,)
