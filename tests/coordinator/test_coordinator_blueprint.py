"""How a model is divided, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from pipeworker.wire.messages.failure import Cause
from pipeworker.wire.messages.plan import Described, Plan, SkipRoute, StageRange, TiedWeights
from support.coordinator import LAYERS, Scripted, sent_to


def test_a_given_balance_is_used() -> None:
    job = Scripted(2, balance=(1, 4))
    job.join()
    job.describe()
    ranges = [r for rank in (0, 1) for plan in job.sent(rank, Plan) for r in plan.ranges]
    assert ranges == [StageRange(0, 0, 1), StageRange(1, 1, 5)]


@pytest.mark.parametrize(
    ("options", "layers", "why"),
    [
        ({"workers": 3}, LAYERS[:2], "model() has 2: use --stages 2"),
        ({"balance": (1, 2)}, LAYERS, "adds up to 3 layers"),
    ],
    ids=str,
)
def test_a_job_that_cannot_be_planned_is_the_users_mistake(
    options: dict[str, Any], layers: tuple[str, ...], why: str
) -> None:
    job = Scripted(**options)
    job.join()
    job.describe(layers)
    assert job.failure.cause is Cause.USAGE
    assert job.ended.exit_status == 2
    assert why in job.failure.message


def test_workers_must_agree_on_the_model() -> None:
    job = Scripted(2)
    job.join()
    job.says(Described(0, LAYERS, ()))
    job.says(Described(1, LAYERS[:4], ()))
    assert "different layers on different workers" in job.failure.message
    assert job.ended.exit_status == 2


def test_skips_and_ties_are_planned_between_stages() -> None:
    job = Scripted(2, balance=(3, 2))
    job.join()
    job.says(
        Described(
            0,
            LAYERS,
            (SkipRoute(0, 4, "x"), SkipRoute(0, 1, "y")),
            (TiedWeights(("0.weight", "4.weight"), ()), TiedWeights(("1.bias", "2.bias"), ())),
        )
    )
    effects = job.says(Described(1, LAYERS, ()))
    (first,), (second,) = (sent_to(effects, rank) for rank in (0, 1))
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert first.skips == (SkipRoute(0, 0, "y"), SkipRoute(0, 1, "x"))
    assert second.skips == (SkipRoute(0, 1, "x"),)
    both = TiedWeights(("0.weight", "4.weight"), (0, 1))
    assert first.ties == (both, TiedWeights(("1.bias", "2.bias"), (0, 0)))
    assert second.ties == (both,)
    assert {"0>1/skip", "1>0/skip-gradient", "0>1/tied", "1>0/tied"} <= set(second.edges)


def test_workers_must_agree_on_the_weights() -> None:
    job = Scripted(2)
    job.join()
    job.says(Described(0, LAYERS, (), weights=1))
    job.says(Described(1, LAYERS, (), weights=2))
    assert "the model's initial weights differ from rank to rank" in job.failure.message
    assert job.ended.exit_status == 2


def test_the_types_that_all_workers_know_get_their_numbers() -> None:
    job = Scripted(2)
    job.join()
    job.says(Described(0, LAYERS, (), types=("job.B", "job.C", "job.A")))
    effects = job.says(Described(1, LAYERS, (), types=("job.A", "job.B", "lib.D")))
    for rank in (0, 1):
        (plan,) = sent_to(effects, rank)
        assert isinstance(plan, Plan)
        assert plan.types == ("job.A", "job.B")
