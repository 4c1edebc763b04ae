"""``pipeworker compare``: what differs between two runs, and their curves side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeworker.display.text import data_size, number, shell_join, strict, table
from pipeworker.errors import reading
from pipeworker.job.renamed import hyphened
from pipeworker.record.metrics import rows
from pipeworker.record.rundir import RunDir
from pipeworker.runs.info import OPTION_NAMES, Run
from pipeworker.runs.listing import differing, one_line, option_text, time_text

_POINTS = 10
"""The most steps of a curve that are shown."""
_SPEEDS = ("samples_per_second", "tokens_per_second")
"""Results that are shown if a run has them."""
_NAMES = {
    "best_evaluation": "best evaluation",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "seconds": "time",
    "disk_bytes": "disk",
}
"""Results whose text has another name."""

Pair = tuple[Any, Any]
Curve = dict[int, Any]


def compare(first: Path, second: Path, *, as_json: bool) -> str:
    """Describe two runs side by side: what differs, their results, and points of their curves.

    Raises:
        UsageError: one of them is no run, or cannot be read.
    """
    runs = Run.read(first), Run.read(second)
    facts = _facts(runs)
    return json.dumps(strict(facts), indent=2) if as_json else "\n".join(_text(facts))


def _facts(runs: tuple[Run, Run]) -> dict[str, Any]:
    name = runs[0].record.criterion.name
    losses, figures = (
        tuple(_curve(getattr(RunDir(run.path), file), figure) for run in runs)
        for file, figure in (("metrics", "loss"), ("evaluation", name))
    )
    lasts = [run.record.last for run in runs]
    jobs = [last.get("job") for last in lasts]
    return {
        "runs": [str(run.path) for run in runs],
        "options": {
            option: [run.option(option) for run in runs] for option in differing(runs, OPTION_NAMES)
        },
        "arguments": [list(run.option("arguments") or ()) for run in runs],
        "job_file": {
            "same": lasts[0].get("job_sha256") == lasts[1].get("job_sha256"),
            "copies": [
                job and str(run.path / str(job)) for run, job in zip(runs, jobs, strict=True)
            ],
        },
        "versions": _different(*(last.get("versions") or {} for last in lasts)),
        "host": _different(
            *({k: last.get(k) for k in ("host", "platform", "git")} for last in lasts)
        ),
        "results": {
            "status": [run.status for run in runs],
            "steps": [run.steps for run in runs],
            "loss": [run.last.get("loss") for run in runs],
            "best_evaluation": [run.best_value for run in runs],
            "best_figure": [run.record.criterion.name for run in runs],
            "samples_per_second": [run.speeds[0] for run in runs],
            "tokens_per_second": [run.speeds[1] for run in runs],
            "seconds": [run.summary["seconds"] for run in runs],
            "disk_bytes": [run.disk_bytes for run in runs],
        },
        "common_steps": len(losses[0].keys() & losses[1].keys()),
        "first_difference": _first_difference(*losses),
        "curves": {"loss": _points(*losses), f"evaluation {name}": _points(*figures)},
    }


def _curve(path: Path, name: str) -> Curve:
    """Return a figure by step."""
    with reading(path):
        return {row["step"]: row.get(name) for row in rows.read(path)}


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    return {
        name: (a.get(name), b.get(name))
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name)
    }


def _first_difference(a: Curve, b: Curve) -> int | None:
    """Return the first step that both runs have done with losses of different bits."""
    found = (step for step in sorted(a.keys() & b.keys()) if repr(a[step]) != repr(b[step]))
    return next(found, None)


def _points(a: Curve, b: Curve) -> list[dict[str, Any]]:
    """Return both curves at a few steps: the first, the last, and others at equal distances."""
    steps = sorted(a.keys() | b.keys())
    last = len(steps) - 1
    at = sorted({round(last * k / (_POINTS - 1)) for k in range(_POINTS)}) if steps else []
    return [{"step": steps[k], "values": [a.get(steps[k]), b.get(steps[k])]} for k in at]


def _text(facts: Mapping[str, Any]) -> Iterable[str]:
    names = [Path(path).resolve().name for path in facts["runs"]]
    options: dict[str, Iterable[str]] = {
        hyphened(name): ["-" if value is None else option_text(value) for value in pair]
        for name, pair in facts["options"].items()
    }
    if facts["arguments"][0] != facts["arguments"][1]:
        options["arguments"] = map(shell_join, facts["arguments"])
    yield from _block("options that differ", names, options, "the options are the same")
    yield ""
    others = {
        name: map(_plain, pair) for name, pair in {**facts["versions"], **facts["host"]}.items()
    }
    yield from _block("versions that differ", names, others, "versions and hosts are the same")
    yield ""
    same, copies = facts["job_file"]["same"], facts["job_file"]["copies"]
    if None in copies:
        yield "a run has no copy of its job file"
    else:
        shown = f"job files differ: diff {shell_join(copies)}"
        yield "the job files are the same" if same else shown
    yield ""
    formats = {
        "loss": number,
        "best_evaluation": number,
        **dict.fromkeys(_SPEEDS, "{:.1f}".format),
        "seconds": time_text,
        "disk_bytes": data_size,
    }
    results: dict[str, Iterable[str]] = {
        _NAMES.get(name, name): [_formatted(value, formats.get(name)) for value in pair]
        for name, pair in facts["results"].items()
        if name != "best_figure" and (name not in _SPEEDS or any(pair))
    }
    figures, best = facts["results"]["best_figure"], _NAMES["best_evaluation"]
    if len({*figures}) > 1:
        results[best] = map(" ".join, zip(figures, results[best], strict=True))
    yield from _block("results", names, results, "")
    first, points = facts["first_difference"], facts["curves"]["loss"]
    if points:
        yield ""
        if first is not None:
            yield f"the losses are equal before step {first}, and differ there"
        elif not facts["common_steps"]:
            yield "no step was done by both"
        else:
            yield "the losses of all steps that both have done are equal"
    for name, curve in facts["curves"].items():
        if curve:
            yield ""
            values = {
                str(point["step"]): [_formatted(value, number) for value in point["values"]]
                for point in curve
            }
            yield from _block(f"{name} after step", names, values, "")


def _block(
    title: str, names: Sequence[str], fields: Mapping[str, Iterable[str]], empty: str
) -> Iterable[str]:
    if not fields:
        return [empty]
    cells = [[title, *names], *([name, *values] for name, values in fields.items())]
    return table([[one_line(cell) for cell in row] for row in cells])


def _formatted(value: Any, form: Any) -> str:
    if value is None:
        return "-"
    return str(form(value)) if form and isinstance(value, (int, float)) else str(value)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):  # a commit
        return f"{value.get('commit')}{'' if value.get('dirty') is False else ', changed'}"
    return "-" if value is None else str(value)
