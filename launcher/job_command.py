"""Commands with a job file, whose options may also come from variables or a project's file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from launcher.command import Command, naming_sources
from launcher.defaults import Defaults, check_variables
from launcher.options import LAUNCH_PARAMETERS
from pipeworker.errors import UsageError
from pipeworker.record.rundir import listed

_RESUME, _RUN_DIR, _END = "--resume", "--run-dir", "--"


class FileCommand(Command):
    """A command with a job file, the words for it, and options of a job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; the words after ``--`` are for the job file."""
        at = args.index(_END) if _END in args else len(args)
        with naming_sources(ctx):
            rest = super().parse_args(ctx, args[:at])
        params, arguments = ctx.params, args[at + 1 :]
        is_missing = params["job_file"] is None and not params.get("resume")
        if is_missing and arguments and not arguments[0].startswith("-"):
            params["job_file"], *arguments = arguments  # it may be after -- too
        if arguments:
            params["arguments"] = (*params["arguments"], *arguments)
            ctx.set_parameter_source("arguments", ParameterSource.COMMANDLINE)
        elif not params["arguments"]:  # before click 8.3 its source is the command line
            ctx.set_parameter_source("arguments", ParameterSource.DEFAULT)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        with naming_sources(ctx):
            return super().invoke(ctx)

    def fill_in(self, ctx: click.Context) -> None:
        """Take the options of a project's file that neither words nor variables give."""
        config, job_file = ctx.params.pop("config"), Path(ctx.params["job_file"])
        folders = (job_file.parent, Path())
        defaults = Defaults.read(Path(config)) if config else Defaults.find(folders)
        defaults.fill(ctx, LAUNCH_PARAMETERS)


class JobCommand(FileCommand):
    """A command that starts a job, which may resume a run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; ``--resume RUN`` means ``--resume --run-dir RUN``."""
        return super().parse_args(ctx, _with_run_dir(args))

    def invoke(self, ctx: click.Context) -> Any:
        params = ctx.params
        first = os.environ.get("RANK", "0") == "0"  # one rank of a torchrun job shows warnings
        warnings = [*check_variables(os.environ, LAUNCH_PARAMETERS)]
        if params["job_file"] is None:
            params["job_file"] = self._recorded(ctx, quiet=params["quiet"] or not first)
        if params["resume"] and not params["run_dir"]:
            job_file = params["job_file"]
            path = Path(job_file)
            if path.is_dir():
                raise UsageError(f"{_RESUME}: no run is given after it; write {_RESUME} {job_file}")
            if not path.exists():
                advice = listed(path) or "give the directory of a run"
                raise UsageError(f"{_RESUME} {job_file}: no such run; {advice}")
        self.fill_in(ctx)
        if first:
            for text in warnings:
                click.echo(f"warning: {text}", err=True)
        return super().invoke(ctx)

    def _recorded(self, ctx: click.Context, *, quiet: bool) -> str:
        """Return the job file of the run to resume, and report which file that is."""
        from pipeworker.runs.job_file import find_job_file

        run, arguments = ctx.params["run_dir"], ctx.params["arguments"]
        if not ctx.params["resume"] or not run:
            if arguments:
                raise UsageError(f"JOB_FILE: missing before --; write: job.py -- {arguments[0]}")
            (parameter,) = (one for one in self.params if one.name == "job_file")
            raise click.MissingParameter(ctx=ctx, param=parameter)
        found = find_job_file(Path(run))
        if found.missed:
            click.echo(
                f"warning: job file {found.path}: the copy in the run is used, because "
                f"{found.missed}; name a job file to use another one",
                err=True,
            )
        elif not quiet:
            click.echo(f"note: job file {found.path}, as the run recorded it", err=True)
        return str(found.path)


def _with_run_dir(words: Sequence[str]) -> list[str]:
    """Return the words of a command with ``--run-dir RUN`` after a ``--resume`` that names a run.

    A word after ``--resume`` is a run if it is a directory, since no job file is one.
    """
    options = [*takewhile(_END.__ne__, words)]
    found, run = list(words), None
    for at, word in enumerate(options):
        if word.startswith(f"{_RESUME}="):
            run = word.partition("=")[2]
            found[at : at + 1] = [_RESUME, _RUN_DIR, run]
        elif word == _RESUME and Path(*options[at + 1 : at + 2] or ("-",)).is_dir():
            run = options[at + 1]
            found[at : at + 2] = [_RESUME, _RUN_DIR, run]
        if run is not None:
            break
    if run is not None and any(word.partition("=")[0] == _RUN_DIR for word in options):
        raise UsageError(f"{_RESUME} {run} and {_RUN_DIR}: both name a run; choose one")
    return found
