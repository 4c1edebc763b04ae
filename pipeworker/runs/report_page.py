"""``pipeworker report --html``: reads all that the page of a run shows."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeworker.display.report.curves import MOST_STEPS, Curve
from pipeworker.display.report.page import page
from pipeworker.display.report.view import Box, MemoryView, ReportView, StepView
from pipeworker.display.text import figure_text, number, sanitize
from pipeworker.errors import UsageError, reading, writing
from pipeworker.plan.actions import BUSY
from pipeworker.plan.figures import flops_text, rate_text, seconds_text
from pipeworker.plan.planned import Planned
from pipeworker.plan.simulate import timeline
from pipeworker.record.files.atomic_file import write_bytes
from pipeworker.record.files.bounded_file import open_bounded
from pipeworker.record.metrics import rows
from pipeworker.record.metrics.rows import Row
from pipeworker.record.rundir import RunDir
from pipeworker.runs import report
from pipeworker.runs.info import Run, time_of
from pipeworker.runs.listing import time_text
from pipeworker.runs.report import NOTHING, Report
from pipeworker.trace.mini_batches import MiniBatch
from pipeworker.trace.recorder import UPDATE

_CURVES = {
    "loss": "loss",
    "samples_per_second": "samples/s",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "bubble": "bubble",
}
"""Figures of a step's row, and what their curves are called."""
_MOST_BOXES = 200_000
_WARNING = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ WARNING (?!dropped )(.*)")
_MOST_LOG = 4 << 20


def write_page(path: Path, output: Path) -> str:
    """Write the page of a run; describe what was written.

    Raises:
        UsageError: there is no run, a file of it cannot be read, or the page cannot be written.
    """
    if output.exists() and output.suffix not in (".html", ".htm"):
        raise UsageError(f"--html {output}: exists already; choose another file, as report.html")
    made = report.read(path)
    view = _view(Run.read(path), made)
    with writing(output):
        write_bytes(output, page(view).encode(errors="replace"))
    return f"{output}: the report of {path}, for a browser; it loads nothing else"


def _view(run: Run, made: Report | None) -> ReportView:
    run_dir = RunDir(run.path)
    with reading(run.path):
        steps = _columns(rows.read(run_dir.metrics))
        evaluations = list(rows.read(run_dir.evaluation))
    title, drawn = sanitize(run.path.resolve().name), list(_curves(steps, evaluations))
    figures, happened = list(_figures(run, made)), list(_happened(run, run_dir, made))
    if made is None:
        nothing = sanitize(f"{run.path}: {NOTHING}")
        return ReportView(title, nothing, figures, drawn, [], [], None, [], None, None, happened)
    lives = made.recorded[-1].lives
    labels = [life.name for life in lives]
    chosen = list(_chosen(made.recorded))
    return ReportView(
        title,
        made.advice.text,
        figures,
        drawn,
        labels,
        [_step(title, one) for title, one in chosen],
        _planned(made.plan, len(lives)) if made.plan else None,
        list(_memory(chosen[0][1], labels, made.plan)),
        made.found,
        made.planned,
        happened,
    )


def _figures(run: Run, made: Report | None) -> Iterator[tuple[str, str]]:
    asked = f" of {run.asked_steps:,}" if run.asked_steps else ""
    yield "status", run.status
    yield "steps", f"{run.steps:,}{asked}"
    if run.last:
        yield "loss", figure_text(run.last.get("loss"))
    if run.best_value is not None:
        yield f"best {run.record.criterion.name}", number(run.best_value)
    if made is not None:
        yield from _speeds(made)
    seconds = run.summary["seconds"]
    if seconds is not None:
        yield "time", time_text(seconds)
    if (restarts := run.summary["restarts"]) is not None:
        yield "losses of workers", str(restarts)


def _speeds(made: Report) -> Iterator[tuple[str, str]]:
    found, rates = made.found, made.rates
    yield "a step", seconds_text(found.seconds / len(found.steps))
    for speed, unit in ((rates.samples, "samples/s"), (rates.tokens, "tokens/s")):
        if speed:
            yield unit, rate_text(speed)
    if rates.flops:
        share = f", {rates.peak:.0%} of the peak" if rates.peak else ""
        yield "model", f"{flops_text(rates.flops)}{share}"
    if found.seconds > 0:
        computing = sum(time.computing for time in found.workers)
        yield "idle", f"{1 - computing / found.seconds / len(found.workers):.1%}"


def _columns(found: Iterable[Row]) -> dict[str, array[float]]:
    """Return the figures of all steps by name: a long run has more rows than fit as objects."""
    columns = {name: array("d") for name in ("step", *_CURVES)}
    for row in found:
        for name, column in columns.items():
            column.append(_number(row.get(name)))
    return columns


def _curves(columns: Mapping[str, array[float]], evaluations: Sequence[Row]) -> Iterator[Curve]:
    at = columns["step"]
    losses = _by_step(evaluations, "loss")
    for name, text in _CURVES.items():
        values = columns[name]
        others = losses if name == "loss" else {}
        curve = Curve.of(text, at, values, others, "evaluation" if others else "")
        if curve is not None:
            yield curve
    for name in dict.fromkeys(name for row in evaluations for name in row):
        if name not in ("step", "loss"):
            found = _by_step(evaluations, name)
            curve = Curve.of(name, [*found], [*found.values()])
            if curve is not None:
                yield curve


def _by_step(found: Sequence[Row], name: str) -> dict[int, float]:
    return {
        int(row["step"]): _number(row.get(name)) for row in found if abs(row["step"]) < MOST_STEPS
    }


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else math.nan


def _chosen(recorded: Sequence[MiniBatch]) -> Iterator[tuple[str, MiniBatch]]:
    """Yield the step of median duration, the slowest and the last one, with titles."""
    by_time = sorted(recorded, key=lambda one: one.end - one.begin)
    seen: list[MiniBatch] = []
    boxes = 0
    for what, one in (
        ("a usual one", by_time[len(by_time) // 2]),
        ("the slowest that is recorded", by_time[-1]),
        ("the last that is recorded", recorded[-1]),
    ):
        boxes += sum(len(command.actions) for command in one.commands)
        if not any(one is other for other in seen) and (not seen or boxes <= _MOST_BOXES):
            seen.append(one)
            yield f"step {one.step}, {what}", one


def _step(title: str, one: MiniBatch) -> StepView:
    zero = one.begin
    found = []
    for command in one.commands:
        boxes = [
            Box(a.kind, a.stage, command.first + a.microbatch, begin - zero, (end or begin) - zero)
            for a, begin, end in command.actions
            if a.kind in BUSY
        ]
        boxes += [Box(name, -1, -1, begin - zero, end - zero) for name, begin, end in command.spans]
        found.append(sorted(boxes, key=lambda box: box.begin))
    return StepView(title, one.end - zero, found)


def _planned(planned: Planned, workers: int) -> StepView:
    """Return the step of a plan, which is that of each replica."""
    end = planned.timing.makespan
    of_replica = [
        [Box(a.kind, a.stage, a.microbatch, begin, stop) for a, begin, stop in spans]
        + [Box(UPDATE, -1, -1, end, end + planned.update)]
        for spans in timeline(planned.schedule, planned.costs)
    ]
    copies = workers // len(of_replica) or 1
    return StepView("as planned", planned.step_seconds, of_replica * copies)


def _memory(one: MiniBatch, labels: Sequence[str], plan: Planned | None) -> Iterator[MemoryView]:
    for place, command in enumerate(one.commands):
        if not command.memory:
            continue
        times = [(end or begin) - one.begin for _, begin, end in command.actions]
        predicted = limit = None
        if plan:
            worker = place % len(plan.memory)
            predicted, limit = plan.memory[worker], plan.limits[worker]
        yield MemoryView(labels[place], times, command.memory, predicted, limit)


def _happened(run: Run, run_dir: RunDir, made: Report | None) -> Iterator[tuple[str, str]]:
    found: list[tuple[float, str]] = []

    def note(when: datetime | None, text: str) -> None:
        found.append((when.timestamp() if when else 0.0, sanitize(text)))

    content: Mapping[str, Any] = run.record.content
    note(time_of(run.record.content), f"began on {content.get('host')}")
    for start in content["resumed"]:
        note(time_of(start), f"was resumed after step {start.get('step')} on {start.get('host')}")
    for path, manifest in run.checkpoints.items():
        figures = ""
        if manifest.evaluation is not None:
            figures = f", loss {figure_text(manifest.evaluation.get('loss'))} in evaluation"
        with suppress(FileNotFoundError):  # the run may be running, and keep only some of them
            when = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
            note(when, f"checkpoint {path.name}{figures}")
    starts: dict[int, float] = {}
    for one in made.recorded if made else ():
        for life in one.lives:
            starts.setdefault(life.generation, life.time)
    warnings = list(_warnings(run_dir))
    for generation, cause in enumerate(run.summary["causes"], 2):
        # The job has warned of it when it continued, unless it never did.
        if not any(cause in text for _, text in warnings):
            found.append((starts.get(generation, 0.0), sanitize(f"lost: {cause}")))
    found += [(at, sanitize(f"warning: {text}")) for at, text in warnings]
    for seconds, text in sorted(found):
        yield _moment(seconds) if seconds else "", text
    error = run.summary["error"]
    yield "", sanitize(f"{run.status}{f': {error}' if error else ''}, after {run.steps:,} steps")


def _moment(seconds: float) -> str:
    """Return a time for people; "" if no calendar has it, as of a damaged file."""
    with suppress(ValueError, OverflowError):
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return ""


def _warnings(run_dir: RunDir) -> Iterator[tuple[float, str]]:
    """Yield the warnings of the job that its coordinator has logged, with their times."""
    text, log = "", run_dir.coordinator_log
    with reading(log), suppress(FileNotFoundError), open_bounded(log, None) as file:
        text = file.read(_MOST_LOG).decode(errors="replace")
    for line in text.splitlines():
        if found := _WARNING.fullmatch(line):
            with suppress(ValueError, OverflowError):  # no time that a log has
                when = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").astimezone()
                yield when.timestamp(), found[2]
