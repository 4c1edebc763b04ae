"""``pipeworker trace``: what the workers of a run did and when, as a file for Perfetto.

For several hosts the file is a TAR of one trace for each, with a manifest that names the machines:
Perfetto (version 58 and later) shows them on one clock. The format is that of Perfetto's "Trace
manifest format".
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeworker.errors import PipeworkerError, UsageError, reading, writing
from pipeworker.job.options import Options
from pipeworker.job.planning import plan_run
from pipeworker.plan.figures import plural
from pipeworker.plan.planner.memory import LayerBytes
from pipeworker.plan.simulate import timeline
from pipeworker.record.files.atomic_file import write_bytes
from pipeworker.record.metrics import rows
from pipeworker.record.plan_file import PlanFile
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir
from pipeworker.trace import chrome
from pipeworker.trace.clocks import Clocks, aligned
from pipeworker.trace.timeline import WorkerLife, read_timeline

_STEPS = re.compile(r"(\d{1,12}):(\d{1,12})", re.ASCII)
_NAMES = {False: "timeline.json", True: "timeline.tar"}
"""The default names of the file, by whether there are several hosts."""


def write_trace(path: Path, steps: str | None, asked: Path | None) -> str:
    """Write the timeline of a run, or of its steps ``A:B``; describe what was written.

    Raises:
        UsageError: there is no run, it has no such steps, or the output would replace a file or
            cannot be written.
    """
    chosen = _chosen(steps)
    run_dir = RunDir(path)
    record = RunRecord.read(run_dir)
    with reading(path):
        read = read_timeline(run_dir, chosen)
    lives, recorded = read.lives, read.recorded
    if not recorded:
        has_steps = rows.last(run_dir.metrics) is not None
        why = "its timeline/ is gone or empty" if has_steps else "no step has ended"
        raise UsageError(f"{path}: it has no recorded steps{'' if has_steps else ' yet'}: {why}")
    if chosen is not None and not any(step in chosen for step in recorded):
        since = " since the run was resumed" if record.content["resumed"] else ""
        raise UsageError(
            f"--steps {steps}: none of them is recorded{since}; recorded: {_ranges(recorded)} "
            "(launch --trace records all)"
        )
    hosts = len({life.host for life in lives})
    output = asked or Path(_NAMES[hosts > 1])
    if output.exists() and output.suffix not in (".json", ".tar"):
        raise UsageError(f"-o {output}: exists already; choose another file, such as trace.json")
    found = chrome.events(aligned(lives), chosen, _plan(run_dir, record))
    data = _archive(path, lives, found) if hosts > 1 else _json(found)
    with writing(output):
        write_bytes(output, data)
    shown = sorted({c.step for life in lives for c in life.commands if c.actions})
    noun = "step" if len(shown) == 1 else "steps"
    workers = plural(len({life.rank for life in lives}), "worker")
    left_out = sorted({*recorded} - {*shown}) if chosen is None else []
    more = f"; --steps shows others of {_ranges(left_out)}" if left_out else ""
    return (
        f"{output}: {noun} {_ranges(shown)} of {workers}{more}; https://ui.perfetto.dev opens it, "
        "and sends it nowhere"
    )


def _plan(run_dir: RunDir, record: RunRecord) -> chrome.Plan:
    """Return the plan of a run; an empty one if ``plan.json`` has none that is of use."""
    try:
        file, options = PlanFile.read(run_dir), Options.of(record.options)
        facts = file.facts
        if facts is None or not file.ranges or file.ranges[-1][1] != len(facts.layers):
            return chrome.Plan()
        layers = LayerBytes(facts, options.microbatches)
        graphs = {stage: layers.graph(held) for stage, held in enumerate(file.ranges)}
        if not facts.measured or options.placement.stages != len(file.ranges):
            return chrome.Plan(graphs=graphs)
        planned = plan_run(facts, options, file.balance, file.schedule)
        return chrome.Plan(timeline(planned.schedule, planned.costs), graphs)
    except (OSError, PipeworkerError, ArithmeticError):  # a trace is worth as much without a plan
        return chrome.Plan()


def _json(found: Sequence[chrome.Event]) -> bytes:
    content = {"traceEvents": found, "displayTimeUnit": "ms"}
    return json.dumps(content, separators=(",", ":")).encode()


def _archive(path: Path, lives: Sequence[WorkerLife], found: Sequence[chrome.Event]) -> bytes:
    """Return a TAR with a trace for each host, and the manifest that puts them on one clock."""
    divided = chrome.by_host(lives, found)
    files = {f"{number}-{_plain(host)}.json": host for number, host in enumerate(divided)}
    members = {name: _json(divided[host]) for name, host in files.items()}
    manifest = json.dumps(_manifest(path, lives, files)).encode()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in {"perfetto_manifest.json": manifest, **members}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def _manifest(path: Path, lives: Sequence[WorkerLife], files: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest: the times of all files begin at the same moment.

    Its attributes say how far each host's clock was behind the coordinator's, which is taken into
    account already, and how exactly that is known.
    """
    clocks, attributes = Clocks.of(lives), {"pipeworker.run": path.resolve().name}
    for life in lives:
        offset, error = clocks.offset(life.clock, life.now)
        if clocks.samples.get(life.clock):
            attributes[f"pipeworker.clock_offset_ns.{life.host}"] = str(round(offset * 1e9))
            attributes[f"pipeworker.clock_error_ns.{life.host}"] = str(round(error * 1e9))
    first = next(iter(files))
    entries: list[dict[str, Any]] = []
    for name, host in files.items():
        entry: dict[str, Any] = {"path": name, "machine": {"name": host}}
        if name != first:
            entry["clocks"] = {"sync_to": {"file": first}, "offset_ns": 0}
        entries.append(entry)
    return {"perfetto_manifest": {"version": 1, "files": entries, "attributes": attributes}}


def _plain(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", host)[:64]


def _chosen(steps: str | None) -> range | None:
    if steps is None:
        return None
    found = _STEPS.fullmatch(steps)
    if found is None or int(found[1]) > int(found[2]):
        raise UsageError(
            f"--steps {steps}: must be the first and the last step to show, such as 100:102"
        )
    return range(int(found[1]), int(found[2]) + 1)


def _ranges(steps: Sequence[int]) -> str:
    """Return steps in words: ``1-3, 7``; the first ranges if there are many."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in found]
    return ", ".join(words if len(words) <= 6 else [*words[:4], "...", words[-1]])
