"""The plan of a job, from its options and the facts of its layers. Pure."""

from __future__ import annotations

from dataclasses import replace

from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.job.options import Options
from pipeworker.plan.orders import AUTO, resolve
from pipeworker.plan.planned import Planned
from pipeworker.plan.planner.choices import PlanRequest, plan_request
from pipeworker.plan.recompute import OFFLOAD


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

    `schedule` is the text of the one that it has, which ``--schedule auto`` has found. The text has
    an R for each recomputed micro-batch, and no more micro-batches than the mini-batch had samples.
    """
    request = replace(request_of(options), balance=balance)
    if options.schedule == AUTO:
        count = (resolve(schedule).microbatches or 0) * options.replicas
        mode = OFFLOAD if options.recompute == OFFLOAD else "auto"
        request = replace(request, schedule=schedule, microbatches=count, recompute=mode)
    return _plan(facts, options, request)


def plan_job(facts: NetworkFacts, options: Options) -> Planned:
    """Return the plan of a job.

    A plan that exceeds what the devices seem to have says so (:attr:`Planned.lacking`); one that
    exceeds ``--memory`` is an error.

    Raises:
        UsageError: no plan fits into the given memory, or the options do not fit the network.
    """
    return _plan(facts, options, request_of(options))


def _plan(facts: NetworkFacts, options: Options, request: PlanRequest) -> Planned:
    strict = options.memory is not None
    return plan_request(limited(facts, options), request, strict=strict)
