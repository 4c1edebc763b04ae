"""A plan as the object that ``pipeworker plan --json`` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeworker.display.plan.view import PlanView, StageView
from pipeworker.plan.planner.choices import Alternative


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

    def choice(one: Alternative) -> dict[str, Any]:
        found = one.planned
        named = {
            "schedule": one.name,
            "stages": one.request.workers,
            "virtual_stages": one.virtual_stages,
            "microbatches": found.schedule.microbatches if found else 0,
        }
        if found is None:
            return {**named, "problem": one.problem}
        return {
            **named,
            "step_seconds": known(found.step_seconds),
            "samples_per_second": known(view.samples_per_second(found)),
            "bubble": found.timing.bubble,
            "memory_bytes": max(found.memory),
            "fits": found.fits,
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
        "samples_per_second": known(view.samples_per_second(planned)),
        "bubble": planned.timing.bubble,
        "why": list(planned.why),
        "alternatives": [*map(choice, view.choices)],
    }
