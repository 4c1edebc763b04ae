"""The documentation is whole: links lead somewhere, every page and every option is there."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

import cli
import pipeworker
from launcher.command import Option
from pipeworker.plan.actions import Kind
from pipeworker.plan.orders import build
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.plan.simulate import simulate
from pipeworker.session.show.ending import Measured, excess
from support.pages import DOCS, PAGES, ROOT, code, tokens

LINKED = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "deploy/README.md"))]
INDEX = DOCS / "index.md"


@cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are made of their words."""
    found, heading = set(), False
    for token in tokens(page.read_text()):
        if heading:
            words = "".join(child.content for child in token.children or ())
            found.add(re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-"))
        heading = token.type == "heading_open"
    return found


def broken(page: Path, text: str) -> list[str]:
    """The links of a page, and the paths of documents that it names, that lead nowhere."""
    found = []
    for token in tokens(text):
        link = str(token.attrGet("href") or token.attrGet("src") or "")
        if link and not re.match(r"\w+:", link):
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                found.append(link)
        if token.type == "code_inline":
            paths = re.findall(r"(?:docs|deploy|examples|benchmarks)/[\w/.-]*\w", token.content)
            found += [path for path in paths if not (ROOT / path).exists()]
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_a_broken_link_would_be_seen() -> None:
    text = "[a](options.md) [b](nowhere.md) [c](options.md#nowhere) ![](no.svg) `docs/no.md`"
    page = DOCS / "status.md"
    assert broken(page, text) == ["nowhere.md", "options.md#nowhere", "no.svg", "docs/no.md"]


def test_every_page_is_in_the_site_once() -> None:
    listed = [
        line
        for block in code(INDEX.read_text(), "{toctree}")
        for line in block.splitlines()
        if line and not line.startswith(":")
    ]
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.rst")]
    assert sorted(listed) == sorted(
        str(page.relative_to(DOCS).with_suffix("")) for page in pages if page != INDEX
    )


def test_python_is_python() -> None:
    for page in PAGES:
        for block in code(page.read_text(), "python"):
            compile(block, page, "exec")


def test_options_are_described_in_the_groups_that_help_has() -> None:
    groups: dict[str, set[str]] = {}
    for option in cli.launch.params:
        if isinstance(option, Option) and not option.hidden:
            groups.setdefault(option.group, set()).add(max(option.opts, key=len))
    sections = re.split(r"^## (.*)$", (DOCS / "options.md").read_text(), flags=re.MULTILINE)[1:]
    described = {
        title: set(re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE))
        for title, section in zip(sections[::2], sections[1::2], strict=True)
    }
    assert described == groups


def test_commands_are_described() -> None:
    described = re.findall(
        r"^\| `pipeworker (\w+)", (DOCS / "commands.md").read_text(), re.MULTILINE
    )
    commands = {name for name, command in cli.main.commands.items() if not command.hidden}
    assert set(described) == commands


def test_causes_of_a_bubble_are_described_as_they_are_said() -> None:
    page = (DOCS / "howto" / "bubble.md").read_text()
    for busy, against in (
        ((0.1, 0.1, 0.31), Measured(0.1)),
        ((0.1,) * 8, Measured(0.1, workers=8, cores=4)),
        ((0.4,) * 2, Measured(0.1, workers=2, seconds=1e-3)),
    ):
        cause, _, _ = excess(0.9, busy, against).partition(" (")
        assert f"| `{cause}` |" in page


def test_public_names_are_in_the_reference() -> None:
    named = set(re.findall(r"^\.\. auto\w+:: (\w+)$", (DOCS / "api.rst").read_text(), re.MULTILINE))
    assert named == {*pipeworker.__all__} - {"__version__"}


def test_the_picture_is_the_schedule() -> None:
    maker = runpy.run_path(str(DOCS / "pipeline.py"))
    assert (DOCS / "pipeline.svg").read_text() == maker["svg"]()
    stages, microbatches = maker["STAGES"], maker["MICROBATCHES"]
    drawn: dict[int, list[tuple[int, int, Kind]]] = {stage: [] for stage in range(stages)}
    length = 0
    for stage, m, first, count, _ in maker["cells"]():
        kind = Kind.FORWARD if count == maker["FORWARD"] else Kind.BACKWARD
        drawn[stage].append((first, m, kind))
        length = max(length, first + count)
    order = gpipe(Placement.identity(stages), microbatches, ())
    for stage, actions in enumerate(order):
        assert [c[1:] for c in sorted(drawn[stage])] == [(a.microbatch, a.kind) for a in actions]
    timing = simulate(build("gpipe", stages, microbatches, "never"))
    assert timing.makespan == length
    assert f"{timing.bubble:.0%} of the step" in maker["svg"]()
