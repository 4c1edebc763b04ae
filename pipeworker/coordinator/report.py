"""How a failure, the plan and the verdict read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pipeworker.coordinator.effects import Ended, Planned
from pipeworker.job.options import Options
from pipeworker.wire import lines
from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.plan import Ready
from pipeworker.wire.messages.position import Phase
from pipeworker.wire.messages.presence import Hello
from pipeworker.wire.messages.step import Batch

_MOST_SHOWN = 8
"""Shared devices that are named."""


def place(failure: Failure) -> str:
    """``stage 1, layer 3 (Block), micro-batch 2, step 7``: what applies of it."""
    position = failure.position
    parts = []
    if failure.stage or failure.rank >= 0:
        parts.append(failure.stage or f"rank {failure.rank}")
    if position.layer >= 0:
        shown = f" ({failure.layer_class})" if failure.layer_class else ""
        parts.append(f"layer {position.layer}{shown}")
    if position.microbatch >= 0:
        parts.append(f"micro-batch {position.microbatch}")
    if position.step >= 0:
        parts.append(f"step {position.step}")
    return ", ".join(parts)


def describe(failure: Failure) -> str:
    """The whole message for the user: what, where, and the user's own traceback."""
    lines = [failure.message]
    where = place(failure)
    if where and failure.cause not in (Cause.USAGE, Cause.EXIT):
        doing = (
            ""
            if failure.position.phase is Phase.STARTING
            else f"in {failure.position.phase.label}: "
        )
        lines.append(f"  {doing}{where}")
    if failure.traceback:
        lines.append("\n" + failure.traceback.rstrip())
    return "\n".join(lines)


def balance(planned: Planned) -> tuple[int, ...]:
    """Layers per stage."""
    one = [stage.layers for stage in planned.stages if not stage.replica]
    return tuple(stop - first for first, stop in one)


def planned_json(planned: Planned, options: Options) -> dict[str, Any]:
    """plan.json: what each stage was given, and what the checks of the schedule say."""
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
                "stage": stage.stage,
                "layers": list(range(*stage.layers)),
                "classes": list(stage.classes),
                "parameters": stage.parameters,
                "device": stage.device,
                "host": stage.host,
                "pid": stage.pid,
                "live_activations": kept.activations[stage.stage],
                "live_inputs": kept.inputs[stage.stage],
            }
            for stage in planned.stages
        ],
        "actions": str(planned.schedule).splitlines(),
    }


def planned_line(planned: Planned, options: Options) -> lines.Planned:
    """What the user is told of the plan."""
    steps = options.steps or (options.passes or 0) * -(-planned.length // options.accumulate)
    devices = sorted({stage.device.partition(":")[0] for stage in planned.stages})
    return lines.Planned(
        planned.schedule.name,
        planned.microbatches,
        balance(planned),
        planned.timing.bubble,
        options.replicas,
        steps,
        ", ".join(devices),
        len({stage.host for stage in planned.stages}),
    )


def sharing(workers: Iterable[tuple[Hello, Ready]], names: Callable[[int], str]) -> str:
    """Who computes on one accelerator with others; nothing where each has its own.

    Args:
        workers: by rank.
        names: of a rank, by what it holds.
    """
    sharers: dict[tuple[str, str], list[str]] = {}
    devices: dict[tuple[str, str], str] = {}
    for hello, ready in workers:
        if ready.unit:
            sharers.setdefault((hello.host, ready.unit), []).append(names(hello.rank))
            devices.setdefault((hello.host, ready.unit), f"{ready.device} on {hello.host}")
    shared = [
        f"{', '.join(some)} share {devices[unit]}"
        for unit, some in sharers.items()
        if len(some) > 1
    ]
    more = f"; and {len(shared) - _MOST_SHOWN} more are shared" if len(shared) > _MOST_SHOWN else ""
    if not shared:
        return ""
    return f"fewer accelerators than workers: {'; '.join(shared[:_MOST_SHOWN])}{more}"


def few_samples(batch: Batch, microbatches: int) -> str:
    """That a step has fewer samples than it was to have micro-batches; nothing where it has not."""
    if batch.microbatches >= microbatches:
        return ""
    samples = f"{batch.samples} sample{'s' if batch.samples > 1 else ''}"
    return (
        f"the first mini-batch has {samples}, fewer than the {microbatches} micro-batches of a "
        f"step: there are {batch.microbatches} of one sample each; give larger mini-batches, or a "
        "smaller --microbatches"
    )


def verdict(ended: Ended, seconds: float) -> lines.Verdict:
    """What the user is told of the end."""
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
        own=ended.failure is not None and ended.failure.cause is Cause.EXIT,
    )
