"""A plan as the object that ``pipeworker plan --json`` prints."""

from __future__ import annotations

from typing import Any

from pipeworker.display.plan.view import Choice, PlanView, StageView


def to_json(view: PlanView) -> dict[str, Any]:
    """Return a plan as JSON has it: seconds of a step, bytes, shares, samples of a micro-batch.

    Where nothing was measured, seconds are None, because counts of operations have no unit.
    """
    planned = view.planned
    return {
        "schedule": planned.name,
        "microbatches": planned.schedule.microbatches,
        "virtual_stages": planned.virtual_stages,
        "samples": view.samples_each,
        "measured": view.measured,
        "stages": [_stage(stage, measured=view.measured) for stage in view.stages],
        "update_seconds": _known(planned.update, measured=view.measured),
        "step_seconds": _known(planned.step_seconds, measured=view.measured),
        "samples_per_second": _known(view.samples_per_second, measured=view.measured),
        "bubble": planned.timing.bubble,
        "why": list(planned.why),
        "alternatives": [_choice(one, measured=view.measured) for one in view.choices],
    }


def _stage(stage: StageView, *, measured: bool) -> dict[str, Any]:
    times = {
        "forward": stage.forward,
        "recompute": stage.recompute,
        "backward": stage.backward,
    }
    return {
        "stage": stage.stage,
        "worker": stage.worker,
        "layers": list(stage.layers),
        "parameters": stage.parameters,
        "seconds": {name: _known(value, measured=measured) for name, value in times.items()},
        "memory_bytes": stage.memory,
        "limit_bytes": stage.limit,
        "recompute": stage.mode,
    }


def _choice(one: Choice, *, measured: bool) -> dict[str, Any]:
    named = {
        "schedule": one.order,
        "stages": one.stages,
        "virtual_stages": one.virtual_stages,
        "microbatches": one.microbatches,
    }
    if one.problem:
        return {**named, "problem": one.problem}
    return {
        **named,
        "step_seconds": _known(one.step_seconds, measured=measured),
        "samples_per_second": _known(one.samples_per_second, measured=measured),
        "bubble": one.bubble,
        "memory_bytes": one.memory,
        "fits": one.fits,
    }


def _known(value: float, *, measured: bool) -> float | None:
    return value if measured else None
