"""Facts of layers: dealt out, put together, and kept; and the state in which a job finds them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipeworker.coordinator.effects import KeepFacts, Log, WritePlan
from pipeworker.coordinator.measuring import Measuring, deal
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.layer_facts import LayerFacts, LayerSkip, NetworkFacts
from pipeworker.facts.outline import LayerKind, Machine, Outline
from pipeworker.plan.placement import Placement
from pipeworker.wire.lines import Restart, Warned
from pipeworker.wire.messages.plan import Described, Plan
from pipeworker.wire.messages.presence import Abort, Failed
from pipeworker.wire.messages.profile import Measure, Measured
from support.pure.coordinator import LAYERS, MACHINE, ScriptedJob, of
from support.pure.coordinator import OUTLINE as JOB_OUTLINE
from support.pure.measured_job import facts, measure, measured_job

PLACEMENT = Placement.identity(3)
CPU = Machine("a processor", "", 3000, 50)
HOSTS = ("host",) * 3


def kind(number: int, layer: int | None = None, **more: Any) -> LayerKind:
    return LayerKind(f"kind {number}", number if layer is None else layer, b"signature", **more)


OUTLINE = Outline(
    kinds=(kind(0), kind(1), kind(2), kind(3, 6)),
    of_layer=(0, 1, 2, 1, 2, 1),
    loss=3,
    types=("torch.Size",),
    samples=4,
    batch_samples=15,
    input_bytes=64,
    target_bytes=8,
    skips=(LayerSkip(0, 4, 12),),
    ties=(LayerSkip(0, 5, 40),),
)


def measuring(outline: Outline | None = OUTLINE, **more: Any) -> Measuring:
    found: dict[str, Any] = {"machines": (CPU,) * 3, "hosts": HOSTS, "known": {}, **more}
    return Measuring(PLACEMENT, outline=outline, **found)


def answer(found: Measuring, rank: int, request: Measure, seconds: float = 1.0) -> None:
    kinds = request.kinds
    digests = tuple(one.digest for one in kinds)
    reference = seconds if request.reference else 0.0
    measured = tuple(facts(one.layer, seconds) for one in kinds)
    found.add(Measured(rank, digests, measured, reference=reference))


def test_unlike_layers_are_measured_once_by_as_many_workers_as_there_are() -> None:
    found = measuring()
    requests = found.requests()
    assert {rank: [one.layer for one in r.kinds] for rank, r in requests.items()} == {
        0: [0, 6],
        1: [1],
        2: [2],
    }
    assert all(r.types == OUTLINE.types and not r.reference for r in requests.values())
    for rank, request in requests.items():
        answer(found, rank, request)
    found.close_round()
    assert found.requests() == {}
    assert found.facts() == NetworkFacts(
        layers=tuple(facts(n) for n in OUTLINE.of_layer),
        input_bytes=64,
        target_bytes=8,
        loss=1.0,
        skips=OUTLINE.skips,
        ties=OUTLINE.ties,
        samples=4,
        batch_samples=15,
        speeds=(1.0, 1.0, 1.0),
        limits=(1000, 1000, 1000),  # a host's memory, which three workers share
        base_bytes=50,
        latency=60e-6,
        seconds_per_byte=1 / 4e9,
        handling=100e-6,
        maps_frames=True,
        updates_at_once=False,
        device="a processor",
    )
    assert found.fresh.keys() == {one.digest for one in OUTLINE.kinds}
    assert found.summary(0.314) == "measured 3 unlike layers of 6 in 0.31 s"


@pytest.mark.parametrize("count", [1, 5, 48])
def test_kinds_are_dealt_out_evenly(count: int) -> None:
    kinds = [kind(layer) for layer in range(count)]
    dealt = deal(kinds, 48, Placement.identity(8))
    assert sorted(one.layer for kinds in dealt.values() for one in kinds) == list(range(count))
    assert kind(0) in dealt[0]
    sizes = [len(kinds) for kinds in dealt.values()]
    assert max(sizes) - min(sizes) <= 1


def test_what_earlier_jobs_measured_is_not_measured() -> None:
    found = measuring(known={one.digest: facts(one.layer) for one in OUTLINE.kinds[:2]})
    assert {r: [k.layer for k in m.kinds] for r, m in found.requests().items()} == {0: [6], 1: [2]}
    found = measuring(known={one.digest: facts(one.layer) for one in OUTLINE.kinds})
    assert found.requests() == {}
    assert found.facts() is not None
    assert found.fresh == {}
    assert found.summary(0.0) == "the facts of all 6 layers are known from an earlier job"


def test_a_network_without_outline_is_run_in_order_by_the_worker_with_the_data() -> None:
    found = measuring(None)
    assert found.requests() == {0: Measure(in_order=True)}
    digests = tuple(one.digest for one in OUTLINE.kinds)
    found.add(Measured(0, digests, tuple(map(facts, range(4))), OUTLINE))
    found.close_round()
    assert found.requests() == {}
    network = found.facts()
    assert network
    assert [one.kind for one in network.layers[:3]] == ["Layer0", "Layer1", "Layer2"]


def test_a_kind_that_raises_on_a_made_up_input_is_measured_in_order() -> None:
    found = measuring()
    requests = found.requests()
    answer(found, 0, requests[0])
    found.add(Measured(1, problem="layer 1: IndexError: no"))
    answer(found, 2, requests[2])
    found.close_round()
    assert found.requests() == {0: Measure(in_order=True)}
    found.add(Measured(0, ("kind 1",), (facts(1),), OUTLINE))
    found.close_round()
    assert found.requests() == {}
    assert found.facts() is not None
    assert found.warning == ""


@pytest.mark.parametrize("outline", [None, OUTLINE])
def test_layers_that_cannot_be_measured_end_nothing(outline: Outline | None) -> None:
    found = measuring(outline)
    for _ in range(2):
        for rank in found.requests():
            found.add(Measured(rank, problem="layer 1: IndexError: no"))
        found.close_round()
    assert found.requests() == {}
    assert found.facts() is None
    text = "layers cannot be measured: layer 1: IndexError: no; they are divided evenly"
    assert found.summary(1.0) == text


def test_a_network_without_an_outline_cannot_be_counted() -> None:
    found = measuring(None, counted=True)
    assert found.requests() == {}
    text = "layers cannot be counted: they cannot be run on fake tensors; they are divided evenly"
    assert found.summary(1.0) == text
    found = measuring(None, counted=True, problem="layer 1 (Up) raised ValueError: no")
    assert "on fake tensors: layer 1 (Up) raised ValueError: no; they" in found.summary(1.0)


def test_seconds_are_those_of_the_worker_with_the_data() -> None:
    fast = Machine("another", "", 3000, 70)
    found = measuring(machines=(CPU, CPU, fast), hosts=("a", "a", "b"))
    requests = found.requests()
    assert all(request.reference for request in requests.values())
    answer(found, 0, requests[0], 1.0)
    answer(found, 1, requests[1], 1.0)
    answer(found, 2, requests[2], 0.25)  # four times as fast
    found.close_round()
    assert found.requests() == {}
    network = found.facts()
    assert network
    assert network.speeds == (1.0, 1.0, 4.0)
    assert {one.forward for one in network.layers} == {1.0}
    assert {one.backward for one in network.layers} == {2.0}
    assert network.limits == (1500, 1500, 3000)
    assert network.base_bytes == 70
    assert (network.latency, network.seconds_per_byte) == (150e-6, 1e-9)


@pytest.mark.parametrize(("seconds", "speed"), [(0.25, 4.0), (0.95, 1.0), (0.0, 1.0)])
def test_unlike_workers_are_compared_where_the_layers_run_in_order(
    seconds: float, speed: float
) -> None:
    """A small difference is one of the measurement, as that of the two equal workers."""
    fast = Machine("another", "", 3000, 70)
    found = measuring(None, machines=(CPU, CPU, fast))
    first = Measure(in_order=True, reference=True)
    assert found.requests() == {0: first, 1: Measure(reference=True), 2: Measure(reference=True)}
    digests = tuple(kind.digest for kind in OUTLINE.kinds)
    layers = tuple(facts(kind.layer) for kind in OUTLINE.kinds)
    found.add(Measured(0, digests, layers, outline=OUTLINE, reference=1.0))
    for rank, reference in ((1, 2.0), (2, seconds)):
        found.add(Measured(rank, reference=reference))
    found.close_round()
    assert found.requests() == {}
    network = found.facts()
    assert network
    assert network.speeds == (1.0, 1.0, speed)


def test_a_loss_that_cannot_be_measured_costs_nothing_and_the_layers_are_planned() -> None:
    job = measured_job()
    for rank in job.ranks:
        (request,) = job.sent(rank, Measure)
        own = [one for one in request.kinds if one.layer < len(LAYERS)]
        found = tuple(facts(one.layer) for one in own)
        job.receive(Measured(rank, tuple(one.digest for one in own), found, problem="loss(): no"))
    assert job.sent(0, Measure)[-1] == Measure(in_order=True)  # with what the last layer returns
    job.receive(Measured(0, outline=JOB_OUTLINE, problem="loss(): no"))
    network = job.job.progress.facts
    assert network is not None
    assert network.loss == network.loss_saved_bytes == 0
    assert [layer.forward for layer in network.layers] == [1.0] * len(LAYERS)
    job.ready()
    assert not of(job.effects, Warned)
    job.step(1)
    job.step(2)
    (warned,) = of(job.effects, Warned)
    assert warned.text == "loss() cannot be measured, and the plan counts it as 0 s: loss(): no"


def test_the_loss_has_bytes_too() -> None:
    loss = LayerFacts("loss", forward=1.0, saved_bytes=3, saved_input_bytes=4, working_bytes=5)
    known = {one.digest: facts(one.layer) for one in OUTLINE.kinds[:3]}
    network = measuring(known={**known, OUTLINE.kinds[3].digest: loss}).facts()
    assert network
    sizes = network.loss_saved_bytes, network.loss_saved_input_bytes, network.loss_working_bytes
    assert (network.loss, *sizes) == (1.0, 3, 4, 5)
    # Without a measurement the loss counts as one that keeps as much as the last output has.
    counted = dataclasses.replace(facts(1), output_bytes=7)
    kinds = tuple(dataclasses.replace(k, counted=counted) for k in OUTLINE.kinds[:3])
    outline = dataclasses.replace(OUTLINE, kinds=(*kinds, OUTLINE.kinds[3]))
    network = measuring(outline, counted=True).facts()
    assert network
    assert (network.loss_saved_bytes, network.loss_working_bytes) == (7, 7)


@pytest.mark.parametrize(
    ("unit", "hosts", "copies", "maps"),
    [
        ("", HOSTS, 2, True),
        ("", ("a", "a", "b"), 2, False),
        ("a device", HOSTS, 0, False),
    ],
)
def test_hosts_keep_snapshots_and_frames(
    unit: str, hosts: tuple[str, ...], copies: int, maps: bool
) -> None:
    known = {one.digest: facts(one.layer) for one in OUTLINE.kinds}
    machine = dataclasses.replace(CPU, unit=unit)
    machines = (machine,) * 3
    network = measuring(known=known, machines=machines, hosts=hosts, slots=2, frozen=(1,)).facts()
    assert network
    assert network.frozen == (1,)
    assert (network.copies, network.maps_frames) == (copies, maps)
    assert network.updates_at_once is bool(unit)


def test_counts_take_the_place_of_seconds() -> None:
    kinds = tuple(dataclasses.replace(k, counted=facts(k.layer, 1e6)) for k in OUTLINE.kinds[:3])
    outline = dataclasses.replace(OUTLINE, kinds=(*kinds, OUTLINE.kinds[3]))
    found = measuring(outline, counted=True)
    assert found.requests() == {}
    network = found.facts()
    assert network
    assert not network.measured
    assert network.layers[1].forward == 1e6
    assert found.fresh == {}
    assert found.summary(1.0) == "counted the operations of 3 unlike layers of 6"
    assert measuring(OUTLINE, counted=True).facts() is None  # one could not be counted


# In a job.


def test_a_job_measures_before_it_builds() -> None:
    job = measured_job()
    assert job.state() is State.MEASURING
    assert not of(job.effects, KeepFacts)
    measure(job)
    assert job.state() is State.BUILDING
    assert all(job.sent(rank, Plan) for rank in job.ranks)
    (kept,) = of(job.effects, KeepFacts)
    assert kept.facts.keys() == {"kind 0", "kind 1", "kind 2"}
    assert any("measured 2 unlike layers of 5" in log.text for log in of(job.effects, Log))
    job.ready()
    (written,) = of(job.effects, WritePlan)
    assert [one["kind"] for one in written.content["facts"]["layers"]] == [
        "Layer0",
        *["Layer1"] * 4,
    ]


def test_known_facts_are_not_measured() -> None:
    known = {one.digest: facts(one.layer) for one in JOB_OUTLINE.kinds}
    job = measured_job(start=Start(known={**known, "other": facts(9)}))
    assert job.state() is State.BUILDING
    assert not of(job.effects, KeepFacts)
    assert job.job.progress.facts


def test_a_run_that_is_resumed_keeps_its_facts() -> None:
    network = NetworkFacts((facts(3),) * len(LAYERS))
    job = measured_job(start=Start(facts=network))
    assert job.state() is State.BUILDING
    assert job.job.progress.facts == network
    job = measured_job(start=Start(facts=NetworkFacts((facts(3),) * 2)))  # of another model
    assert job.state() is State.MEASURING


def test_later_generations_do_not_measure_again() -> None:
    job = measured_job(replaceable=True)
    measure(job)
    job.ready()
    job.exited(1, -9)
    assert of(job.effects, Restart)
    job.described()
    assert job.state() is State.BUILDING


def test_a_worker_that_is_lost_while_it_measures_is_replaced() -> None:
    job = measured_job(replaceable=True)
    job.exited(1, -9)
    assert of(job.effects, Restart)
    job.described()
    assert job.state() is State.MEASURING
    measure(job)
    assert job.state() is State.BUILDING


def test_an_interrupt_ends_the_measuring_at_once() -> None:
    job = measured_job()
    job.interrupt()
    assert job.ended.exit_status == 130
    assert all(job.sent(rank, Abort) for rank in job.ranks)


def test_an_own_loop_measures_nothing() -> None:
    """Its input is not known before its first call."""
    job = ScriptedJob(2, balance=None, own_loop=True).described()
    assert job.state() is State.BUILDING


def test_facts_that_nobody_asked_for_name_their_sender() -> None:
    job = measured_job()
    job.receive(Measured(1, ("kind 1",), (facts(1),)))
    assert job.state() is State.MEASURING
    job.receive(Measured(1))
    assert job.failure.cause is Cause.INTERNAL
    assert "facts that it was not asked for" in job.failure.message
    for rank, outline in ((1, JOB_OUTLINE), (0, OUTLINE)):
        job = measured_job()
        job.receive(Measured(rank, outline=outline))
        assert "an outline of" in job.failure.message


def test_without_the_option_nothing_is_measured() -> None:
    job = ScriptedJob(2, recompute="always")
    job.join()
    for rank in job.ranks:
        job.receive(Described(rank, LAYERS, (), machine=MACHINE))
    assert job.state() is State.BUILDING
    assert job.job.progress.facts is None


def test_a_job_whose_layers_cannot_be_measured_runs_and_says_so_after_a_step() -> None:
    job = measured_job()
    for rank in job.ranks:
        job.receive(Measured(rank, problem="layer 2 is too large"))
    job.receive(Measured(0, problem="layer 2 is too large"))  # in order, which it is asked for next
    text = "layers cannot be measured: layer 2 is too large; they are divided evenly"
    assert text in [log.text for log in of(job.effects, Log)]
    assert job.state() is State.BUILDING
    job.ready()
    assert not of(job.effects, Warned)
    job.step(1)
    job.step(2)
    (note,) = of(job.effects, Warned)
    assert note.note
    assert note.text == text


def test_layers_that_raise_in_a_step_too_give_one_error() -> None:
    job = measured_job()
    for rank in job.ranks:
        job.receive(Measured(rank, problem="layer 2 (Bad) raised ValueError: no"))
    job.receive(Measured(0, problem="layer 2 (Bad) raised ValueError: no"))
    job.ready()
    job.receive(Failed(1, Failure(Cause.USER, "layer 2 (Bad) raised ValueError: no")))
    assert job.ended.status == "failed"
    assert not of(job.effects, Warned)


# A job that only finds facts.


def test_a_job_that_is_only_planned_ends_with_its_facts() -> None:
    job = measured_job(plan_only=True)
    measure(job)
    (written,) = of(job.effects, WritePlan)
    assert written.content.keys() == {"facts"}
    assert len(written.content["facts"]["layers"]) == len(LAYERS)
    assert (job.ended.status, job.ended.exit_status, job.ended.steps) == ("done", 0, 0)
    assert not any(job.sent(rank, Plan) for rank in job.ranks)


def test_layers_that_cannot_be_measured_end_a_job_that_is_only_planned() -> None:
    job = measured_job(plan_only=True)
    for rank in job.ranks:
        job.receive(Measured(rank, problem="layer 2 is too large"))
    job.receive(Measured(0, problem="layer 2 is too large"))  # in order, which it is asked for next
    assert job.failure.cause is Cause.USAGE
    assert "model(): its layers cannot be measured: layer 2 is too large" in job.failure.message
    assert not of(job.effects, WritePlan)
