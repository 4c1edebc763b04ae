"""Draws ``pipeline.svg``: one step of GPipe with four stages and eight micro-batches.

    python docs/pipeline.py > docs/pipeline.svg

``pipeworker plan --svg`` draws the step of a job in the same way.
"""

from __future__ import annotations

from pipeworker.display.plan.svg import Picture
from pipeworker.plan.orders import resolve
from pipeworker.plan.simulate import simulate, timeline

STAGES, MICROBATCHES = 4, 8


def svg() -> str:
    """Return the picture."""
    order = resolve("gpipe")
    schedule = order.build(order.place(STAGES), MICROBATCHES, ("never",) * STAGES)
    return Picture(
        f"A step of {STAGES} stages and {MICROBATCHES} micro-batches",
        [f"stage {stage}" for stage in range(STAGES)],
        timeline(schedule),
        simulate(schedule).bubble,
        timed=False,
        width=860,
    ).svg()


if __name__ == "__main__":
    print(svg(), end="")
