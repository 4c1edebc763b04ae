"""The documentation is complete: links have targets, and every page and option is described."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from click.testing import CliRunner

import cli
import pipeworker
from launcher.command import Option
from pipeworker.display.summary import PlanContext, explain_bubble
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.simulate import simulate
from support.pages import DOCS, PAGES, ROOT, code, tokens
from support.pure.makespans import checked, picture
from support.pure.orders import build

OTHERS = ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "deploy/README.md", "tests/README.md"]
LINKED = [*PAGES, *(ROOT / name for name in OTHERS)]
NAMED = re.compile(r"(?:docs|deploy|examples|benchmarks|tests)/[\w/.-]*\w(?![\w*])")
"""A path of a file or folder, as pages name it."""
INDEX = DOCS / "index.md"


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as they are made from their words."""
    found, heading = set(), False
    for token in tokens(page.read_text()):
        if heading:
            words = "".join(child.content for child in token.children or ())
            found.add(re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-"))
        heading = token.type == "heading_open"
    return found


def broken(page: Path, text: str) -> list[str]:
    """Return the links of a page, and the paths of files that it names, without a target.

    The pages of the site have links to each other alone.
    """
    found = []
    for token in tokens(text):
        link = str(token.attrGet("href") or token.attrGet("src") or "")
        if link and not re.match(r"\w+:", link):
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            outside = page in PAGES and token.attrGet("href") and not target.is_relative_to(DOCS)
            if outside or not target.exists() or (anchor and anchor not in anchors(target)):
                found.append(link)
        if token.type == "code_inline":
            found += [path for path in NAMED.findall(token.content) if not (ROOT / path).exists()]
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_a_broken_link_is_detected() -> None:
    text = (
        "[a](options.md) [b](nowhere.md) [c](options.md#nowhere) ![](no.svg) `docs/no.md` "
        "[d](../CHANGELOG.md)"
    )
    wrong = ["nowhere.md", "options.md#nowhere", "no.svg", "docs/no.md", "../CHANGELOG.md"]
    assert broken(DOCS / "status.md", text) == wrong


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


def test_code_blocks_in_python_compile() -> None:
    for page in PAGES:
        for block in code(page.read_text(), "python"):
            compile(block, page, "exec")


def test_options_are_described_in_the_groups_of_the_help() -> None:
    sections = re.split(r"^## (.*)$", (DOCS / "options.md").read_text(), flags=re.MULTILINE)[1:]
    described = {
        title: sorted(re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE))
        for title, section in zip(sections[::2], sections[1::2], strict=True)
    }
    groups: dict[str, list[str]] = {}
    for option in cli.launch.params:
        if isinstance(option, Option) and not option.hidden:
            found = {*option.opts, *option.secondary_opts} & {*described.get(option.group, ())}
            groups.setdefault(option.group, []).append(found.pop() if found else option.opts[0])
    assert described == {title: sorted(names) for title, names in groups.items()}


@pytest.mark.parametrize("page", ["README.md", "docs/options.md", "docs/howto/coming-from.md"])
@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("activation checkpointing", "`--recompute`"),
        ("gradient checkpointing", "`--recompute`"),
        ("gradient accumulation", "`--accumulate"),
        ("DDP", "`--replicas"),
        ("FSDP", "more `--stages`"),
        ("ZeRO-1", "`--shard-optimizer`"),
        ("split points", "`--balance"),
        ("early stopping", "`--patience"),
        ("batch size", "`data()`"),
    ],
)
def test_the_words_of_other_libraries_are_beside_ours(page: str, word: str, ours: str) -> None:
    rows = [row for row in (ROOT / page).read_text().splitlines() if row.startswith("|")]
    assert any(word.lower() in row.lower() and ours in row for row in rows)


def test_commands_are_described() -> None:
    described = re.findall(
        r"^\| `pipeworker (\w+)", (DOCS / "commands.md").read_text(), re.MULTILINE
    )
    commands = {name for name, command in cli.main.commands.items() if not command.hidden}
    assert set(described) == commands


def test_causes_of_a_bubble_are_described_as_they_are_reported() -> None:
    page = (DOCS / "howto" / "bubble.md").read_text()
    for busy, against in (
        ((0.1, 0.1, 0.31), PlanContext(0.1)),
        ((0.1,) * 8, PlanContext(0.1, workers=8, cores=4)),
        ((0.4,) * 2, PlanContext(0.1, workers=2, seconds=1e-3)),
    ):
        cause, _, _ = explain_bubble(0.9, busy, against).partition(" (")
        assert f"| `{cause}` |" in page


def test_public_names_are_in_the_reference() -> None:
    named = set(re.findall(r"^\.\. auto\w+:: (\w+)$", (DOCS / "api.rst").read_text(), re.MULTILINE))
    assert named == {*pipeworker.__all__} - {"__version__"}


def test_the_pictures_of_schedules_show_them() -> None:
    page = (DOCS / "howto" / "schedules.md").read_text()
    for name in ORDERS:
        assert "\n".join(["", name, "", *picture(checked(name, 4, 6)), ""]) in page
        assert f"\n| `{name}` | " in page


def test_the_picture_shows_the_schedule() -> None:
    maker = runpy.run_path(str(DOCS / "pipeline.py"))
    assert (DOCS / "pipeline.svg").read_text() == maker["svg"]()
    stages, microbatches = maker["STAGES"], maker["MICROBATCHES"]
    timing = simulate(build("gpipe", stages, microbatches, "never"))
    assert f"the bubble: {timing.bubble:.1%}" in maker["svg"]()


def test_the_picture_of_a_plan_is_what_the_command_draws(tmp_path: Path) -> None:
    (command,) = re.findall(
        r"^\$ pipeworker (plan .*) --svg step\.svg$",
        (DOCS / "howto" / "plan.md").read_text(),
        re.MULTILINE,
    )
    result = CliRunner().invoke(cli.main, [*command.split(), "--svg", str(tmp_path / "step.svg")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "step.svg").read_text() == (DOCS / "howto" / "interleaved.svg").read_text()
