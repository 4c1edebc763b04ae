"""``pipeworker show``: a run, for a person or as JSON."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeworker.job.given import as_typed, by_origin
from pipeworker.past.facts import DONE, RUNNING, Run, Saved, printable, time_of
from pipeworker.record.metrics.rows import Row

_WIDTH = 14
_ELSEWHERE = ("--hosts", "--hosts-file", "--sync")
"""Options of ``launch`` that say where, which no run is recorded with."""


def show(path: Path, *, as_json: bool = False) -> str:
    """What there is to know of the run in a directory.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    run = Run.read(path)
    if as_json:
        commands = {"export": _export(run), "go_on": _go_on(run)}
        weights = str(run.saved[-1].path) if run.saved else None
        return json.dumps({**run.to_json(), "weights": weights, **commands}, indent=2)
    blocks = (_was(run), _did(run), _next(run))
    return "\n\n".join("\n".join(_lines(block)) for block in blocks)


Told = Iterator[tuple[str, object]]
"""What a line is about, and what it says; nothing to say is no line."""


def _lines(told: Told) -> Iterator[str]:
    for name, value in told:
        text = printable(str(value)) if value not in (None, "", ()) else ""
        for number, line in enumerate(text.splitlines()):
            yield f"{'' if number else name:{_WIDTH}}{line}".rstrip()


def _was(run: Run) -> Told:
    first = run.first
    yield "run", run.path
    yield "job file", run.options.get("job_file")
    yield "copy of it", run.path / str(run.now["job"]) if run.now.get("job") else None
    yield "command", _command(first.get("command"))
    yield "arguments", _words(run.options.get("arguments"))
    yield "options", " ".join(as_typed(*item) for item in run.told_options().items())
    yield "not typed", "\n".join(_origins(first))
    yield "versions", _versions(first)
    yield "platform", first.get("platform")
    yield "git", _git(first)
    yield "started", f"{_when(first)} on {first.get('host')}"
    for again in run.resumed:
        changed = " ".join(as_typed(*item) for item in again["options"].items())
        text = f"{_when(again)} on {again.get('host')}, after step {again.get('step')}"
        yield "went on", f"{text}, {changed}" if changed else text


def _did(run: Run) -> Told:
    asked = f" of {run.asked_steps}" if run.asked_steps else ""
    yield "status", run.status
    yield "steps", f"{run.steps}{asked}"
    if run.last:
        speed = run.last.get("samples_per_second")
        yield "loss", _number(run.last.get("loss"))
        yield "speed", f"{speed:.1f} samples/s" if isinstance(speed, float) else None
    if run.evaluation:
        is_best = run.best == run.evaluation
        yield "evaluation", f"{_evaluation(run.evaluation)}, the last{' and best' * is_best}"
        if run.best and not is_best:
            yield "", f"{_evaluation(run.best)}, the best"
    since = " since it went on" if run.resumed else ""
    yield "time", f"{run.seconds:.1f} s{since}" if run.seconds is not None else None
    yield "bubble", f"{run.bubble:.1%} measured" if run.bubble is not None else None
    if any(run.memory):
        yield "memory", ", ".join(f"{peak / 2**20:.0f}" for peak in run.memory) + " MiB by worker"
    yield "restarts", "\n".join((str(run.restarts), *run.causes)) if run.restarts else None
    yield "checkpoints", "\n".join(_checkpoint(saved, run.best) for saved in run.saved)
    yield "error", run.error


def _next(run: Run) -> Told:
    yield "weights", run.saved[-1].path if run.saved else "none yet: there is no checkpoint"
    yield "to export", _export(run)
    if run.status == RUNNING:
        yield "to save now", shlex.join(["pipeworker", "checkpoint", str(run.path)])
    yield "to go on", _go_on(run)


def _export(run: Run) -> str | None:
    """The command; None while there is nothing to export."""
    words = ["pipeworker", "export", str(run.path), "weights.safetensors"]
    return shlex.join(words) if run.saved else None


def _go_on(run: Run) -> str | None:
    """The command with which the run goes on, further if it is done; None while it runs."""
    job_file, command = str(run.options.get("job_file")), run.now.get("command")
    command = command if isinstance(command, list) and command else [""]
    if run.status == RUNNING:
        return None
    if run.options.get("own_loop"):
        return f"in {job_file}: Pipeline(...).load({str(run.path)!r})"
    if os.path.realpath(str(command[0])) == os.path.realpath(job_file):
        return f"in {job_file}: pipeworker.train(..., run_dir={str(run.path)!r}, resume=True)"
    words = ["--resume", "--run-dir", str(run.path)]
    if run.status == DONE and run.options.get("epochs"):
        words += ["--epochs", str(2 * run.options["epochs"])]
    elif run.status == DONE and run.steps:
        words += ["--steps", str(2 * run.steps)]
    if run.first.get("torchrun"):
        start = ["torchrun", "--nproc-per-node", str(run.workers), "-m", "pipeworker"]
    else:
        start = ["pipeworker", "launch", *_elsewhere(list(map(str, command)))]
    return shlex.join([*start, *words, job_file])


def _elsewhere(command: list[str]) -> list[str]:
    """The words of a command that say on which hosts."""
    found: list[str] = []
    words = command[1 : command.index("--") if "--" in command else None]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.partition("=")[0] in _ELSEWHERE:
            found.append(word)
            if word in _ELSEWHERE[:2]:
                found.append(following)
    return found


def _checkpoint(saved: Saved, best: Row | None) -> str:
    if saved.evaluation is None:
        return saved.path.name
    is_best = best is not None and saved.step == best["step"]
    figures = f"{saved.path.name}  loss {_number(saved.evaluation.get('loss'))}"
    return f"{figures} in evaluation, the best" if is_best else f"{figures} in evaluation"


def _evaluation(row: Row) -> str:
    names = [name for name in row if name != "step"]
    figures = "  ".join(f"{name} {_number(row[name])}" for name in names)
    return f"{figures}  after step {row['step']}"


def _origins(first: dict[str, Any]) -> list[str]:
    """Which options of its beginning the environment or a file said."""
    origins, options = first.get("origins"), first.get("options")
    if not isinstance(origins, dict) or not isinstance(options, dict):
        return []
    return by_origin({name: str(place) for name, place in origins.items()}, options)


def _command(value: Any) -> str:
    """As it was typed, but for where our program is."""
    if not isinstance(value, list) or not value:
        return ""
    ours = Path(str(value[0])).name in ("__main__.py", "pipeworker")
    return _words(["pipeworker" if ours else value[0], *value[1:]])


def _versions(process: dict[str, Any]) -> str:
    versions = process.get("versions")
    if not isinstance(versions, dict):
        return ""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _git(process: dict[str, Any]) -> str:
    found = process.get("git")
    if not isinstance(found, dict):
        return ""
    dirty = found.get("dirty")
    how = ", perhaps with changes" if dirty is None else ", with changes that are not in it"
    return f"{found.get('commit')}{'' if dirty is False else how}"


def _when(process: dict[str, Any]) -> str:
    found = time_of(process)
    return found.strftime("%Y-%m-%d %H:%M:%S") if found else "at no known time"


def _words(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, list) else ""


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
