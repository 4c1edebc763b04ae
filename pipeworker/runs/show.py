"""``pipeworker show`` and ``pipeworker list``: one run or all, for a person or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeworker.display.commands import DEFAULT_PROGRAM, Commands, further
from pipeworker.display.figures import after
from pipeworker.display.text import figure_text, megabytes, sanitize, shell_join, table
from pipeworker.errors import PipeworkerError
from pipeworker.job.option_parsing import format_by_origin, format_option
from pipeworker.job.options import Options
from pipeworker.job.renamed import migrated
from pipeworker.record.checkpoint.manifest import Manifest
from pipeworker.record.metrics.rows import Row
from pipeworker.record.run_record import hosts_words
from pipeworker.runs.info import DONE, RUNNING, Run, time_of

_NAME_COLUMNS = 12


def show(path: Path, *, as_json: bool = False) -> str:
    """Describe the run in a directory, as text or as one JSON object.

    Raises:
        UsageError: there is no run, or it cannot be read.
    """
    run = Run.read(path)
    weights = str([*run.checkpoints][-1]) if run.checkpoints else None
    export = _commands(run).export(str(run.path)) if weights else None
    resume = _resume(run)
    best = str(run.best_weights) if run.best_weights else None
    if as_json:
        ways = {"weights": weights, "best_weights": best, "export": export, "resume": resume}
        return json.dumps({**run.to_json(), **ways}, indent=2)
    to_export_best = _commands(run).export_best(str(run.path)) if best else None
    save = _commands(run).save(str(run.path)) if run.status == RUNNING else None
    none = f"none: no checkpoint is complete{' yet' * (run.status == RUNNING)}"
    continuation = (
        ("weights", weights or none),
        ("to export", export),
        *((("best weights", best), ("to export it", to_export_best)) if best != weights else ()),
        ("to save now", save),
        ("to resume", resume),
    )
    blocks = (_settings(run), _results(run), continuation)
    return "\n\n".join("\n".join(_aligned(block)) for block in blocks)


Fields = Iterable[tuple[str, object]]
"""Names and values; an empty value has no line."""


def _aligned(fields: Fields) -> list[str]:
    return table(
        (name.ljust(_NAME_COLUMNS), sanitize(str(value)))
        for name, value in fields
        if value not in (None, "", ())
    )


def _settings(run: Run) -> Fields:
    first, options, copy = run.record.content, run.record.options, run.record.last.get("job")
    yield "run", run.path
    yield "job file", options.get("job_file")
    yield "copy of it", run.path / str(copy) if copy else None
    yield "command", _command(first.get("command", []))
    yield "arguments", shell_join(options.get("arguments") or ())
    yield "options", " ".join(format_option(*item) for item in run.changed_options().items())
    origins = format_by_origin(migrated(first.get("origins", {})), migrated(first["options"]))
    yield "not typed", "\n".join(origins)
    yield "versions", _versions(first)
    yield "platform", first.get("platform")
    yield "git", _git(first)
    yield "started", f"{_time(first)} on {first.get('host')}"
    for start in first["resumed"]:
        changed = " ".join(format_option(*item) for item in start["options"].items())
        when = f"{_time(start)} on {start.get('host')}, after step {start.get('step')}"
        yield "resumed", f"{when}, {changed}" if changed else when


def _results(run: Run) -> Fields:
    summary = run.summary
    asked = f" of {run.asked_steps}" if run.asked_steps else ""
    yield "status", run.status
    yield "steps", f"{run.steps}{asked}"
    yield "early end", summary.get("stopped_early")
    if run.last:
        yield "loss", figure_text(run.last.get("loss"))
        units = zip(run.speeds, ("samples/s", "tokens/s"), strict=True)
        yield "speed", ", ".join(f"{speed:.1f} {unit}" for speed, unit in units if speed)
    if run.evaluation:
        is_best = run.best == run.evaluation
        yield "evaluation", f"{_evaluation(run.evaluation)}, the last{' and best' * is_best}"
        if run.best and not is_best:
            yield "", f"{_evaluation(run.best)}, the best"
    since = " since it was resumed" if run.record.content["resumed"] else ""
    seconds, bubble = summary["seconds"], summary["bubble"]
    memory = summary["peak_memory_bytes"]
    yield "time", f"{seconds:.1f} s{since}" if seconds is not None else None
    yield "bubble", f"{bubble:.1%} measured" if bubble is not None else None
    yield "memory", f"{megabytes(memory)} by worker" if any(memory) else None
    restarts = summary["restarts"], *summary["causes"]
    yield "restarts", "\n".join(map(str, restarts)) if restarts[0] else None
    saved = run.checkpoints.items()
    yield (
        "checkpoints",
        "\n".join(_checkpoint(path, manifest, run.best) for path, manifest in saved),
    )
    yield "error", summary["error"]


def _resume(run: Run) -> str | None:
    """Return how to resume the run, with more steps if it is done; None while it is running."""
    if run.status == RUNNING:
        return None
    options, early = run.record.options, run.summary.get("stopped_early")
    epochs, patience = options.get("epochs"), options.get("patience") if early else None
    more = run.status == DONE and (run.steps or epochs or patience)
    command = further(run.steps, epochs, patience) if more else None
    return _commands(run).resume(str(run.path), command)


def _commands(run: Run) -> Commands:
    options = run.record.options
    job_file, own_loop = str(options.get("job_file")), bool(options.get("own_loop"))
    if run.record.is_of_script:
        return Commands(script=job_file, own_loop=own_loop)
    if run.record.last.get("torchrun"):
        start = ("torchrun", "--nproc-per-node", _workers(options), "-m", "pipeworker")
        return Commands(start=start, job_file=job_file)
    return Commands(
        start=(*DEFAULT_PROGRAM, "launch", *hosts_words(run.record.command)), job_file=job_file
    )


def _workers(options: Mapping[str, Any]) -> str:
    """Return the number of processes of a job; a letter if its recorded options are damaged."""
    try:
        return str(Options.of(options).workers)
    except PipeworkerError:
        return "N"


def _checkpoint(path: Path, manifest: Manifest, best: Row | None) -> str:
    if manifest.evaluation is None:
        return path.name
    is_best = best is not None and manifest.step == best["step"]
    loss = figure_text(manifest.evaluation.get("loss"))
    return f"{path.name}  loss {loss} in evaluation{', the best' * is_best}"


def _evaluation(row: Row) -> str:
    names = [name for name in row if name != "step"]
    figures = "  ".join(f"{name} {figure_text(row[name])}" for name in names)
    return f"{figures}  {after(row['step'])}"


def _command(words: list[str]) -> str:
    """Return a command as it was typed, with a short name for pipeworker's own program."""
    ours = bool(words) and Path(words[0]).name in ("__main__.py", "pipeworker")
    return shell_join(["pipeworker", *words[1:]] if ours else words)


def _versions(process: dict[str, Any]) -> str:
    versions = process.get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _git(process: dict[str, Any]) -> str:
    found = process.get("git")
    if not found:
        return ""
    dirty = found.get("dirty")
    how = ", perhaps with uncommitted changes" if dirty is None else ", with uncommitted changes"
    return f"{found['commit']}{'' if dirty is False else how}"


def _time(process: dict[str, Any]) -> str:
    found = time_of(process)
    return found.strftime("%Y-%m-%d %H:%M:%S") if found else "at an unknown time"
