"""Output without the reports of nanobind, which triton of torch's CUDA builds is bound with.

At exit it reports objects that still exist, as they do in a process that the tests' server forked.
The last line of a report has no end, so that another process's line follows in it.
"""

from __future__ import annotations

import re

_REPORT = re.compile(
    r"nanobind: (?:leaked \d+ \w+!|this is likely [^\n]*)\n?"
    r"| - (?:leaked (?:instance|type|function|keep_alive)\b|\.\.\. skipped)[^\n]*\n"
    r"|See https://nanobind\.readthedocs\.io/\S*?refleaks\.html\n?"
)


def without_reports(output: str) -> str:
    """Return output without the lines of nanobind's reports."""
    return _REPORT.sub("", output)
