"""A scripted job whose workers measure the layers."""

from __future__ import annotations

from typing import Any

from pipeworker.facts.layer_facts import LayerFacts
from pipeworker.wire.messages.profile import Measure, Measured
from support.pure.coordinator import ScriptedJob


def facts(number: int, seconds: float = 1.0) -> LayerFacts:
    """Return the facts of a layer of a class of that number."""
    return LayerFacts(
        f"Layer{number}", forward=seconds, backward=2 * seconds, backward_input=seconds
    )


def measured_job(**options: Any) -> ScriptedJob:
    """Return a job of two workers that have described the model, and balance it by its facts."""
    return ScriptedJob(2, **{"balance": None, **options}).described()


def measure(job: ScriptedJob) -> None:
    """Answer the requests of the coordinator with the facts of all kinds of layers."""
    for rank in job.ranks:
        (request,) = job.sent(rank, Measure)[-1:]
        digests = tuple(one.digest for one in request.kinds)
        job.receive(Measured(rank, digests, tuple(facts(one.layer) for one in request.kinds)))
