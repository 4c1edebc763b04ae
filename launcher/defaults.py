"""Default options of a project, from a file; and misspelt variables of the environment.

The file is ``pipeworker.toml``, or ``pyproject.toml`` with a table ``[tool.pipeworker]``, beside
the job file or else in the current folder. Only the first file that is found is read. ``--config``
names another file.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from launcher.command import FILE, Option
from launcher.options import ScheduleType
from pipeworker.errors import UsageError
from pipeworker.job.options import EXCLUSIVE
from pipeworker.job.renamed import hyphened, reject_batch_size, reject_renamed

_PLACES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("pipeworker.toml", ()),
    ("pyproject.toml", ("tool", "pipeworker")),
)
_WANTED: dict[str, tuple[tuple[type, ...], str]] = {
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "choice": ((str,), "a string"),
}
"""By the name of an option's type in click: the types of its value in a file, and their name."""
_ABOVE = {ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT}
_TEXT = (str, int), "a string, a whole number or a list of these"
_ARGUMENTS, _WORDS = "arguments", (str, int, float)
"""The key of the words for the job file, and their types."""
_PREFIX = "PIPEWORKER_"
_OTHERS = ("TOKEN", "TIMINGS")
"""Variables of pipeworker that are not options."""
_NEARLY = 0.75
"""Ratio of difflib from which a name counts as a misspelling of another."""
_FEW = 2
"""Number of options up to which a prefix of their names is completed in a message."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """The options that a file gives, by key.

    Attributes:
        where: name of the file in messages.
        folder: to which the file's paths are relative.
    """

    where: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    @staticmethod
    def find(folders: Iterable[Path]) -> Defaults:
        """Read the file in the first of these folders that has one."""
        for folder in dict.fromkeys(folders):
            for name, table in _PLACES:
                if (found := _read(folder / name, table)) is not None:
                    return found
        return Defaults()

    @staticmethod
    def read(path: Path) -> Defaults:
        """Read the file that ``--config`` names."""
        table = dict(_PLACES).get(path.name, ())
        if path.is_dir():
            raise UsageError(f"--config {path}: is a directory; give a file with options")
        found = _read(path, table)
        if found is None:
            what = f"no table [{'.'.join(table)}]" if path.is_file() else "no such file"
            raise UsageError(f"--config {path}: {what}; give a file with options")
        return found

    def fill(self, context: click.Context, parameters: Iterable[click.Parameter]) -> None:
        """Set the options of a command that neither the command line nor the environment gives.

        A torchrun rank ignores those of `parameters`, which are `launch`'s, that it does not have.
        """
        options = {
            word.removeprefix("--"): option
            for option in parameters
            if isinstance(option, Option)
            for word in option.opts
            if word.startswith("--")
        }
        known = {str(option.name) for option in options.values() if not option.once}
        for key, value in self.values.items():
            if key == _ARGUMENTS:
                self._fill_arguments(value, context)
                continue
            word = hyphened(key)
            option = options.get(word)
            if option is None:
                if isinstance(value, dict):
                    raise UsageError(f"{self.where}: [{key}] is not an option; remove this head")
                reject_renamed(key, known, hyphened, _assignment, f"{self.where}: ")
                reject_batch_size(key, known, hyphened, f"{self.where}: ")
                meant = get_close_matches(word, options, 1) or ["one of `pipeworker launch -h`"]
                raise UsageError(f"{self.where}: {key} is not an option; did you mean {meant[0]}?")
            if option.once:
                raise UsageError(f"{self.where}: {key} is only for the command line; remove it")
            converted = self._convert(key, value, option, context)
            name = str(option.name)
            names = (name, EXCLUSIVE.get(name, name))
            sources = {context.get_parameter_source(one) for one in names}
            if name in context.params and not sources & _ABOVE:
                context.params[name] = converted
                context.set_parameter_source(name, ParameterSource.DEFAULT_MAP)
        context.meta[FILE] = self.where

    def _fill_arguments(self, value: Any, context: click.Context) -> None:
        """Set the words for the job file, unless the command line has some."""
        if not isinstance(value, list) or any(type(one) not in _WORDS for one in value):
            raise UsageError(
                f"{self.where}: {_ARGUMENTS} = {value!r}: must be a list of strings and numbers"
            )
        self._check_null(_ARGUMENTS, value)
        if not context.params[_ARGUMENTS]:
            context.params[_ARGUMENTS] = tuple(map(str, value))
            context.set_parameter_source(_ARGUMENTS, ParameterSource.DEFAULT_MAP)

    def _check_null(self, key: str, values: Iterable[Any]) -> None:
        """Reject a text that cannot be a word of a command line, and so no path either."""
        if found := [one for one in values if "\0" in str(one)]:
            raise UsageError(f"{self.where}: {key} has {found[0]!r}; remove the null character")

    def _convert(self, key: str, value: Any, option: Option, context: click.Context) -> Any:
        """Convert a value of the file as click converts one of the command line."""
        kinds, wanted = _WANTED.get(option.type.name, _TEXT)
        many = value if isinstance(value, list) and kinds == _TEXT[0] else [value]
        if any(type(one) not in kinds for one in many):
            raise UsageError(f"{self.where}: {key} = {value!r}: must be {wanted}")
        self._check_null(key, many)
        text = value if kinds != _TEXT[0] else ",".join(map(str, many))
        is_file = isinstance(option.type, ScheduleType) and (self.folder / text).is_file()
        if is_file or isinstance(option.type, click.Path):
            text = str(self.folder / text)
        try:
            return option.type.convert(text, option, context)
        except click.BadParameter as error:
            reason = error.message.removesuffix(".")
            raise UsageError(f"{self.where}: {key} = {value!r}: {reason}") from None
        except UsageError as error:  # of a schedule
            raise UsageError(f"{error} ({self.where})") from None


def check_variables(
    environment: Iterable[str], parameters: Iterable[click.Parameter]
) -> Iterator[str]:
    """Yield a warning for each variable that is not read and resembles that of an option.

    The `parameters` are those of `launch`.

    Raises:
        UsageError: a variable has a former name of an option.
    """
    options = {str(one.name): one for one in parameters if isinstance(one, Option)}
    known = {name for name, option in options.items() if not option.once}
    for variable in environment:
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in _OTHERS:
            continue
        reject_renamed(name.lower(), known, _variable, "{}={:d}".format)
        meant = _similar(name.lower(), options)
        if meant and options[meant[0]].once:
            word = options[meant[0]].opts[-1]
            yield f"{variable}: not read; {word} is only for the command line"
        elif meant and _variable(meant[0]) != variable:
            yield f"{variable}: not read; did you mean {' or '.join(map(_variable, meant))}?"


def _assignment(key: str, value: bool) -> str:
    return f"{key} = {str(value).lower()}"


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _similar(name: str, known: Collection[str]) -> list[str]:
    """Return the known names that a name equals, resembles, or is a prefix of."""
    if name in known:
        return [name]
    completed = [one for one in known if one.startswith(name)]
    return completed if 0 < len(completed) <= _FEW else get_close_matches(name, known, 1, _NEARLY)


def _is_hidden(path: Path) -> bool:
    """Return whether a folder of the path cannot be searched, whether or not the file exists."""
    try:
        path.lstat()  # what a link leads to may be hidden, and the link is not
    except OSError:
        return True
    return False


def _read(path: Path, table: tuple[str, ...]) -> Defaults | None:
    """Return the options in the table of a file; None if there is no file or no table."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if isinstance(error, PermissionError) and _is_hidden(path):
            raise UsageError(
                f"{path.parent.absolute()}: cannot be searched for {path.name}: {error.strerror}; "
                "make it accessible, or change to another folder"
            ) from None
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}; make it readable, or remove it"
        ) from None
    try:
        values = _parsed(content)
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise UsageError(f"{path}: not TOML: {error}; correct it") from None
    for name in table:
        values = values.get(name)
        if values is None:
            return None
        if not isinstance(values, dict):
            raise UsageError(f"{path}: {name} is not a table; write [{'.'.join(table)}]")
    return Defaults(f"{path}{', [tool.pipeworker]' if table else ''}", values, path.parent)


def _parsed(content: bytes) -> Any:
    if sys.version_info >= (3, 11):  # imported only when there is a file
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(content.decode())
