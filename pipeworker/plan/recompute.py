"""Recompute and offload: which micro-batches a stage forwards twice, and when saved tensors return.

*Recompute* (torchgpipe's checkpointing, Kim et al. 2020, section 3.2) drops the graph of a forward
and runs the forward again (``R``) before the backward.

*Offload* keeps the graph, and moves what it saved to the host's memory. The copy to the host begins
with the forward and is complete when the stage's next action ends. ``FETCH`` begins the copy back;
it stands before the worker's last action ahead of the backward, so that the copy overlaps that
action. At most three micro-batches are on the device at once: one is computed, one leaves and one
returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Mapping, Sequence

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import INPUTS, Action, Kind

OFFLOAD = "offload"
RECOMPUTE_MODES = ("auto", "always", "except_first", "never", OFFLOAD)


def recomputed(mode: str, microbatches: int) -> range:
    """Return the micro-batches that a stage in this mode recomputes.

    ``auto`` is ``always`` as long as no plan knows the memory of the workers.
    """
    match mode:
        case "auto" | "always":
            return range(microbatches)
        case "except_first":
            return range(1, microbatches)
        case "never" | "offload":
            return range(0)
    raise ScheduleError(
        f"unknown recompute mode {mode!r}: choose from {', '.join(RECOMPUTE_MODES)}"
    )


def with_recomputes(
    order: Sequence[Action], recomputed: Mapping[int, Collection[int]] | Sequence[Collection[int]]
) -> list[Action]:
    """Return a worker's compute order with a recompute right before each backward that needs one.

    A recomputed graph is held until its weight part has run. So that a worker holds only one of
    them, that part follows its input part at once, and before it those that the stage has deferred,
    because gradients accumulate in micro-batch order.

    `order` are the worker's forwards and backwards, and `recomputed` the micro-batches by stage
    whose forward runs again.
    """
    found: list[Action] = []
    deferred: dict[int, deque[int]] = {}  # by stage, micro-batches without their weight part
    for action in order:
        kind, stage, m, _ = action
        waiting = deferred.setdefault(stage, deque())
        if kind is Kind.BACKWARD_WEIGHT:
            if m not in waiting:
                continue  # it has run early
            waiting.remove(m)
        again = kind in INPUTS and m in recomputed[stage]
        if again:
            found.append(Action(Kind.RECOMPUTE, stage, m))
        found.append(action)
        if kind is Kind.BACKWARD_INPUT:
            waiting.append(m)
            if again:
                found += [Action(Kind.BACKWARD_WEIGHT, stage, early) for early in waiting]
                waiting.clear()
    return found


def with_fetches(order: Sequence[Action], stages: Container[int]) -> list[Action]:
    """Return a worker's compute order with a ``FETCH`` of each micro-batch that has time to leave.

    A micro-batch stays on the device if its backward follows too soon, or if it is recomputed,
    because the graph of its first forward is dropped. `stages` are those that offload.
    """
    recomputes = {(a.stage, a.microbatch) for a in order if a.kind is Kind.RECOMPUTE}
    forwards: dict[tuple[int, int], int] = {}
    of_stage: dict[int, list[int]] = {}
    before: dict[int, list[Action]] = {}
    for place, (kind, stage, m, _) in enumerate(order):
        if stage not in stages:
            continue
        of_stage.setdefault(stage, []).append(place)
        if kind is Kind.FORWARD:
            forwards[stage, m] = len(of_stage[stage])
        elif kind in INPUTS and (stage, m) not in recomputes:
            following = of_stage[stage][forwards[stage, m]]
            if following < place - 1:
                before.setdefault(place - 1, []).append(Action(Kind.FETCH, stage, m))
    return [one for place, a in enumerate(order) for one in (*before.get(place, ()), a)]
