"""Run the tests on every interpreter of this host, with each torch: ``make test-all``.

An interpreter is looked for on ``PATH``, in ``/usr/bin`` and among the versions of pyenv. Each pair
of an interpreter and a torch has an environment of its own in ``.venvs``. An interpreter for which
a torch was not published gets the newest one before it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

LOWEST = (3, 10)
_TORCH = "import importlib.metadata; print(importlib.metadata.version('torch'))"
_VERSION = "import platform; print(platform.python_implementation(), platform.python_version())"


def candidates() -> Iterator[Path]:
    """Yield the files that may be interpreters."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob("versions/*/bin/python3"))
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin"]:
        yield from sorted([Path(folder, "python3"), *Path(folder).glob("python3.[0-9][0-9]")])


def find_interpreters(files: Iterable[Path], wanted: Iterable[str]) -> dict[str, Path]:
    """Return the first CPython of each version that pipeworker supports, lowest first.

    Args:
        files: what may be interpreters.
        wanted: versions, such as 3.11 or 3.11.2; all if it is empty.
    """
    found: dict[str, Path] = {}
    for file in files:
        try:
            ran = subprocess.run([file, "-c", _VERSION], capture_output=True, text=True)
        except OSError:
            continue
        name, _, version = ran.stdout.strip().partition(" ")
        if ran.returncode == 0 and name == "CPython" and _numbers(version) >= LOWEST:
            found.setdefault(version, file)
    chosen = [f"{one}." for one in wanted] or [""]
    return {
        version: found[version]
        for version in sorted(found, key=_numbers)
        if f"{version}.".startswith(tuple(chosen))
    }


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def test(version: str, python: Path, torch: str) -> tuple[bool, list[str]]:
    """Run the tests in an environment; return whether they passed, and a row of the table."""
    folder, began = Path(".venvs", f"{version}-torch-{torch}"), time.monotonic()
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={results}"
    ran = subprocess.run(
        [
            *("make", "test", f"VENV={folder}", f"PYTHON={python}", f"TORCH=torch<={torch}"),
            "EXTRAS=test,examples,loggers,notebooks,ray,torchdata,transformers",
        ],
        env={**os.environ, "PYTEST_ADDOPTS": options},
    )
    passed = failed = "-"
    if results.exists():
        suite = next(ElementTree.parse(results).iter("testsuite"))
        count, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        passed, failed = str(count - skipped - bad), str(bad)
    seconds = f"{time.monotonic() - began:.0f}"
    found = subprocess.run([folder / "bin/python", "-c", _TORCH], capture_output=True, text=True)
    row = [version, found.stdout.strip().partition("+")[0] or torch, passed, failed, seconds]
    return ran.returncode == 0, row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", default="", help="versions, such as '3.10 3.11.2'")
    parser.add_argument("--torches", required=True, help="versions, such as '2.13.0 2.15.0'")
    given = parser.parse_args()
    interpreters = find_interpreters(candidates(), given.pythons.split())
    for one in given.pythons.split():
        if not any(f"{version}.".startswith(f"{one}.") for version in interpreters):
            sys.exit(f"PYTHONS: no Python {one} was found; install it, or leave it out")
    print(*(f"Python {version}: {file}" for version, file in interpreters.items()), sep="\n")
    ran = [
        test(version, python, torch)
        for version, python in interpreters.items()
        for torch in given.torches.split()
    ]
    table = [["Python", "torch", "passed", "failed", "seconds"], *(row for _, row in ran)]
    for row in table:
        print("".join(f"{cell:>9}" for cell in row))
    return 0 if ran and all(passed for passed, _ in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
