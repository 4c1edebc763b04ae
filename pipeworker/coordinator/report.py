"""Failures, the plan and the verdict as text and as JSON. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from pipeworker.coordinator.effects import Ended, Planned
from pipeworker.coordinator.ending import End, JobEnd
from pipeworker.errors import AGAIN
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase
from pipeworker.facts.step import Batch
from pipeworker.job.options import Options
from pipeworker.wire import lines
from pipeworker.wire.messages.plan import Ready
from pipeworker.wire.messages.presence import Abort, Hello

_MAX_NAMED = 8
"""Shared devices that a warning names."""


def _worker(failure: Failure) -> str:
    return failure.stage or (f"rank {failure.rank}" if failure.rank >= 0 else "")


def location(failure: Failure) -> str:
    """Return the known parts of ``stage 1, layer 3 (Block), micro-batch 2, step 7``."""
    at = failure.position
    shown = f" ({failure.layer_class})" if failure.layer_class else ""
    parts = (
        _worker(failure),
        f"layer {at.layer}{shown}" if at.layer >= 0 else "",
        f"micro-batch {at.microbatch}" if at.microbatch >= 0 else "",
        f"step {at.step}" if at.step >= 0 else "",
    )
    return ", ".join(filter(None, parts))


def describe(failure: Failure) -> str:
    """Return the message for the user: what failed, where, and the user's own traceback."""
    lines = [failure.message]
    where, phase = location(failure), failure.position.phase
    if where and failure.cause not in (Cause.USAGE, Cause.EXIT):
        lines.append("  " + ("" if phase is Phase.STARTING else f"in {phase.label}: ") + where)
    if failure.traceback:
        lines.append("\n" + failure.traceback.rstrip())
    return "\n".join(lines)


def with_location(failure: Failure) -> str:
    """Return a failure's message, and in parentheses what it lacks of the location."""
    where, name = location(failure), _worker(failure)
    if failure.cause is not Cause.USER and re.search(rf"\b{name}\b", failure.message):
        where = where.removeprefix(name).removeprefix(", ")
    return failure.message + (f" ({where})" if where else "")


def abort_message(end: End) -> Abort:
    """Return the message that ends the workers of a job that is not done."""
    failure = end.failure
    status = end.exit_status if isinstance(end, JobEnd) else AGAIN
    if failure is None:
        return Abort(end_status(end), status)
    if failure.cause is Cause.LOST:
        status = AGAIN
    if failure.cause is Cause.EXIT:  # the verdict alone shows the job file's own words
        return Abort("", status)
    step_known = failure.position.step >= 0
    return Abort(with_location(failure) if step_known else failure.message, status)


def end_status(end: End) -> str:
    """Return how a generation ended, in a word."""
    return end.status.value if isinstance(end, JobEnd) else "lost"


def balance(planned: Planned) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    return tuple(len(stage.built.layers) for stage in planned.stages if not stage.replica)


def planned_json(planned: Planned, options: Options) -> dict[str, Any]:
    """Return the content of ``plan.json``: the stages, and what the schedule keeps."""
    kept = planned.kept
    return {
        "job_file": options.job_file,
        "schedule": planned.schedule.name,
        "recompute": options.recompute,
        "microbatches": planned.microbatches,
        "replicas": options.replicas,
        "bubble": planned.timing.bubble,
        "balance": list(balance(planned)),
        "stages": [
            {
                "replica": stage.replica,
                "stage": built.stage,
                "layers": list(range(built.first, built.first + len(built.layers))),
                "classes": list(built.layers),
                "parameters": built.parameters,
                "device": stage.device,
                "host": stage.worker.host,
                "pid": stage.worker.pid,
                "live_activations": kept.activations[built.stage],
                "live_inputs": kept.inputs[built.stage],
                "recompute": stage.recompute,
            }
            for stage, built in ((stage, stage.built) for stage in planned.stages)
        ],
        "actions": str(planned.schedule).splitlines(),
    }


def planned_line(planned: Planned, options: Options) -> lines.Planned:
    """Return the line that reports the plan to the launcher."""
    steps = options.steps or (options.passes or 0) * -(-planned.length // options.accumulate)
    devices = sorted({stage.device.partition(":")[0] for stage in planned.stages})
    return lines.Planned(
        planned.schedule.name,
        planned.microbatches,
        balance(planned),
        planned.schedule.placement.held,
        planned.timing.bubble,
        options.replicas,
        steps,
        ", ".join(devices),
        len({stage.worker.host for stage in planned.stages}),
    )


def shared_accelerators(workers: Iterable[tuple[Hello, Ready]], names: Callable[[int], str]) -> str:
    """Return a warning that names workers sharing an accelerator by `names`; "" if none do."""
    sharing: dict[tuple[str, str], list[tuple[Hello, Ready]]] = {}
    for hello, ready in workers:
        if ready.accelerator:
            sharing.setdefault((hello.host, ready.accelerator), []).append((hello, ready))
    shared = [
        f"{', '.join(names(hello.rank) for hello, _ in found)} share {found[0][1].device} on {host}"
        for (host, _), found in sharing.items()
        if len(found) > 1
    ]
    if not shared:
        return ""
    more = f"; and {len(shared) - _MAX_NAMED} more are shared" if len(shared) > _MAX_NAMED else ""
    return f"fewer accelerators than workers: {'; '.join(shared[:_MAX_NAMED])}{more}"


def few_samples(batch: Batch, microbatches: int) -> str:
    """Return a warning if a step has fewer samples than micro-batches, else an empty string."""
    if batch.microbatches >= microbatches:
        return ""
    samples = f"{batch.samples} sample{'s' if batch.samples > 1 else ''}"
    return (
        f"--microbatches {microbatches}: the first mini-batch has only {samples}, so there are "
        f"{batch.microbatches} micro-batches of one sample each; use larger mini-batches or a "
        "smaller --microbatches"
    )


def verdict(ended: Ended, seconds: float) -> lines.Verdict:
    """Return the line that reports the end of the job to the launcher."""
    return lines.Verdict(
        ended.status.value,
        ended.exit_status,
        ended.steps,
        seconds,
        ended.peak_memory,
        ended.bubble,
        describe(ended.failure) if ended.failure else None,
        len(ended.causes),
        ended.causes,
        ended.busy,
        job_exited=ended.failure is not None and ended.failure.cause is Cause.EXIT,
    )
