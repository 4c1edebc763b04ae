"""Execution of documentation pages: their files are written and their commands are run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

import pipeworker
from support.processes.nanobind import without_reports
from support.real_jobs.jobs import Jobs

ROOT = Path(pipeworker.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_INTERPRETED = {
    "pipeworker": [str(Path(sys.executable).with_name("pipeworker"))],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}
_NAME = re.compile(r"# ([\w./-]+\.\w+)\n")
_COMMAND = re.compile(r"^\$ ", re.MULTILINE)
_OF_A_MACHINE = re.compile(r"\d{4}-\d\d-\d\d|\d\d(?::\d\d)+|\d+\.\d+(?:e[-+]\d+)?|\d{6,}")
"""Numbers with a point or of six digits, dates and times."""
_BALANCE = re.compile(r"\((?:\d+,)*\d+ layers\)")
"""The layers of each stage, by their measured times."""
_CONSOLE = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
_TENS = re.compile(r"(?<![\d.])(0*)([1-9]\d*)0\b(?!\.)")
"""Multiples of ten; those with leading zeros keep their width."""
_ANY = "…"
_PROMPT = "(Pdb) "
_ENDS_BADLY = ("error:", "interrupted")
_HOME = "/home/me"
"""The reader's folder, as pages show it."""


@dataclass(frozen=True, slots=True)
class Write:
    """A file on a page: a block of code whose first line is ``# NAME``."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Type:
    """A command of a ``console`` block.

    Attributes:
        command: the line after ``$``.
        shown: the lines of its output on the page.
        typed: the lines after a debugger's prompt.
    """

    command: str
    shown: tuple[str, ...]
    typed: tuple[str, ...] = ()

    @staticmethod
    def of(text: str) -> Type:
        """Parse the lines of a block from one ``$`` to the next."""
        command, *lines = text.splitlines()
        typed = tuple(line.removeprefix(_PROMPT) for line in lines if line.startswith(_PROMPT))
        return Type(command, tuple(x for x in lines if not x.startswith(_PROMPT)), typed)


def tokens(page: str) -> Iterator[Token]:
    """Yield the blocks of a page and their inline tokens."""
    for token in MarkdownIt().enable("table").parse(page):
        yield token
        yield from token.children or ()


def code(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    blocks = [token for token in tokens(page) if token.type == "fence"]
    return [block.content for block in blocks if block.info.split(" ")[0] == language]


def tenth(page: str) -> str:
    """Return a page whose commands train for a tenth of the steps, and print lines of so many."""

    def divided(found: re.Match[str]) -> str:
        return found[1] + ("0" if found[1] else "") + found[2]

    return _CONSOLE.sub(lambda block: _TENS.sub(divided, block[0]), page)


def actions(page: str) -> list[Write | Type]:
    """Return the actions of a reader who follows a page, in order."""
    found: list[Write | Type] = []
    for token in tokens(page):
        if token.type == "fence" and token.info == "console":
            commands = _COMMAND.split(token.content.replace("\\\n", ""))[1:]
            found += map(Type.of, commands)
        elif token.type == "fence" and (name := _NAME.match(token.content)):
            found.append(Write(name[1], token.content))
    return found


def missing_line(shown: Sequence[str], output: str) -> str | None:
    """Return the first line of the page that is missing in the output, if there is one.

    Lines must come in order. All measured numbers are equal, and ``…`` stands for anything.
    """
    lines = iter([_plain(line) for line in output.splitlines()])
    for line in shown:
        pattern = re.escape(_plain(line)).replace(re.escape(_ANY), ".*")
        if line != _ANY and not any(re.fullmatch(pattern, printed) for printed in lines):
            return line
    return None


def _plain(line: str) -> str:
    line = _BALANCE.sub(lambda found: re.sub(r"\d+", "0", found[0]), line)
    return " ".join(_OF_A_MACHINE.sub("0.0", line.removeprefix(_PROMPT)).split())


def follow(page: str, jobs: Jobs) -> None:
    """Follow a page; check the exit status and the output of its commands."""
    for act in actions(page):
        match act:
            case Write():
                jobs.write(act.text, act.name)
            case Type():
                status, output = _run(act, jobs)
                output = output.replace(str(jobs.folder), _HOME)
                fails = any(line.startswith(_ENDS_BADLY) for line in act.shown)
                assert bool(status) == fails, f"$ {act.command}: status {status}\n{output}"
                line = missing_line(act.shown, output)
                assert line is None, f"$ {act.command}: does not print {line!r}\n{output}"


def _run(act: Type, jobs: Jobs) -> tuple[int, str]:
    program, *words = shlex.split(act.command)
    if program in _INTERPRETED:
        process = jobs.python(*_INTERPRETED[program], *words, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.writelines(f"{line}\n" for line in act.typed)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode is not None
        return process.returncode, without_reports(stdout) + without_reports(stderr)
    ran = subprocess.run(
        act.command, shell=True, cwd=jobs.folder, capture_output=True, text=True, timeout=60
    )
    return ran.returncode, without_reports(ran.stdout) + without_reports(ran.stderr)
