"""When what a graph saved is fetched from the host's memory, to which it has gone. Pure.

What a forward saves begins to leave at once, beside what is computed; it has left the device when
the stage's next action ends. It is fetched before the worker's last action ahead of its backward,
beside which it comes back. So three micro-batches at most are on the device at once: one that
computes, one that leaves and one that comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeworker.plan.actions import Action, Kind


def fetched(order: Sequence[Action]) -> list[Action]:
    """A worker's compute order with a fetch of each micro-batch that has time to leave.

    One whose backward follows too soon stays; so does one that is recomputed, whose first graph is
    dropped.
    """
    again = {(a.stage, a.microbatch) for a in order if a.kind is Kind.RECOMPUTE}
    forwards: dict[tuple[int, int], int] = {}
    of_stage: dict[int, list[int]] = {}
    before: dict[int, list[Action]] = {}
    for place, (kind, stage, m, _) in enumerate(order):
        of_stage.setdefault(stage, []).append(place)
        if kind is Kind.FORWARD:
            forwards[stage, m] = len(of_stage[stage])
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and (stage, m) not in again:
            following = of_stage[stage][forwards[stage, m]]
            if following < place - 1:
                before.setdefault(place - 1, []).append(Action(Kind.FETCH, stage, m))
    return [one for place, a in enumerate(order) for one in (*before.get(place, ()), a)]
