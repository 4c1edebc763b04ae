"""The parsing of ``plan``, which takes those options of `launch` that matter to a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from launcher.command import Command
from launcher.defaults import Defaults
from launcher.options import LAUNCH_PARAMETERS
from pipeworker.errors import UsageError

_END = "--"


class PlanCommand(Command):
    """A command with an optional job file, words for it, and some options of a job."""

    def __init__(self, name: str | None, **attributes: Any) -> None:
        config = [one for one in LAUNCH_PARAMETERS if one.name == "config"]
        super().__init__(name, **{**attributes, "params": [*attributes["params"], *config]})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index(_END) if _END in args else len(args)
        rest = super().parse_args(ctx, args[:at])
        if arguments := tuple(args[at + 1 :]):
            ctx.params["arguments"] = (*ctx.params["arguments"], *arguments)
            ctx.set_parameter_source("arguments", ParameterSource.COMMANDLINE)
        if ctx.params["job_file"] is not None:
            ctx.params["job_file"] = Path(ctx.params["job_file"])
        return rest

    def reject(self, error: click.NoSuchOption) -> NoReturn:
        name = error.option_name
        if any(name in (*option.opts, *option.secondary_opts) for option in LAUNCH_PARAMETERS):
            raise UsageError(
                f"{name}: an option of launch that changes no plan; leave it out"
            ) from None
        super().reject(error)

    def invoke(self, ctx: click.Context) -> Any:
        """Take options from a project's file, as `launch` does, if there is a job file."""
        job_file, config = ctx.params["job_file"], ctx.params.pop("config")
        if job_file is not None:
            folders = (job_file.parent, Path())
            defaults = Defaults.read(Path(config)) if config else Defaults.find(folders)
            defaults.fill(ctx, LAUNCH_PARAMETERS)
        elif config:
            raise UsageError("--config: no model is given; add JOB_FILE")
        return super().invoke(ctx)
