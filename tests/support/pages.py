"""Pages of the documentation: their files are written and their commands typed, as readers do."""

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
from support.jobs import Jobs

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
_ANY = "…"
_PROMPT = "(Pdb) "
_ENDS_BADLY = ("error:", "interrupted")
_HOME = "/home/me"
"""The reader's folder, as pages show it."""


@dataclass(frozen=True, slots=True)
class Write:
    """A file that a page shows: a block of code whose first line is ``# NAME``."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Type:
    """A command behind ``$`` in a block of ``console``, and what the page shows of its answer.

    `typed` are the lines behind a debugger's prompt.
    """

    command: str
    shown: tuple[str, ...]
    typed: tuple[str, ...] = ()

    @staticmethod
    def of(text: str) -> Type:
        """Of the lines that a page has from one ``$`` to the next."""
        command, *lines = text.splitlines()
        typed = tuple(line.removeprefix(_PROMPT) for line in lines if line.startswith(_PROMPT))
        return Type(command, tuple(x for x in lines if not x.startswith(_PROMPT)), typed)


def tokens(page: str) -> Iterator[Token]:
    """A page's blocks, and what is within its lines."""
    for token in MarkdownIt().enable("table").parse(page):
        yield token
        yield from token.children or ()


def code(page: str, language: str) -> list[str]:
    """A page's blocks of code in a language."""
    blocks = [token for token in tokens(page) if token.type == "fence"]
    return [block.content for block in blocks if block.info.split(" ")[0] == language]


def acts(page: str) -> list[Write | Type]:
    """What a reader of a page does, in order."""
    found: list[Write | Type] = []
    for token in tokens(page):
        if token.type == "fence" and token.info == "console":
            commands = _COMMAND.split(token.content.replace("\\\n", ""))[1:]
            found += map(Type.of, commands)
        elif token.type == "fence" and (name := _NAME.match(token.content)):
            found.append(Write(name[1], token.content))
    return found


def unsaid(shown: Sequence[str], answer: str) -> str | None:
    """The first line that is shown and does not come in the answer, behind those before it.

    Numbers that another machine gives are all alike; ``…`` is anything.
    """
    lines = iter([_plain(line) for line in answer.splitlines()])
    for line in shown:
        pattern = re.escape(_plain(line)).replace(re.escape(_ANY), ".*")
        if line != _ANY and not any(re.fullmatch(pattern, said) for said in lines):
            return line
    return None


def _plain(line: str) -> str:
    return " ".join(_OF_A_MACHINE.sub("0.0", line.removeprefix(_PROMPT)).split())


def follow(page: str, jobs: Jobs) -> None:
    """Do what a page says; its commands end as it shows, and answer what it shows."""
    for act in acts(page):
        match act:
            case Write():
                jobs.write(act.text, act.name)
            case Type():
                status, answer = _run(act, jobs)
                answer = answer.replace(str(jobs.folder), _HOME)
                fails = any(line.startswith(_ENDS_BADLY) for line in act.shown)
                assert bool(status) == fails, f"$ {act.command}: status {status}\n{answer}"
                line = unsaid(act.shown, answer)
                assert line is None, f"$ {act.command}: does not say {line!r}\n{answer}"


def _run(act: Type, jobs: Jobs) -> tuple[int, str]:
    program, *words = shlex.split(act.command)
    if program in _INTERPRETED:
        process = jobs.python(*_INTERPRETED[program], *words, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.writelines(f"{line}\n" for line in act.typed)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode is not None
        return process.returncode, stdout + stderr
    ran = subprocess.run(
        act.command, shell=True, cwd=jobs.folder, capture_output=True, text=True, timeout=60
    )
    return ran.returncode, ran.stdout + ran.stderr
