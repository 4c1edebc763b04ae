"""Advice: the change of a run that would make its steps shortest, with the predicted gain. Pure.

The planner plans the run again from measured costs: with another balance, another schedule, more
micro-batches. What a plan saves by simulation is taken from the measured time of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeworker.errors import PipeworkerError
from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.plan.orders import AUTO, ORDERS
from pipeworker.plan.planned import Planned
from pipeworker.plan.planner.choices import PlanRequest, for_workers, plan_request
from pipeworker.plan.planner.costs import LOSS_FORWARD, LayerCosts, Range
from pipeworker.plan.simulate import Costs
from pipeworker.plan.text import is_text
from pipeworker.trace.causes import DATA, FILL_DRAIN, RECOVERY, Breakdown

LEAST = 1.02
"""The least gain that is worth a change."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and how many times as fast a step would be; no `option` if none is known."""

    text: str
    option: str = ""
    gain: float = 1.0


def measured_facts(
    facts: NetworkFacts | None, ranges: Sequence[Range], owners: Sequence[int], costs: Costs
) -> NetworkFacts:
    """Return the facts of a network whose stages take what was measured.

    Within a stage the layers share its seconds as they do by `facts`; evenly without facts, and the
    gradient of the input then takes half of a backward that was not split. What was not measured
    stays as it is in `facts`, or is 0 if these are counts of operations, which are no seconds.
    """
    layers: list[LayerFacts] = []
    if facts is None or len(facts.layers) != ranges[-1][1]:
        for stage, (first, stop) in enumerate(ranges):
            share = 1 / (stop - first)
            backward_input = costs.backward_input[stage] or costs.backward[stage] / 2
            each = LayerFacts(
                "",
                forward=costs.forward[stage] * share,
                backward=costs.backward[stage] * share,
                backward_input=backward_input * share,
                passes_gradient=True,
            )
            layers += [each] * (stop - first)
        return NetworkFacts(tuple(layers))
    workers = 1 + max(owners)
    known, speeds = LayerCosts(facts), for_workers(facts, workers).speeds or (1.0,) * workers
    unmeasured = 1.0 if facts.measured else 0.0
    for stage, (first, stop) in enumerate(ranges):
        predicted = known.seconds((first, stop), speeds[owners[stage]])
        forward = _ratio(costs.forward[stage], predicted.forward, unmeasured)
        backward = _ratio(costs.backward[stage], predicted.backward, unmeasured)
        layers += [
            replace(
                layer,
                forward=layer.forward * forward,
                backward=layer.backward * backward,
                backward_input=layer.backward_input * backward,
                update=layer.update * unmeasured,
            )
            for layer in facts.layers[first:stop]
        ]
    loss = facts.loss * (LOSS_FORWARD * forward + (1 - LOSS_FORWARD) * backward)  # the last stage's
    return replace(facts, layers=tuple(layers), loss=loss)


def _ratio(measured: float, predicted: float, unmeasured: float) -> float:
    return measured / predicted if measured > 0 and predicted > 0 else unmeasured


def advise(
    facts: NetworkFacts,
    request: PlanRequest,
    balance: Sequence[int],
    found: Breakdown,
    mini_batches: int,
    *,
    known: bool = True,
) -> Advice:
    """Return the change that would help most.

    Args:
        facts: as :func:`measured_facts` returns them.
        request: what the run was asked for.
        balance: the layers of its stages.
        found: where the time went.
        mini_batches: the number of mini-batches that it went to.
        known: whether it is known how the layers share a stage's seconds.
    """
    # What a recovery or a suspension took is no part of a step.
    seconds = found.seconds - found.suspended - found.workers[0].idle[RECOVERY]
    took = seconds / mini_batches
    now = None
    if request.schedule != AUTO:  # which has compared balances and schedules
        now = _plan(facts, replace(request, balance=tuple(balance)))
    share = found.mean[FILL_DRAIN] / seconds
    candidates = [] if now is None else [*_replanned(facts, request, now, took, share, known)]
    data = max(time.idle[DATA] for time in found.workers) / mini_batches  # of a reader
    if took > data > 0:
        gain = took / (took - data)
        text = (
            f"data() takes {data / took:.0%} of a step, while nothing computes: without that time "
            f"the rate would be {gain:.2f} times as high"
        )
        candidates.append(Advice(text, "", gain))
    best = max(candidates, key=lambda advice: advice.gain, default=None)
    if best is None or best.gain < LEAST:
        return Advice(f"no change is known that would make a step {LEAST - 1:.0%} faster")
    return best


def _replanned(
    facts: NetworkFacts, request: PlanRequest, now: Planned, took: float, lost: float, known: bool
) -> Iterator[Advice]:
    """Yield other plans; a mini-batch took some seconds, and fill and drain a share of these."""

    def gain(planned: Planned) -> float:
        saved = min(now.step_seconds - planned.step_seconds, 0.99 * took)
        return took / (took - saved)

    balanced = _fitting(facts, replace(request, balance=None))
    if balanced is not None and balanced.balance != now.balance:
        option = f"--balance {','.join(map(str, balanced.balance))}"
        faster = gain(balanced)
        text = f"{_slowest(now)}: {option} would give {faster:.2f} times the rate"
        text += "" if known else ", if the layers of each stage take equally long"
        yield Advice(text, option, faster)
    if is_text(request.schedule):
        return
    for name in ORDERS:
        if name == request.schedule:
            continue
        planned = _fitting(facts, replace(request, schedule=name, virtual_stages=None))
        if planned is not None:
            option = f"--schedule {name}"
            if request.virtual_stages is not None:  # the command line has one for its schedule
                option += f" --virtual-stages {ORDERS[name].virtual_stages}"
            faster = gain(planned)
            reason = f"fill and drain of the schedule take {lost:.0%} of a step"
            if faster * (1 - lost) > LEAST:  # its stages are more even too
                reason = _slowest(now)
            text = f"{reason}: {option} would give {faster:.2f} times the rate"
            yield Advice(text, option, faster)


def _plan(facts: NetworkFacts, request: PlanRequest) -> Planned | None:
    try:
        return plan_request(facts, request)
    except PipeworkerError:  # too few layers, or micro-batches
        return None


def _fitting(facts: NetworkFacts, request: PlanRequest) -> Planned | None:
    planned = _plan(facts, request)
    return planned if planned is not None and planned.fits else None


def _slowest(now: Planned) -> str:
    """Return which worker computes the longest, in words."""
    times = [seconds.total for seconds in now.stage_seconds]
    held = now.schedule.placement.held
    by_worker = [sum(times[stage] for stage in stages) for stages in held]
    mean = sum(by_worker) / len(by_worker)
    worker = max(range(len(held)), key=by_worker.__getitem__)
    stages = held[worker]
    name = f"stage {stages[0]}" if len(stages) == 1 else f"worker {worker}"
    return f"{name} takes {by_worker[worker] / mean - 1:.0%} longer than the mean"
