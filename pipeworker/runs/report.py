"""``pipeworker report``: where the time of a run's steps went, and what to change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeworker.display.report.page import WORDS
from pipeworker.display.text import table
from pipeworker.errors import UnreadableFile, UsageError, reading
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.facts.peak import peak_flops
from pipeworker.job.options import Options
from pipeworker.job.planning import limited, plan_run, request_of
from pipeworker.plan.figures import flops_text, rate_text
from pipeworker.plan.planned import Planned
from pipeworker.record.plan_file import PlanFile
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir
from pipeworker.runs.info import recent_rows, speeds_of
from pipeworker.trace import causes
from pipeworker.trace.advice import Advice, advise, measured_facts
from pipeworker.trace.clocks import aligned
from pipeworker.trace.mini_batches import (
    MiniBatch,
    costs_of,
    mini_batches,
    schedule_of,
    undisturbed,
    warm,
)
from pipeworker.trace.timeline import WorkerLife, read_timeline

NOTHING = "it has no recorded steps that all of its workers have finished"
"""The problem with a run that has no report."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The medians of recent steps; None if unknown.

    Attributes:
        samples, tokens: a second.
        flops: floating-point operations of the model a second, forward and backward, without those
            of recomputation.
        peak: their share of what the devices can do, 0..1.
    """

    samples: float | None = None
    tokens: float | None = None
    flops: float | None = None
    peak: float | None = None

    @staticmethod
    def of(run_dir: RunDir, facts: NetworkFacts | None, options: Options) -> Rates:
        """Return the rates of a run; raises OSError."""
        samples, tokens = speeds_of(recent_rows(run_dir))
        if facts is None or not samples or not facts.flops_per_sample:
            return Rates(samples, tokens)
        flops = samples * facts.flops_per_sample
        peak = peak_flops(facts.device, options.precision)
        return Rates(samples, tokens, flops, flops / (peak * options.workers) if peak else None)

    def words(self) -> str:
        """Return what is known, in words."""
        found = []
        for rate, unit in ((self.samples, "samples/s"), (self.tokens, "tokens/s")):
            found += [f"{rate_text(rate)} {unit}"] if rate else []
        if self.flops:
            share = f", {self.peak:.0%} of the devices' peak" if self.peak else ""
            found.append(f"{flops_text(self.flops)} of the model{share}")
        return ", ".join(found)


@dataclass(frozen=True, slots=True)
class Report:
    """The use of the time, as measured and as planned, and advice.

    Attributes:
        recorded: the mini-batches in question.
        plan: the plan of a step of one replica; None if the run was not planned from measured
            layers, or no longer is what was planned.
        planned: where the time goes in it.
        rates: how fast it is.
    """

    found: causes.Breakdown
    recorded: Sequence[MiniBatch]
    advice: Advice
    rates: Rates
    plan: Planned | None = None
    planned: causes.Breakdown | None = None


def report(path: Path, other: Path | None = None, *, as_json: bool = False) -> str:
    """Describe where the time of a run's recorded steps went, beside another run if it is given.

    Raises:
        UsageError: there is no run, it has no recorded steps, or a file of it cannot be read.
    """
    made = _read(path)
    if other is None:
        return json.dumps(_facts(made), indent=2) if as_json else "\n".join(_text(made))
    pair = made, _read(other)
    if as_json:
        return json.dumps({"runs": [_facts(one) for one in pair]}, indent=2)
    return "\n".join(_difference((path, other), pair))


def _read(path: Path) -> Report:
    made = read(path)
    if made is None:
        raise UsageError(f"{path}: {NOTHING}")
    return made


def read(path: Path) -> Report | None:
    """Return the report of the run in a directory; None if it has no recorded steps.

    Raises:
        UsageError: there is no run, or a file of it cannot be read.
    """
    run_dir = RunDir(path)
    record = RunRecord.read(run_dir)
    with reading(path):
        lives = aligned(read_timeline(run_dir).lives)
    return _of_run(run_dir, record, lives)


def _of_run(run_dir: RunDir, record: RunRecord, lives: Sequence[WorkerLife]) -> Report | None:
    recorded, suspended = undisturbed(warm(mini_batches(lives)))
    if not recorded:
        return None
    schedule = schedule_of(recorded[-1])
    with reading(run_dir.plan):
        file = PlanFile.read(run_dir)
    ranges, facts, balance = file.ranges, file.facts, file.balance
    try:
        options = Options.of(record.options)
    except UsageError as error:
        raise UnreadableFile(run_dir.run, error) from None
    # Between the steps of a user's own loop is what the user does there.
    between = causes.OTHER if options.own_loop else causes.COORDINATOR
    found = causes.breakdown(lives, recorded, between, suspended)
    request = request_of(options)
    with reading(run_dir.metrics):
        rates = Rates.of(run_dir, facts, options)
    costs = costs_of(recorded)
    if len(ranges) != schedule.placement.stages:
        advice = Advice("the plan of the run is not that of its last steps")
        return Report(found, recorded, advice, rates)
    owners = schedule.placement.owners
    measured = limited(measured_facts(facts, ranges, owners, costs), options)
    known = facts is not None
    advice = advise(measured, request, balance, found, len(recorded), known=known)
    if facts is None or not facts.measured:
        return Report(found, recorded, advice, rates)
    plan = plan_run(facts, options, balance, file.schedule)
    planned = causes.planned_breakdown(plan, options.accumulate)
    return Report(found, recorded, advice, rates, plan, planned)


def _facts(made: Report) -> dict[str, Any]:
    found = made.found
    return {
        "seconds": found.seconds,
        "steps": list(found.steps),
        "suspended": found.suspended,
        "workers": [_worker(time) for time in found.workers],
        "samples_per_second": made.rates.samples,
        "tokens_per_second": made.rates.tokens,
        "flops_per_second": made.rates.flops,
        "peak_share": made.rates.peak,
        "planned": None
        if made.planned is None
        else {
            "seconds": made.planned.seconds,
            "workers": [_worker(time) for time in made.planned.workers],
        },
        "advice": asdict(made.advice),
    }


def _worker(time: causes.WorkerTime) -> dict[str, Any]:
    parts = {part: getattr(time, part) for part in causes.PARTS}
    stages, idle = list(time.stages), dict(time.idle)
    return {"worker": time.worker, "replica": time.replica, "stages": stages, **parts, "idle": idle}


def _text(made: Report) -> Iterator[str]:
    found = made.found
    count = len(found.steps)
    yield made.advice.text
    yield ""
    if words := made.rates.words():
        yield words
    each = found.seconds / count
    steps = f"the last {count} recorded steps" if count > 1 else "the last recorded step"
    yield f"{steps}, of {each:.4g} s; shares of their time:"
    yield from _table(found)
    if found.suspended:
        yield f"the job was suspended for {found.suspended:.4g} s of the other time"
    if made.planned is not None:
        yield ""
        yield f"as planned, a step of {made.planned.seconds:.4g} s:"
        yield from _table(made.planned)


def _table(found: causes.Breakdown) -> Sequence[str]:
    shown = [name for name, seconds in found.mean.items() if seconds]
    head = ["worker", "stages", *(WORDS.get(name, name) for name in shown)]

    def shares(parts: Mapping[str, float]) -> list[str]:
        return [f"{100 * parts[name] / found.seconds:.1f}%" for name in shown]

    rows = [head]
    for time in found.workers:
        rows.append([str(time.worker), ", ".join(map(str, time.stages)), *shares(time.parts)])
    if len(found.workers) > 1:
        rows.append(["mean", "", *shares(found.mean)])
    return table(rows, right=range(2, len(head)))


def _difference(paths: tuple[Path, Path], pair: tuple[Report, Report]) -> Iterator[str]:
    """Yield where the steps of two runs differ, the largest difference first."""
    first, second = (
        {name: 1e3 * value / len(one.found.steps) for name, value in one.found.mean.items()}
        for one in pair
    )
    totals = [1e3 * one.found.seconds / len(one.found.steps) for one in pair]
    by = totals[1] / totals[0] - 1
    yield (
        f"a step of {paths[1]} takes {abs(by):.0%} {'more' if by > 0 else 'less'} time than one of "
        f"{paths[0]}; milliseconds of a step, the mean of all workers:"
    )
    yield ""
    rows = [["", str(paths[0]), str(paths[1]), "difference"]]
    parts = sorted(first, key=lambda part: -abs(second[part] - first[part]))
    for part in parts:
        if first[part] or second[part]:
            values = first[part], second[part]
            rows.append([WORDS.get(part, part), *_shown(*values)])
    rows.append(["step", *_shown(*totals)])
    yield from table(rows, right=(1, 2, 3))


def _shown(first: float, second: float) -> list[str]:
    return [f"{first:.2f}", f"{second:.2f}", f"{second - first:+.2f}"]
