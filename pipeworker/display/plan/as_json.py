"""A plan as the object that ``pipeworker plan --json`` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeworker.display.plan.view import Choice, PlanView, StageView


def to_json(view: PlanView) -> dict[str, Any]:
    """Return a plan as JSON has it: seconds of a step, bytes, shares, samples of a micro-batch.

    Where nothing was measured, seconds are None, because counts of operations have no unit.
    """
    planned = view.planned

    def known(value: float) -> float | None:
        return value if view.measured else None

    def stage(one: StageView) -> dict[str, Any]:
        return {
            "stage": one.stage,
            "worker": one.worker,
            "layers": list(one.layers),
            "parameters": one.parameters,
            "seconds": {name: known(value) for name, value in asdict(one.seconds).items()},
            "memory_bytes": one.memory,
            "limit_bytes": one.limit,
            "recompute": one.mode,
        }

    def choice(one: Choice) -> dict[str, Any]:
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
            "step_seconds": known(one.step_seconds),
            "samples_per_second": known(one.samples_per_second),
            "bubble": one.bubble,
            "memory_bytes": one.memory,
            "fits": one.fits,
        }

    return {
        "schedule": planned.name,
        "microbatches": planned.schedule.microbatches,
        "virtual_stages": planned.virtual_stages,
        "samples": view.samples_each,
        "measured": view.measured,
        "stages": [*map(stage, view.stages)],
        "update_seconds": known(planned.update),
        "step_seconds": known(planned.step_seconds),
        "samples_per_second": known(view.samples_per_second),
        "bubble": planned.timing.bubble,
        "why": list(planned.why),
        "alternatives": [*map(choice, view.choices)],
    }
