"""What a project says of its jobs in a file: the options of those that do not say them.

And variables of the environment that are meant to be such, and are not.

``pipeworker.toml``, or the table ``[tool.pipeworker]`` of ``pyproject.toml``: beside the job file,
or else in the current folder. The first that is found counts, and no other.
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
from pipeworker.errors import UsageError
from pipeworker.job.options import RIVALS

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
"""By the name of an option's type in click, what a file may say."""
_ABOVE = {ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT}
_TEXT = (str, int), "a string, a whole number or a list of these"
_PREFIX = "PIPEWORKER_"
_OTHERS = ("TOKEN", "TIMINGS")
"""Variables of ours that are no options."""
_NEARLY = 0.75
"""How alike two names are of which one is a slip of the other, as difflib has it."""
_FEW = 2
"""Names that may be meant by what they begin with."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a file says.

    Attributes:
        where: what to call it.
        folder: that it is in; paths are seen from there.
    """

    where: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    @staticmethod
    def find(folders: Iterable[Path]) -> Defaults:
        """In the first folder where there is such a file.

        Raises:
            UsageError: it cannot be read.
        """
        for folder in dict.fromkeys(folders):
            for name, table in _PLACES:
                values = _read(folder / name, table)
                if values is not None:
                    said = f"{folder / name}{', [tool.pipeworker]' if table else ''}"
                    return Defaults(said, values, folder)
        return Defaults()

    def fill(self, context: click.Context, parameters: Iterable[click.Parameter]) -> None:
        """Give them to the options of a command that nobody else says.

        Args:
            parameters: of `launch`; what only that one has is not for a rank of a torchrun job.

        Raises:
            UsageError: an option is unknown, of the wrong type, or of the command line alone.
        """
        options = {
            word.removeprefix("--"): option
            for option in parameters
            if isinstance(option, Option)
            for word in option.opts
        }
        for key, value in self.values.items():
            word = key.replace("_", "-")
            option = options.get(word)
            if option is None:
                meant = get_close_matches(word, options, 1) or ["one of `pipeworker launch -h`"]
                raise UsageError(f"{self.where}: no option is {key}: did you mean {meant[0]}?")
            if option.once:
                raise UsageError(f"{self.where}: {key} can only be said on the command line")
            given = self._convert(key, value, option, context)
            name = str(option.name)
            sources = {context.get_parameter_source(one) for one in (name, RIVALS.get(name, name))}
            if name in context.params and not sources & _ABOVE:
                context.params[name] = given
                context.set_parameter_source(name, ParameterSource.DEFAULT_MAP)
        context.meta[FILE] = self.where

    def _convert(self, key: str, value: Any, option: Option, context: click.Context) -> Any:
        """A value of the file's, as click would give it."""
        kinds, wanted = _WANTED.get(option.type.name, _TEXT)
        many = value if isinstance(value, list) and kinds == _TEXT[0] else [value]
        if any(type(one) not in kinds for one in many):
            raise UsageError(f"{self.where}: {key} = {value!r}: it must be {wanted}")
        text = value if kinds != _TEXT[0] else ",".join(map(str, many))
        if isinstance(option.type, click.Path):
            text = str(self.folder / text)
        try:
            return option.type.convert(text, option, context)
        except click.BadParameter as error:
            raise UsageError(f"{self.where}: {key} = {value!r}: {error.message}") from None


def slips(environment: Iterable[str], parameters: Iterable[click.Parameter]) -> Iterator[str]:
    """Variables that nobody reads and that are nearly those of options, each in a sentence.

    Args:
        parameters: of `launch`.
    """
    options = {str(one.name).upper(): one for one in parameters if isinstance(one, Option)}
    for variable in environment:
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in _OTHERS:
            continue
        meant = _meant(name, options)
        if meant and options[meant[0]].once:
            word = options[meant[0]].opts[-1]
            yield f"{variable} is not read: {word} can only be said on the command line"
        elif meant and meant != [name]:
            which = " or ".join(f"{_PREFIX}{one}" for one in meant)
            yield f"{variable} is not read: is {which} meant?"


def _meant(name: str, there: Collection[str]) -> list[str]:
    """What a name is, is nearly, or begins."""
    if name in there:
        return [name]
    begun = [one for one in there if one.startswith(name)]
    return begun if 0 < len(begun) <= _FEW else get_close_matches(name, there, 1, _NEARLY)


def _read(path: Path, table: tuple[str, ...]) -> Mapping[str, Any] | None:
    """The table of a file; None where there is none."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    try:
        values = _parsed(content)
    except (ValueError, RecursionError) as error:  # of TOML, or of UTF-8
        raise UsageError(f"{path} is not TOML: {error}") from None
    for name in table:
        values = values.get(name)
        if values is None:
            return None
        if not isinstance(values, dict):
            raise UsageError(f"{path}: {name} is no table")
    found: Mapping[str, Any] = values
    return found


def _parsed(content: bytes) -> Any:
    """TOML; its parser is imported where there is a file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(content.decode())
