"""Pictures of the two tables that most will look for, drawn from the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

COLOURS = ("#999999", "#0072b2", "#56b4e9")
"""The colours of the paper's bars, of ours, and of another schedule's; all eyes tell them apart."""
BAR, LEAST, TOP, HEIGHT, LEFT = 26, 100, 58, 220, 46

Group = tuple[str, Sequence[float | None]]
"""A group of bars: its label, and the height of each bar; None where there is no figure."""


def draw(page: Path) -> None:
    """Draw the pictures of a page beside it."""
    text = page.read_text()
    rows = _rows(text, "throughput")
    groups: list[Group] = [
        (f"{network.split()[0]}, K={workers}", [_number(cell) for cell in (paper, ours, better)])
        for network, workers, microbatches, paper, ours, _, better, _ in rows
        if microbatches == "32"
    ]
    names = ("GPipe's paper", "pipeworker, gpipe", "pipeworker, interleaved-1f1b")
    title = "Throughput relative to one accelerator, 32 micro-batches"
    _save(page.with_name("papers-throughput.svg"), title, names, groups)
    rows = _rows(text, "largest")
    groups = [
        (f"{network.partition(',')[0]}, {name}", [_number(paper), _number(ours)])
        for network, name, _, _, ours, _, paper in rows
    ]
    title = "Parameters of the largest network, relative to pipeline-1"
    _save(page.with_name("papers-largest.svg"), title, ("the papers", "pipeworker"), groups)


def _rows(text: str, name: str) -> list[list[str]]:
    """Return the cells of a section's table, without its head."""
    section = re.search(f"<!-- {name} -->(.*)<!-- end of {name} -->", text, re.DOTALL)
    lines = re.findall(r"^\|(.*)\|$", section[1], re.MULTILINE) if section else []
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _save(file: Path, title: str, names: Sequence[str], groups: Sequence[Group]) -> None:
    if groups:
        file.write_text("\n".join(_bars(title, names, groups)) + "\n")


def _bars(title: str, names: Sequence[str], groups: Sequence[Group]) -> list[str]:
    """Return the lines of a picture of bars."""
    wide = max(LEAST, len(names) * BAR + 24)
    width, bottom = LEFT + wide * len(groups) + 10, TOP + HEIGHT
    most = max(value or 0.0 for _, values in groups for value in values)
    view = f"0 0 {width} {bottom + 48}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" role="img"'
        ' font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{bottom + 48}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    at = LEFT
    for name, colour in zip(names, COLOURS, strict=False):
        lines.append(f'<rect x="{at}" y="32" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{at + 17}" y="43">{escape(name)}</text>')
        at += 34 + 7 * len(name)
    for tick in range(0, int(most) + 1, 1 if most < 10 else 2):
        y = bottom - HEIGHT * tick / most
        lines.append(f'<path d="M{LEFT} {y:.1f}H{width - 10}" stroke="#dddddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    for place, (label, values) in enumerate(groups):
        left = LEFT + wide * place + (wide - len(names) * BAR) / 2
        for index, value in enumerate(values):
            if value is None:
                continue
            x, tall = left + index * BAR, HEIGHT * value / most
            shape = f'width="{BAR - 3}" height="{tall:.1f}" fill="{COLOURS[index]}"'
            lines.append(f'<rect x="{x}" y="{bottom - tall:.1f}" {shape}/>')
            where = f'x="{x + BAR / 2 - 1.5:.1f}" y="{bottom - tall - 4:.1f}"'
            number = f"{value:.1f}" if value >= 10 else f"{value:.2f}"
            lines.append(f'<text {where} font-size="9" text-anchor="middle">{number}</text>')
        middle = left + len(names) * BAR / 2
        for row, part in enumerate(label.split(", ")):
            y = bottom + 17 + 15 * row
            lines.append(f'<text x="{middle:.1f}" y="{y}" text-anchor="middle">{part}</text>')
    return [*lines, "</svg>"]
