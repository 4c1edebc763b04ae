"""The options of the display of a job; none of them changes the job."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from launcher.engines.slurm import SlurmAllocation
from pipeworker.display.commands import Commands, relative
from pipeworker.display.style import Style
from pipeworker.environment import POD, TORCHRUN_JOB
from pipeworker.record.run_record import hosts_words


def take_style(chosen: dict[str, Any], context: click.Context) -> Style:
    """Remove the display's options from `chosen`, the values of a command, and return them."""
    name = context.find_root().info_name or "pipeworker"
    shown = {one: chosen.pop(one) for one in ("json", "quiet", "verbose", "log_every", "output")}
    commands = commands_for(name, context.params["job_file"], os.environ)
    return Style(**shown, commands=commands)


def commands_for(name: str, job_file: str, environment: Mapping[str, str]) -> Commands:
    """Return the commands with which the user of the program `name` can continue from its run."""
    python = Path(sys.executable).name
    python = python if shutil.which(python) == sys.executable else sys.executable
    program: tuple[str, ...] = (python, "-m", "pipeworker")
    if name == "pipeworker":
        program = (name if shutil.which(name) else relative(sys.argv[0]),)
    job_file = relative(job_file)
    if TORCHRUN_JOB in environment:
        world = environment.get("WORLD_SIZE", "")
        here = world == environment.get("LOCAL_WORLD_SIZE") and POD not in environment
        module = (python, "-m", "torch.distributed.run")
        torchrun = ("torchrun",) if shutil.which("torchrun") else module
        begin = (*torchrun, "--nproc-per-node", world, "-m", "pipeworker")
        return Commands(program, begin if here else (), job_file)
    if SlurmAllocation().is_inside(environment):  # a rendered script may have called it
        return Commands(program, (), job_file)
    return Commands(program, (*program, "launch", *hosts_words(sys.argv)), job_file)
