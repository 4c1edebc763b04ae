"""Makes the tables of the papers: ``make papers``, or ``python -m papers [NAME …]`` from here.

Each table replaces the one of its name in ``papers.md``.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from papers import ablation, largest, memory, overhead, peers, pictures, speed, throughput

PAGE = Path(__file__).parents[1] / "papers.md"


class Table(NamedTuple):
    """A table of the page: its title, what it shows, and its lines."""

    title: str
    text: str
    lines: Callable[[], Iterator[str]]


TABLES = {
    "throughput": Table("GPipe, table 2: normalised throughput", throughput.TEXT, throughput.lines),
    "speed": Table("torchgpipe: speed of U-Net and ResNet-101", speed.TEXT, speed.lines),
    "memory": Table("torchgpipe: memory of U-Net", memory.TEXT, memory.lines),
    "overhead": Table("GPipe, section 3.1: where the time goes", overhead.TEXT, overhead.lines),
    "ablation": Table("torchgpipe: ablation", ablation.TEXT, ablation.lines),
    "peers": Table("Other pipelines", peers.TEXT, peers.lines),
    "largest": Table("GPipe, table 1: the largest network", largest.TEXT, largest.lines),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m papers")
    parser.add_argument("names", nargs="*", metavar="NAME", help=" ".join(TABLES))
    names = parser.parse_args().names or list(TABLES)
    if unknown := set(names) - TABLES.keys():
        parser.error(f"no table {unknown.pop()}; there are {', '.join(TABLES)}")
    for name in names:
        table, lines = TABLES[name], []
        for line in table.lines():
            print(line, flush=True)
            lines.append(line)
        where = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
        versions = (
            f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"
        )
        made = f"`python -m papers {name}`, {date.today()}, {where}, {versions}."
        _replace(name, "\n".join([f"## {table.title}", "", table.text, made, "", *lines, ""]))
    pictures.draw(PAGE)


def _replace(name: str, text: str) -> None:
    """Put a section into the page, where it was or at its end."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    page = PAGE.read_text()
    section = f"{begin}{text}{end}"
    old = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    new, count = old.subn(lambda _: section, page)
    PAGE.write_text(new if count else f"{page}\n{section}")


if __name__ == "__main__":
    main()
