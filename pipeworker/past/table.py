"""``pipeworker list``: the runs in a folder, a line each."""

from __future__ import annotations

import json
from pathlib import Path

from pipeworker.errors import UsageError
from pipeworker.past.facts import Run, printable, time_of

_HEAD = ("run", "status", "steps", "loss", "stages", "started")
_RIGHT = ("steps", "loss", "stages")


def listed(folder: Path, *, as_json: bool = False) -> str:
    """The runs in a folder, or the one that it is itself, the newest last; none that is hidden.

    Directories that hold none, or a damaged one, are named behind them.

    Raises:
        UsageError: the folder is not there, or cannot be read.
    """
    runs, damaged = _look(folder)
    if as_json:
        wrong = ({"run": str(path), "error": why} for path, why in damaged.items())
        return "\n".join(json.dumps(each) for each in (*(run.to_json() for run in runs), *wrong))
    if not runs and not damaged:
        return f"no run is in {folder}"
    lines = _aligned([_HEAD, *map(_line, runs)]) if runs else []
    lines += [f"{path.name}: {why}" for path, why in damaged.items()]
    return printable("\n".join(lines))


def _look(folder: Path) -> tuple[list[Run], dict[Path, str]]:
    try:
        paths = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        if (folder / "run.json").exists():
            paths = [folder]
    except FileNotFoundError:
        text = f"there is no folder {folder}: give the one that the runs are in"
        raise UsageError(text) from None
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from None
    runs: list[Run] = []
    damaged: dict[Path, str] = {}
    for path in paths:
        try:
            runs.append(Run.read(path))
        except UsageError as error:
            damaged[path] = str(error)
    return sorted(runs, key=_started), damaged


def _started(run: Run) -> float:
    found = time_of(run.first)
    return found.timestamp() if found else 0.0


def _line(run: Run) -> tuple[str, ...]:
    found, loss = time_of(run.first), run.last.get("loss")
    return (
        run.path.resolve().name,
        run.status,
        f"{run.steps}/{run.asked_steps}" if run.asked_steps else str(run.steps),
        f"{loss:.4f}" if isinstance(loss, float) else "",
        str(run.options.get("stages", "")),
        found.strftime("%Y-%m-%d %H:%M") if found else "",
    )


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """In columns; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for cell, width, name in zip(row, widths, _HEAD, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
