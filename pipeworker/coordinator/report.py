"""Failures and warnings as text, and the plan as JSON. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from pipeworker.coordinator.blueprint import Blueprint
from pipeworker.coordinator.effects import WritePlan
from pipeworker.coordinator.ending import End, JobEnd
from pipeworker.coordinator.roster import Member
from pipeworker.errors import AGAIN
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import Batch
from pipeworker.job.options import Options
from pipeworker.plan.planned import Planned
from pipeworker.plan.simulate import simulate
from pipeworker.timings import STALL_FACTOR
from pipeworker.wire import lines
from pipeworker.wire.messages.plan import Ready
from pipeworker.wire.messages.presence import Abort, Hello

_FEW_SAMPLES = 8
"""The statistics of so many samples or more are usable."""
_MAX_NAMED = 8
"""Shared devices that a warning names."""


def _worker(failure: Failure) -> str:
    return failure.stage or (f"rank {failure.rank}" if failure.rank >= 0 else "")


def _activity(position: Position) -> str:
    """Return the activity of a worker at a position, in the user's words."""
    phase = position.phase
    if phase is Phase.UPDATE and position.step < 0:
        return "making the optimizer"
    return "the trial of the layers" if phase is Phase.SURVEY else phase.name.lower()


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
    where, position = location(failure), failure.position
    if where and (failure.lacks_place or failure.cause not in (Cause.USAGE, Cause.EXIT)):
        is_starting = position.phase is Phase.STARTING
        lines.append("  " + ("" if is_starting else f"in {_activity(position)}: ") + where)
    if failure.traceback:
        lines.append("\n" + failure.traceback.rstrip())
    return "\n".join(lines)


def with_location(failure: Failure) -> str:
    """Return a failure's message, and in parentheses what it lacks of the location."""
    where, name = location(failure), _worker(failure)
    if failure.cause is not Cause.USER and re.search(rf"\b{name}\b", failure.message):
        where = where.removeprefix(name).removeprefix(", ")
    return failure.message + (f" ({where})" if where else "")


def standstill(member: Member, seconds: float, limit: float) -> str:
    """Return a note about a worker that has made no progress for `seconds`, with its stack.

    Data that another process reads has no frames in the worker, whose log has its stack.
    """
    position, stack = member.beat.position, member.beat.stack
    where = location(replace(member.failure(Cause.HUNG, ""), rank=-1))
    at = ", ".join(filter(None, (_activity(position), where)))
    if not stack and position.phase is Phase.READING:
        stack = f"  logs/worker-{member.hello.rank}.log has the stack of the process that reads"
    text = (
        f"{member.full_name} has made no progress for {seconds:g} s "
        f"({at}); after {limit:g} s, {STALL_FACTOR} times --worker-timeout, it counts as lost"
    )
    return f"{text}\n{stack}".rstrip()


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


def planned(
    blueprint: Blueprint, workers: Sequence[tuple[Hello, Ready]], facts: NetworkFacts | None
) -> tuple[WritePlan, lines.Planned]:
    """Return the content of ``plan.json`` and the line to the launcher, once all stages are built.

    `workers` is by rank. The schedule is that of a replica with the most micro-batches. `facts`
    are those that the job is planned from. Seconds are None if none were measured, and the bubble
    of the predicted step is None if there are no facts. The line has the schedule's own bubble.
    """
    options, placement, plan = blueprint.options, blueprint.placement, blueprint.planned
    measured = plan is not None and facts is not None and facts.measured
    unknown = dict.fromkeys(("forward", "recompute", "backward"))
    seconds = [asdict(one) for one in plan.stage_seconds] if plan and measured else []
    batches = (ready.batch.microbatches for _, ready in workers if ready.batch)
    microbatches = next(batches, options.microbatches)
    schedule, kept = blueprint.for_replica(microbatches, 0)
    bubble = simulate(schedule).bubble
    balance = tuple(stop - first for first, stop in blueprint.ranges)
    stages: list[dict[str, Any]] = [
        {
            "replica": placement.replica_of(ready.rank),
            "stage": built.stage,
            "worker": (worker := placement.worker_of(ready.rank)),
            "layers": [built.first, built.first + len(built.layers)],
            "classes": [name.rpartition(", ")[2] for name in built.layers],
            "parameters": built.parameters,
            "seconds": seconds[built.stage] if seconds else unknown,
            "memory_bytes": plan.memory[worker] if plan else None,
            "limit_bytes": plan.limits[worker] if plan else None,
            "device": ready.device,
            "host": hello.host,
            "pid": hello.pid,
            "live_activations": kept.activations[built.stage],
            "live_inputs": kept.inputs[built.stage],
            "recompute": "always" if (mode := blueprint.recompute[built.stage]) == "auto" else mode,
        }
        for hello, ready in workers
        for built in ready.stages
    ]
    content = {
        "job_file": options.job_file,
        "schedule": schedule.name,
        "recompute": options.recompute,
        "microbatches": microbatches,
        "replicas": options.replicas,
        "bubble": plan.timing.bubble if plan else None,
        "schedule_bubble": bubble,
        "step_seconds": _step_seconds(plan, options) if plan and measured else None,
        "why": list(plan.why) if plan else [],
        "balance": list(balance),
        "stages": sorted(stages, key=lambda stage: (stage["replica"], stage["stage"])),
        "actions": str(schedule).splitlines(),
    }
    if facts is not None:
        content["facts"] = asdict(facts)
    length = max(ready.epoch_length for _, ready in workers)
    line = lines.Planned(
        schedule.name,
        microbatches,
        balance,
        placement.held,
        bubble,
        options.replicas,
        options.total_steps(length),
        ", ".join(sorted({ready.device.partition(":")[0] for _, ready in workers})),
        len({hello.host for hello, _ in workers}),
        blueprint.hooks,
        _step_seconds(plan, options) if plan and measured else 0.0,
        _busy_seconds(plan, options) if plan and measured else (),
        plan.why if plan else (),
    )
    return WritePlan(content), line


def _step_seconds(planned: Planned, options: Options) -> float:
    """Return the predicted seconds of a step, of all of its mini-batches."""
    return options.accumulate * planned.timing.makespan + planned.update


def _busy_seconds(planned: Planned, options: Options) -> tuple[float, ...]:
    """Return the seconds of a step in which each worker is predicted to compute."""
    stages = [one.total for one in planned.stage_seconds]
    held = planned.schedule.placement.held
    each = (sum(stages[stage] for stage in some) for some in held)
    return tuple(options.accumulate * seconds + planned.update for seconds in each)


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
    left = len(shared) - _MAX_NAMED
    more = f"; and {left} more {'is' if left == 1 else 'are'} shared" if left > 0 else ""
    return f"fewer accelerators than workers: {'; '.join(shared[:_MAX_NAMED])}{more}"


def small_batches(batch: Batch, ready: Iterable[Ready], options: Options) -> list[lines.Warned]:
    """Return a warning or a note if the first mini-batch has few samples for its micro-batches."""
    norms = any(built.batch_norms for one in ready for built in one.stages)
    if few := _few_samples(batch, options, norms=norms):
        return [lines.Warned(few)]
    small = _small_batch_norm(batch, options) if norms else ""
    return [lines.Warned(small, note=True)] if small else []


def _small_batch_norm(batch: Batch, options: Options) -> str:
    """Return a note if batch norm has few samples in each of the default micro-batches, else ""."""
    samples = batch.samples // batch.microbatches
    if samples >= _FEW_SAMPLES or not options.has_default_microbatches:
        return ""
    size = f"{samples} sample{'s' if samples > 1 else ''}"
    return (
        f"batch norm: normalizes each micro-batch by itself, and with {batch.microbatches} "
        f"micro-batches, the default, a mini-batch of {batch.samples} leaves {size} in each; use "
        "fewer --microbatches, larger mini-batches, or a norm that does not depend on the batch"
    )


def _few_samples(batch: Batch, options: Options, *, norms: bool) -> str:
    """Return a warning if a step has fewer samples than micro-batches, else an empty string.

    `norms` says whether the model has batch norm.
    """
    if batch.microbatches >= options.microbatches:
        return ""
    default = ", the default" if options.has_default_microbatches else ""
    several = batch.samples > 1
    samples = f"{batch.samples} sample{'s' * several}"
    count = batch.microbatches
    made = f"are {count} micro-batches of one sample each" if several else "is 1 micro-batch"
    alone = ", and batch norm normalizes each by itself" if norms else ""
    return (
        f"--microbatches {options.microbatches}{default}: the first mini-batch has only {samples}, "
        f"so there {made}{alone}; use larger mini-batches or a smaller --microbatches"
    )
