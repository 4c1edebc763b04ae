"""``pipeworker trace``: what the workers of a run did and when, as a file for Perfetto."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pipeworker.errors import RecordError, UnreadableFile, UsageError
from pipeworker.record.atomic_file import write_bytes
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir
from pipeworker.trace import chrome
from pipeworker.trace.timeline import read_timeline

_STEPS = re.compile(r"(\d{1,12}):(\d{1,12})", re.ASCII)


def write_trace(path: Path, steps: str | None, output: Path) -> str:
    """Write the timeline of a run, or of its steps ``A:B``; describe what was written.

    Raises:
        UsageError: there is no run, it has no such steps, or the output would replace a file.
        RecordError: the file cannot be written.
    """
    chosen = _chosen(steps)
    run_dir = RunDir(path)
    RunRecord.read(run_dir)
    try:
        lives = read_timeline(run_dir)
    except OSError as error:
        raise UnreadableFile(path, error) from None
    recorded = sorted({c.step for life in lives for c in life.commands if c.actions})
    if not recorded:
        raise UsageError(f"{path}: it has no recorded steps; a run records them since it began")
    if chosen is not None and not any(step in chosen for step in recorded):
        raise UsageError(
            f"--steps {steps}: none of them is recorded; steps {_ranges(recorded)} are "
            "(launch --trace records all)"
        )
    if output.exists() and output.suffix != ".json":
        raise UsageError(f"-o {output}: exists already; choose another file, such as trace.json")
    found = chrome.events(lives, chosen)
    text = json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}, separators=(",", ":"))
    try:
        write_bytes(output, text.encode())
    except OSError as error:
        raise RecordError(output, error) from None
    shown = [step for step in recorded if chosen is None or step in chosen]
    workers = len({life.rank for life in lives})
    return (
        f"{output}: steps {_ranges(shown)} of {workers} workers; https://ui.perfetto.dev opens it, "
        "and sends it nowhere"
    )


def _chosen(steps: str | None) -> range | None:
    if steps is None:
        return None
    found = _STEPS.fullmatch(steps)
    if found is None or int(found[1]) > int(found[2]):
        raise UsageError(
            f"--steps {steps}: must be the first and the last step to show, such as 100:102"
        )
    return range(int(found[1]), int(found[2]) + 1)


def _ranges(steps: list[int]) -> str:
    """Return steps in words: ``1-3, 7``; the first ranges if there are many."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in found]
    return ", ".join(words if len(words) <= 6 else [*words[:4], "...", words[-1]])
