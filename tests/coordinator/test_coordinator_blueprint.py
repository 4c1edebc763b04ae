"""The division of a model into stages, and its errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeworker.coordinator.waiting import State
from pipeworker.facts.connections import Borrowed, Cached, Existing, SharedBuffer, Skip, Tie
from pipeworker.facts.failure import Cause
from pipeworker.plan.actions import COMPUTE, Kind
from pipeworker.wire.messages.plan import Described, Plan, StageRange
from support.pure.coordinator import BATCH, LAYERS, ScriptedJob, ready_of, sent_to


def test_a_specified_balance_is_used() -> None:
    job = ScriptedJob(2, balance=(1, 4)).described()
    ranges = [r for rank in (0, 1) for plan in job.sent(rank, Plan) for r in plan.ranges]
    assert ranges == [StageRange(0, 0, 1), StageRange(1, 1, 5)]


@pytest.mark.parametrize(
    ("options", "layers", "why"),
    [
        ({"workers": 3}, LAYERS[:2], "model(), 2; use --stages 2"),
        ({"balance": (1, 2)}, LAYERS, "adds up to 3 layers"),
    ],
    ids=str,
)
def test_a_job_that_cannot_be_planned_is_a_usage_error(
    options: dict[str, Any], layers: tuple[str, ...], why: str
) -> None:
    job = ScriptedJob(**options)
    job.join()
    job.describe(layers)
    assert job.failure.cause is Cause.USAGE
    assert job.ended.exit_status == 2
    assert why in job.failure.message


def test_the_plan_has_the_number_of_steps_if_it_is_known() -> None:
    job = ScriptedJob(2, steps=None, epochs=3, accumulate=2)
    job.join()
    job.receive(Described(0, LAYERS, (), epoch_length=5))
    job.receive(Described(1, LAYERS, ()))
    assert [plan.steps for rank in (0, 1) for plan in job.sent(rank, Plan)] == [9, 9]


def test_workers_must_build_the_same_model() -> None:
    job = ScriptedJob(2)
    job.join()
    job.receive(Described(0, LAYERS, ()))
    job.receive(Described(1, LAYERS[:4], ()))
    assert "different workers built different layers" in job.failure.message
    assert job.ended.exit_status == 2


def test_a_tied_weight_is_recorded_under_names_that_hold_dots() -> None:
    job = ScriptedJob(2, balance=(3, 2))
    job.join()
    names = ("model.embed", "model.layers.0", "model.layers.1", "model.layers.1.norm", "lm_head")
    ties = (Tie(("0.weight", "4.weight"), ()), Tie(("2.a.b", "3.b"), ()))
    for rank in (0, 1):
        job.receive(Described(rank, LAYERS, (), ties, names=names))
    assert job.job.generation.blueprint
    named = job.job.generation.blueprint.names.of_numbered
    assert [tuple(map(named, tie.names)) for tie in ties] == [
        ("model.embed.weight", "lm_head.weight"),
        ("model.layers.1.a.b", "model.layers.1.norm.b"),
    ]


def test_skips_and_ties_are_planned_between_stages() -> None:
    job = ScriptedJob(2, balance=(3, 2))
    job.join()
    job.receive(
        Described(
            0,
            LAYERS,
            (Skip(0, 4, "x"), Skip(0, 1, "y")),
            (Tie(("0.weight", "4.weight"), ()), Tie(("1.bias", "2.bias"), ())),
        )
    )
    effects = job.receive(Described(1, LAYERS, ()))
    (first,), (second,) = (sent_to(effects, rank) for rank in (0, 1))
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert first.skips == (Skip(0, 0, "y"), Skip(0, 1, "x"))
    assert second.skips == (Skip(0, 1, "x"),)
    both = Tie(("0.weight", "4.weight"), (0, 1))
    assert first.ties == (both, Tie(("1.bias", "2.bias"), (0, 0)))
    assert second.ties == (both,)
    assert {"0>1/skip", "1>0/skip-gradient", "0>1/tied", "1>0/tied"} <= set(second.edges)


@pytest.mark.parametrize("balance", [None, (3, 2)])
def test_a_stage_has_all_layers_of_a_shared_buffer(balance: tuple[int, ...] | None) -> None:
    job = ScriptedJob(2, balance=balance)
    job.join()
    for rank in (0, 1):
        job.receive(Described(rank, LAYERS, (), shared_buffers=(SharedBuffer(1, 3),)))
    if balance:
        assert "put layers 1 to 3 on one stage" in job.failure.message
    else:
        assert job.job.generation.blueprint
        assert job.job.generation.blueprint.ranges == ((0, 4), (4, 5))


@pytest.mark.parametrize(
    ("balance", "shared", "message"),
    [
        ((3, 2), SharedBuffer(1, 3), "--balance 3,2: layer 1 "),
        (None, SharedBuffer(0, 4), "--stages 2: more than the parts of model(), 1, "),
    ],
)
def test_a_loop_of_the_users_can_show_that_no_forward_changes_a_buffer(
    balance: tuple[int, ...] | None, shared: SharedBuffer, message: str
) -> None:
    job = ScriptedJob(2, balance=balance, own_loop=True)
    job.join()
    for rank in (0, 1):
        job.receive(Described(rank, LAYERS, (), shared_buffers=(shared,)))
    assert job.failure.message.startswith(message)
    advice = ", or pass a sample to pipeworker.Pipeline if no forward changes the buffer"
    assert job.failure.message.endswith(advice)


def test_workers_must_have_the_same_initial_weights() -> None:
    job = ScriptedJob(2)
    job.join()
    job.receive(Described(0, LAYERS, (), weights=1))
    job.receive(Described(1, LAYERS, (), weights=2))
    assert "model: the initial weights differ from rank to rank" in job.failure.message
    assert job.failure.message.endswith("; a set of strings has another order in each process")
    assert job.ended.exit_status == 2


def build(job: ScriptedJob, *more: dict[str, Any]) -> None:
    """Let each worker build its stages, with more fields in its message."""
    for rank, fields in enumerate(more):
        (plan,) = job.sent(rank, Plan)
        job.receive(replace(ready_of(rank, plan, LAYERS, None if rank else BATCH), **fields))


@pytest.mark.parametrize("tied", [False, True])
def test_a_parameter_of_layers_on_two_workers_must_be_tied(tied: bool) -> None:
    ties = (Tie(("0.weight", "4.table")),) if tied else ()
    job = ScriptedJob(2)
    job.join()
    for rank in (0, 1):
        job.receive(Described(rank, LAYERS, (), ties=ties))
    names = ("0.weight", "4.table")
    own = [Existing(f"{3 * rank}.bias", f"of {rank}") for rank in (0, 1)]
    build(job, *({"existing": (own[rank], Existing(names[rank], "emb"))} for rank in (0, 1)))
    if tied:
        assert job.state() is State.STEPPING
    else:
        assert job.failure.message.startswith("layers 0 and 4: were built with one parameter")
        assert job.ended.exit_status == 2


@pytest.mark.parametrize("numbers", [5, 6])
def test_a_function_that_keeps_parameters_must_build_the_same_everywhere(numbers: int) -> None:
    job = ScriptedJob(2).described()
    build(job, *({"cached": (Cached("way", "net", number),)} for number in (5, numbers)))
    if numbers == 5:
        assert job.state() is State.STEPPING
    else:
        assert job.failure.message.startswith("net() of the job: keeps parameters")
        assert job.ended.exit_status == 2


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_use_of_a_parameter_that_another_worker_has_is_an_error(elsewhere: bool) -> None:
    job = ScriptedJob(2).described()
    own = [Existing(f"{4 * rank}.weight", f"of {rank}") for rank in (0, 1)]
    build(job, *({"existing": (one,)} for one in own))
    job.done(0, 1)
    used = [Borrowed("layer 4 (Linear)", 4, f"of {what}") for what in ("none", "1", "0")]
    job.done(1, 1, borrowed=tuple(used if elsewhere else used[:2]))
    if not elsewhere:
        assert job.state() is State.STEPPING
    else:
        expected = "layer 4 (Linear): uses the parameter 0.weight of another layer"
        assert job.failure.message.startswith(expected)
        assert job.ended.exit_status == 2


def test_stages_whose_layers_are_all_frozen_have_no_needless_backward() -> None:
    """On one worker a layer is built later, so it may have something to train."""
    job = ScriptedJob(3, balance=(2, 1, 2))
    job.join()
    for rank, frozen in enumerate([(0, 1, 2, 4), (0, 1, 2), (0, 1, 2, 3, 4)]):
        effects = job.receive(Described(rank, LAYERS, (), frozen=frozen))
    blueprint = job.job.generation.blueprint
    assert blueprint
    assert blueprint.frozen == (0, 1)
    schedule, kept = blueprint.for_replica(4, 0)
    kinds = [{action.kind for action in actions} & COMPUTE for actions in schedule.workers]
    assert kinds[0] == kinds[1] == {Kind.FORWARD}
    assert Kind.BACKWARD in kinds[2]
    assert kept.inputs == (1, 1, 4)
    (plan,) = sent_to(effects, 1)
    assert isinstance(plan, Plan)
    assert {"2>1/gradient", "1>0/gradient"} <= {*plan.edges}  # results of an own loop use them


def test_types_that_all_workers_know_are_numbered() -> None:
    job = ScriptedJob(2)
    job.join()
    job.receive(Described(0, LAYERS, (), types=("job.B", "job.C", "job.A")))
    effects = job.receive(Described(1, LAYERS, (), types=("job.A", "job.B", "lib.D")))
    for rank in (0, 1):
        (plan,) = sent_to(effects, rank)
        assert isinstance(plan, Plan)
        assert plan.types == ("job.A", "job.B")
