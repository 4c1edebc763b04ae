"""Commands whose mistakes are one message, and whose options the help shows in groups."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from typing import IO, Any, NoReturn

import click
from click.core import ParameterSource

from pipeworker.display.text import sanitize
from pipeworker.errors import PipeworkerError, RecordError, UsageError
from pipeworker.job.renamed import reject_batch_size, reject_renamed, written

INTERRUPTED = 130
"""The exit status of an interrupted command, as shells use it."""

FILE = "pipeworker.file"
"""Key in a context's ``meta``: the name of the file that options came from."""


class NonEmptyPath(click.Path):
    """A path that is not "", as of a variable that is not set: that would be the current folder.

    "-" is the standard output, or input, of other commands.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("is empty", param, ctx)
        if os.fspath(value) == "-":
            self.fail("is '-', which names no file", param, ctx)
        return super().convert(value, param, ctx)


PATH = NonEmptyPath(path_type=Path)
RUN = click.argument("run", type=PATH)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_OPTIONS = re.compile(r"(?:^| and )(--[\w-]+)")
"""The options at the beginning of an error, which it is about."""
_NO_THREAD = (
    "the system grants no more threads or processes; raise the limit (ulimit -u and -v, pids.max "
    "of the cgroup)"
)
_METAVARS = {int: "N", float: "X"}
_WRONG_PATH = {errno.EACCES, errno.ENAMETOOLONG}
"""Errors of the system that a path of the command line, a variable or a file causes."""


class Shown(click.ClickException):
    """An error of pipeworker as the command line shows it."""

    def __init__(self, error: PipeworkerError) -> None:
        super().__init__(sanitize(str(error)))
        self.exit_code = error.exit_status  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", file, err=file is None)


@contextmanager
def clearly() -> Iterator[None]:
    """Turn pipeworker's errors inside the context into one message and an exit status."""
    try:
        yield
    except PipeworkerError as error:
        raise Shown(error) from None
    except click.UsageError as error:
        raise Shown(UsageError(_one_line(error))) from None
    except BrokenPipeError:  # the reader of the output is gone, as in `| head`; click ends quietly
        raise
    except OSError as error:  # the system refused descriptors, a process or a file
        if any(frame.f_code is click.echo.__code__ for frame, _ in walk_tb(error.__traceback__)):
            raise Shown(RecordError("standard output", error)) from None
        where = f"{error.filename}: " if error.filename else ""
        if where and error.errno in _WRONG_PATH:
            raise Shown(UsageError(f"{where}{error.strerror}; give another path")) from None
        raise Shown(PipeworkerError(f"{where}{error.strerror or error}")) from None
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        raise Shown(PipeworkerError(_NO_THREAD)) from None
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)


def _one_line(error: click.UsageError) -> str:
    """Return click's message as ours: ``<option or argument>: <what is wrong>; <what to do>``."""
    text = error.message.rstrip(".")
    if isinstance(error, click.BadOptionUsage):  # it lacks the context
        name, value = error.option_name, " VALUE" * ("requires" in text)
        return f"{name}: {text.partition(f'{name!r} ')[2]}; write {name}{value}"
    assert error.ctx
    usage = f"write `{' '.join(error.ctx.get_usage().split()[1:])}`"
    listed = f"see `{error.ctx.command_path} --help`"
    match error:
        case click.NoSuchOption():
            meant = " or ".join(_meant(error))
            advice = f"did you mean {meant}?" if meant else listed
            return f"{error.option_name}: no such option; {advice}"
        case click.BadParameter(param=click.Parameter() as parameter):
            name = parameter.get_error_hint(error.ctx).replace("'", "")
            if isinstance(error, click.MissingParameter):
                return f"{name}: missing; {usage}"
            if isinstance(parameter.type, click.types.BoolParamType):  # its list begins with ""
                text, listed = text.partition(".")[0], "write true or false"
            advice = "" if isinstance(parameter.type, click.Choice) else f"; {listed}"
            return f"{name}: {text}{advice}"
    if extra := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", text):
        return f"{extra[1]}: unexpected; {usage}"
    return f"{text}; {usage}"


def _meant(error: click.NoSuchOption) -> list[str]:
    """Return the options that a name resembles, without the dashes, which all have."""
    bare = {option.lstrip("-"): option for option in error.possibilities or ()}
    return [bare[name] for name in get_close_matches(error.option_name.lstrip("-"), bare)]


class Option(click.Option):
    """An option with a group.

    Args:
        words: its spellings, and its name if that is another one.
        text: its help, which also shows its default value if it has one.
        written: spelling in the help, if the help must not list all of them.
        settings: further arguments of :class:`click.Option`.

    Attributes:
        group: heading in the help.
        once: whether only the command line may give it, because it belongs to one start.
    """

    group = "Other"
    once = False

    def __init__(
        self,
        words: str | tuple[str, ...],
        text: str,
        kind: Any = None,
        *,
        written: str = "",
        **settings: Any,
    ) -> None:
        names = words.split() if isinstance(words, str) else words
        settings = {
            "metavar": _METAVARS.get(kind),
            "show_default": "default" in settings,
            **settings,
        }
        super().__init__(names, help=text, type=kind, **settings)
        self.written = written

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        found = super().get_help_record(ctx)
        return (self.written, found[1]) if found and self.written else found

    def get_error_hint(self, ctx: click.Context | None) -> str:
        source = origin(ctx, str(self.name)) if ctx else ""
        return super().get_error_hint(ctx) + (f" ({source})" if source else "")


def is_typed(context: click.Context, name: str) -> bool:
    """Return whether the command line gives an option."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def is_given(context: click.Context, name: str) -> bool:
    """Return whether the command line, the environment or a file gives an option."""
    source = context.get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT)


def origin(context: click.Context, name: str) -> str:
    """Return the variable or file that gives an option; "" if neither does."""
    match context.get_parameter_source(name):
        case ParameterSource.ENVIRONMENT:
            return f"{context.auto_envvar_prefix}_{name.upper()}"
        case ParameterSource.DEFAULT_MAP:
            return str(context.meta.get(FILE, "a file"))
    return ""


@contextmanager
def naming_sources(context: click.Context) -> Iterator[None]:
    """Add to the error of one or two options in the context the variables or files with them."""
    try:
        yield
    except UsageError as error:
        named = {*_OPTIONS.findall(str(error).partition(": ")[0])}
        options = [
            one for one in context.command.params if named & {*one.opts, *one.secondary_opts}
        ]
        sources = filter(None, (origin(context, str(option.name)) for option in options))
        if found := ", ".join(dict.fromkeys(sources)):
            raise UsageError(f"{error} ({found})") from None
        raise


class Command(click.Command):
    """A command whose options have groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; advise on a renamed option, and on one meant for the job file."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            self.reject(error)

    def reject(self, error: click.NoSuchOption) -> NoReturn:
        """Reject an unknown option; advise on what it may be.

        Raises:
            UsageError: it was renamed, or may be meant for the job file.
            NoSuchOption: it resembles another one.
        """
        given = error.option_name.removeprefix("--")
        known = {str(parameter.name) for parameter in self.params}
        reject_renamed(given, known, written)
        reject_batch_size(given, known, written)
        passes_on = any(parameter.name == "arguments" for parameter in self.params)
        if not passes_on or {*_meant(error)} - {"--help"}:
            raise error
        name = error.option_name
        raise UsageError(
            f"{name}: no such option; is it for the job file? Write: job.py -- {name}"
        ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group, in the order of their declaration."""
        groups: dict[str, list[tuple[str, str]]] = {}
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        for option in sorted(options, key=lambda one: not isinstance(one, Option)):
            group = option.group if isinstance(option, Option) else "Other"
            if record := option.get_help_record(ctx):
                groups.setdefault(group, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)
