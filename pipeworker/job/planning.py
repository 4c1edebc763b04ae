"""The plan of a job, from its options and the facts of its layers. Pure."""

from __future__ import annotations

from dataclasses import replace

from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.job.options import Options
from pipeworker.plan.orders import AUTO
from pipeworker.plan.planned import Planned
from pipeworker.plan.planner.choices import PlanRequest, plan_request


def request_of(options: Options) -> PlanRequest:
    """Return what the options of a job ask of its plan."""
    return PlanRequest(
        options.schedule,
        options.stages,
        options.microbatches,
        options.recompute,
        options.balance,
        options.virtual_stages,
        options.replicas,
        options.shard_optimizer,
    )


def limited(facts: NetworkFacts, options: Options) -> NetworkFacts:
    """Return the facts with the limits of ``--memory``, if it is given, of a replica's workers."""
    if options.memory is None:
        return facts
    each = len(options.memory) == 1
    return replace(facts, limits=options.memory * (options.stages if each else 1))


def plan_run(
    facts: NetworkFacts, options: Options, balance: tuple[int, ...], schedule: str
) -> Planned:
    """Return the plan of a run, made again for its balance; raises as :func:`plan_job`.

    `schedule` is the text of the one that it has, which ``--schedule auto`` has found.
    """
    if options.schedule == AUTO:
        options = replace(options, schedule=schedule)
    return plan_job(facts, replace(options, balance=balance))


def plan_job(facts: NetworkFacts, options: Options) -> Planned:
    """Return the plan of a job.

    A plan that exceeds what the devices seem to have says so (:attr:`Planned.lacking`); one that
    exceeds ``--memory`` is an error.

    Raises:
        UsageError: no plan fits into the given memory, or the options do not fit the network.
    """
    strict = options.memory is not None
    return plan_request(limited(facts, options), request_of(options), strict=strict)
