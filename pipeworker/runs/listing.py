"""``pipeworker list``: all runs of a folder, what differs between them, and what they cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipeworker.display.text import data_size, duration, number, sanitize, shell_join, table
from pipeworker.errors import UnreadableFile, UsageError
from pipeworker.job.renamed import hyphened
from pipeworker.plan.text import name_of
from pipeworker.runs.info import OPTION_NAMES, Run, time_of

Key = tuple[int, Any]
"""Runs without a value sort first, then numbers, then text."""
_LONG_AGO = datetime.fromtimestamp(0, timezone.utc)
_NUMBER, _TEXT, _NONE = 1, 2, (0, 0)


@dataclass(frozen=True, slots=True)
class _Column:
    value: Callable[[Run], Any]
    text: Callable[[Any], str] = str
    right: bool = False


def time_text(seconds: float) -> str:
    """Return a duration as ``1:02:03``; empty if a damaged file has another value."""
    return duration(seconds) if math.isfinite(seconds) else ""


def _steps(run: Run) -> str:
    whole = run.status == "done" and not run.summary.get("stopped_early")
    counts = whole and not run.option("own_loop")  # its passes over the data, all of them
    asked = run.asked_steps or (run.steps if counts else None)
    return f"{run.steps}/{asked}" if asked else str(run.steps)


def _evaluation(run: Run) -> str:
    assert run.best_value is not None
    return f"{run.record.criterion.name} {number(run.best_value)}"


_COLUMNS = {
    "run": _Column(lambda run: run.path.resolve().name),
    "status": _Column(lambda run: run.status),
    "steps": _Column(lambda run: run.steps, right=True),
    "loss": _Column(lambda run: run.last.get("loss"), number, right=True),
    "evaluation": _Column(lambda run: run.best_value, number, right=True),
    "stages": _Column(lambda run: run.record.options.get("stages"), right=True),
    "arguments": _Column(lambda run: shell_join(run.option("arguments") or ())),
    "time": _Column(lambda run: run.summary["seconds"], time_text, right=True),
    "disk": _Column(lambda run: run.disk_bytes, data_size, right=True),
    "started": _Column(lambda run: time_of(run.record.content)),
}
"""The columns of any list, in their order; the best evaluation and arguments if there are any."""
_OF_RUN = {"steps": _steps, "evaluation": _evaluation}
"""Columns whose text is more than their value, by which they are sorted."""
_OWN = ("stages", "steps")
"""Options that are in a column of every list."""


def list_runs(
    folder: Path, *, as_json: bool = False, sort: str = "started", columns: Sequence[str] = ()
) -> str:
    """Describe the runs in a folder, or that of a run directory, in a table or lines of JSON.

    Hidden directories are left out; directories without a run, or with a damaged one, are named
    after the runs.

    Args:
        folder: of the runs, or a run directory.
        as_json: an object a line for each run, in place of a table.
        sort: the column by which runs are sorted, the largest last; with ``-`` before it, first.
        columns: those of the table; by default those of :data:`_COLUMNS` and the options that
            differ between the runs.

    Raises:
        UsageError: the folder does not exist, or cannot be read, or there is no such column.
    """
    by = _column(sort.removeprefix("-"), "--sort")
    chosen = {name: _column(name, "--columns") for name in columns}
    runs, damaged = read_runs(folder)
    runs.sort(key=lambda run: _key(by.value(run)), reverse=sort.startswith("-"))
    if as_json:
        wrong = ({"run": str(path), "error": error} for path, error in damaged.items())
        return "\n".join(json.dumps(each) for each in (*(run.to_json() for run in runs), *wrong))
    if not runs and not damaged:
        return f"no run is in {folder}"
    chosen = chosen or _default(runs)
    rows = [[*chosen], *([_cell(name, chosen[name], run) for name in chosen] for run in runs)]
    right = [index for index, column in enumerate(chosen.values()) if column.right]
    lines = table(rows, right=right) if runs else []
    return "\n".join([*lines, *(one_line(f"{p.name}: {why}") for p, why in damaged.items())])


def read_runs(folder: Path) -> tuple[list[Run], dict[Path, str]]:
    """Return the runs in a folder, and the errors of directories without a run or a damaged one.

    Raises:
        UsageError: the folder does not exist, or cannot be read.
    """
    try:
        paths = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        if (folder / "run.json").exists():
            paths = [folder]
    except FileNotFoundError:
        raise UsageError(f"{folder}: no such folder; give the folder of the runs") from None
    except NotADirectoryError:
        raise UsageError(f"{folder}: is a file; give the folder of the runs") from None
    except OSError as error:
        raise UnreadableFile(folder, error) from None
    runs: list[Run] = []
    damaged: dict[Path, str] = {}
    for path in paths:
        try:
            runs.append(Run.read(path))
        except UsageError as error:
            damaged[path] = str(error).removeprefix(f"{path}: ")
    return sorted(runs, key=lambda run: time_of(run.record.content) or _LONG_AGO), damaged


def one_line(text: str) -> str:
    """Return a text without line ends, or anything that could change a terminal."""
    return " ".join(sanitize(text).split())


def differing(runs: Iterable[Run], names: Iterable[str]) -> list[str]:
    """Return those of the options that are not the same in all of the runs."""
    found = list(runs)
    return [name for name in names if len({repr(run.option(name)) for run in found}) > 1]


def _default(runs: Sequence[Run]) -> dict[str, _Column]:
    """Return the columns of a table for which none are chosen."""
    options = differing(runs, (name for name in OPTION_NAMES if name not in _OWN))
    found: dict[str, _Column] = {}
    for name, column in _COLUMNS.items():
        if name == "arguments":
            found |= {hyphened(option): _option(option) for option in options}
        optional = name in ("arguments", "evaluation")
        if not optional or any(column.value(run) not in (None, "") for run in runs):
            found[name] = column
    if not differing(runs, ["arguments"]):
        found.pop("arguments", None)
    return found


def _column(name: str, where: str) -> _Column:
    if name in _COLUMNS:
        return _COLUMNS[name]
    option = name.replace("-", "_")
    if option in OPTION_NAMES:
        return _option(option)
    if name.startswith("evaluation."):
        figure = name.partition(".")[2]
        return _Column(lambda run: (run.best or {}).get(figure), number, right=True)
    known = [*_COLUMNS, *map(hyphened, OPTION_NAMES)]
    meant = get_close_matches(name, known, 1)
    names = f"{', '.join(_COLUMNS)}, evaluation.NAME or an option"
    advice = f"did you mean {meant[0]}?" if meant else f"use {names}"
    raise UsageError(f"{where} {name}: no such column; {advice}")


def _option(name: str) -> _Column:
    return _Column(lambda run: run.option(name), option_text)


def option_text(value: Any) -> str:
    """Return an option's value as a table shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return name_of(value) if isinstance(value, str) else str(value)


def _cell(name: str, column: _Column, run: Run) -> str:
    value = column.value(run)
    if value is None or (column.text is number and not isinstance(value, (int, float))):
        return ""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M")
    return one_line(_OF_RUN[name](run) if name in _OF_RUN else column.text(value))


def _key(value: Any) -> Key:
    if isinstance(value, datetime):
        return _NUMBER, value.timestamp()
    if isinstance(value, (int, float)):
        return (_NUMBER, value) if value == value else _NONE  # NaN has no order
    return _NONE if value is None else (_TEXT, option_text(value))
