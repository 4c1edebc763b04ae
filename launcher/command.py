"""A command of ours: its mistakes are one message, and its options are shown in groups.

The groups are a few lines on click: what there is for them also changes how all help looks, or puts
parameters of its own among ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click
from click.core import ParameterSource

from pipeworker.errors import PipeworkerError

INTERRUPTED = 130
"""What a shell gives a program that SIGINT ended."""

FILE = "pipeworker.file"
"""In the meta of a context: what to call the file that gives options."""


class Shown(click.ClickException):
    """An error of ours, as the command line shows it."""

    def __init__(self, error: PipeworkerError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_status  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", file, err=file is None)


@contextmanager
def clearly() -> Iterator[None]:
    """Our own errors are one message and an exit status."""
    try:
        yield
    except PipeworkerError as error:
        raise Shown(error) from None
    except OSError as error:  # what the system refuses: descriptors, processes, a file
        where = f"{error.filename}: " if error.filename else ""
        raise Shown(PipeworkerError(f"{where}{error.strerror or error}")) from None
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)


class Option(click.Option):
    """An option of a group.

    Args:
        once: it is of one start: the command line alone says it.
    """

    def __init__(self, *words: Any, group: str, once: bool = False, **settings: Any) -> None:
        super().__init__(*words, **settings)
        self.allow_from_autoenv = not once
        self.group = group
        self.once = once

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """How a message about it begins."""
        said = origin(ctx, str(self.name)) if ctx else ""
        return super().get_error_hint(ctx) + (f" ({said})" if said else "")


def is_said(context: click.Context, name: str) -> bool:
    """Whether the command line says an option."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def is_given(context: click.Context, name: str) -> bool:
    """Whether it is said anywhere: on the command line, in the environment, in a file."""
    source = context.get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT)


def origin(context: click.Context, name: str) -> str:
    """Where an option is said that the command line does not say; empty where nobody does."""
    match context.get_parameter_source(name):
        case ParameterSource.ENVIRONMENT:
            return f"{context.auto_envvar_prefix}_{name.upper()}"
        case ParameterSource.DEFAULT_MAP:
            return str(context.meta.get(FILE, "a file"))
    return ""


class Command(click.Command):
    """A command whose options have groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does; an option that is like none of ours may be the job file's own.

        Raises:
            NoSuchOption: nobody has it.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            passes_on = any(parameter.name == "arguments" for parameter in self.params)
            if not passes_on or {*(error.possibilities or ())} - {"--help"}:
                raise
            name = error.option_name
            said = f"No such option '{name}'. Is it the job file's own? job.py -- {name}"
            raise click.NoSuchOption(name, said, ctx=error.ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them, each group under its name, in the order in which they are declared."""
        groups: dict[str, list[tuple[str, str]]] = {}
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        for option in sorted(options, key=lambda one: not isinstance(one, Option)):
            group = option.group if isinstance(option, Option) else "Other"
            if record := option.get_help_record(ctx):
                groups.setdefault(group, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)
