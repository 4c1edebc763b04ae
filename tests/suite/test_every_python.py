"""The versions of Python that are supported, and how `make test-all` finds interpreters."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from every_python import LOWEST, find_interpreters

ROOT = Path(__file__).parents[2]


def test_the_checks_hold_the_lowest_python() -> None:
    """mypy rejects what the standard library lacks in it, ruff the syntax."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lowest = ".".join(map(str, LOWEST))
    assert setup["options"]["python_requires"] == f">={lowest}"
    assert setup["mypy"]["python_version"] == lowest
    target = re.search(r'target-version = "py(.*)"', (ROOT / "pyproject.toml").read_text())
    assert target is not None
    assert target[1] == lowest.replace(".", "")


def interpreter(folder: Path, name: str, output: str, status: int = 0) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {output}\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_supported_interpreters_are_found_once_in_order(tmp_path: Path) -> None:
    newest = interpreter(tmp_path, "a", "CPython 3.13.0")
    interpreter(tmp_path, "old", "CPython 3.9.18")
    interpreter(tmp_path, "other", "PyPy 3.11.1")
    interpreter(tmp_path, "broken", "CPython 3.12.1", status=127)
    debian = interpreter(tmp_path, "debian", "CPython 3.11.2+")
    first = interpreter(tmp_path, "first", "CPython 3.11.7")
    interpreter(tmp_path, "second", "CPython 3.11.7")
    files = [*sorted(tmp_path.iterdir()), tmp_path / "none"]
    found = {"3.11.2+": debian, "3.11.7": first, "3.13.0": newest}
    assert find_interpreters(files, []) == found
    assert [*find_interpreters(files, [])] == [*found]
    assert find_interpreters(files, ["3.11.7", "3.13"]) == {"3.11.7": first, "3.13.0": newest}
    assert find_interpreters(files, ["3.1"]) == {}
