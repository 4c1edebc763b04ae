"""What pages have in common: each is one file of HTML, light and dark, which loads nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape

_STYLE = """\
:root { color-scheme: light dark; --ink: #24292f; --paper: #ffffff; --line: #d0d7de;
  --soft: #57606a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #d5dbe3; --paper: #14181d; --line: #38414c; --soft: #9aa4b0; }
}
@media print {
  :root { color-scheme: light; --ink: #000000; --paper: #ffffff; --line: #999999; --soft: #444444; }
}
body { font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', sans-serif; color: var(--ink);
  background: var(--paper); max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
figure { margin: 0; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.5rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th.name, td.name { text-align: left; }
tr.chosen td { font-weight: 600; }
meter { width: 6rem; }
"""
_ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser itself refuses to load anything."""
_NAMED = ' class="name"'


def document(
    title: str, body: Iterable[str], *, style: str = "", script: str = ""
) -> Iterator[str]:
    """Yield the lines of a page; the body is HTML, the title text."""
    yield "<!DOCTYPE html>"
    yield '<html lang="en">'
    yield f'<head><meta charset="utf-8"/><title>{escape(title)}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_ALONE}"/>'
    yield f"<style>\n{_STYLE}{style}</style></head>"
    yield "<body>"
    yield f"<h1>{escape(title)}</h1>"
    yield from body
    if script:
        yield f"<script>\n{script}</script>"
    yield "</body></html>"


def table(
    head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], words: Collection[str]
) -> Iterator[str]:
    """Yield a table; each row has its class and its cells, which are HTML.

    The columns whose heads are among `words` are aligned to the left.
    """
    yield '<div style="overflow-x: auto"><table><thead><tr>'
    yield "".join(f"<th{_NAMED if name in words else ''}>{name}</th>" for name in head)
    yield "</tr></thead><tbody>"
    for kind, cells in rows:
        named = (_NAMED if name in words else "" for name in head)
        texts = (f"<td{one}>{cell}</td>" for one, cell in zip(named, cells, strict=True))
        yield f'<tr class="{kind}">{"".join(texts)}</tr>'
    yield "</tbody></table></div>"
