"""The simulator: durations of steps, busy stages and idle workers."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import RECEIVES, SENDS, Action, Edge, Kind, Payload, edge_of
from pipeworker.plan.check import check
from pipeworker.plan.connect import connect, forward_only
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Schedule, is_bounded
from pipeworker.plan.simulate import END, FULL, HANDLING, Costs, Timing, simulate, timeline
from pipeworker.plan.text import parse
from support.pure.orders import build, fill_drain
from support.slow import slow

GRID = [(k, m) for k in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 16, 32)]
"""Stages and micro-batches, fewer micro-batches than stages included."""
V = Placement(((0, 3), (1, 2)))

few = st.integers(1, 7)
cost = st.integers(1, 9)


def ones(stages: int) -> Costs:
    """Return costs of 1 for forward and for each part of a split backward."""
    return Costs.even(stages, 1, 2)


# The bubbles of the papers.


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_gpipe_has_the_bubble_of_the_paper(stages: int, microbatches: int) -> None:
    timing = simulate(build("gpipe", stages, microbatches, "never"))
    assert timing.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert timing.makespan == 3 * (microbatches + stages - 1)
    assert timing.busy == (3 * microbatches,) * stages


@given(stages=few, microbatches=few, forward=cost, backward=cost)
def test_recompute_costs_only_its_forwards(
    stages: int, microbatches: int, forward: int, backward: int
) -> None:
    """Early recompute runs while gradients are awaited, so it costs M forwards and no more."""
    schedule = build("gpipe", stages, microbatches, "always")
    timing = simulate(schedule, Costs.even(stages, forward, backward))
    step = 2 * forward + backward
    assert timing.makespan == microbatches * step + (stages - 1) * (forward + backward)
    busy = stages * microbatches * step
    assert timing.bubble == pytest.approx(1 - busy / (stages * timing.makespan))


def test_except_first_is_one_forward_shorter() -> None:
    always, but_first = (build("gpipe", 2, 4, mode) for mode in ("always", "except_first"))
    assert simulate(always).makespan - simulate(but_first).makespan == 1.0


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2019): after its share of the fill, a worker alternates."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        order = [Action(Kind.FORWARD, stage, m) for m in range(ahead)]
        for m in range(microbatches):
            if m + ahead < microbatches:
                order.append(Action(Kind.FORWARD, stage, m + ahead))
            order.append(Action(Kind.BACKWARD, stage, m))
        orders.append(order)
    return connect("1f1b", microbatches, Placement.identity(stages), orders)


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2023, arXiv 2401.10241): as 1F1B, but a gradient leaves before those of the
    weights are made, which follow as many micro-batches later as there are stages before."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        order = [Action(Kind.FORWARD, stage, m) for m in range(ahead)]
        for m in range(microbatches + stage):
            if m + ahead < microbatches:
                order.append(Action(Kind.FORWARD, stage, m + ahead))
            if m < microbatches:
                order.append(Action(Kind.BACKWARD_INPUT, stage, m))
            if m >= stage:
                order.append(Action(Kind.BACKWARD_WEIGHT, stage, m - stage))
        orders.append(order)
    return connect("zb-h1", microbatches, Placement.identity(stages), orders)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_one_forward_one_backward_has_the_bubble_of_gpipe(stages: int, rounds: int) -> None:
    """Each worker idles (K-1)(F+B), and holds no more micro-batches than stages follow it."""
    schedule = one_forward_one_backward(stages, rounds * stages)
    kept = check(schedule)
    assert kept.activations == kept.inputs == tuple(range(stages, 0, -1))
    timing = simulate(schedule, ones(stages))
    for worker, idle in enumerate(timing.idle):
        assert sum(idle.values()) == (stages - 1) * 3, worker


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_a_split_backward_leaves_a_third_of_the_bubble(stages: int, rounds: int) -> None:
    """ZB-H1: (K-1)(F+I-W) of each worker, where 1F1B has (K-1)(F+I+W); section 2.2 there."""
    schedule = zero_bubble(stages, rounds * stages)
    kept = check(schedule)
    assert max(kept.activations) == stages  # as 1F1B's first stage
    assert kept.deferred == tuple(range(1, stages + 1))
    timing = simulate(schedule, ones(stages))
    whole = simulate(one_forward_one_backward(stages, rounds * stages), ones(stages))
    for idle, before in zip(timing.idle, whole.idle, strict=True):
        assert sum(idle.values()) == stages - 1
        assert 3 * sum(idle.values()) == sum(before.values())


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_the_orders_of_the_papers_are_legal(stages: int, microbatches: int) -> None:
    """With fewer micro-batches than stages too."""
    for make in (one_forward_one_backward, zero_bubble):
        schedule = make(stages, microbatches)
        check(schedule)
        assert parse(str(schedule)) == schedule


# Costs.


@given(forward=cost, backward=cost, share=st.integers(0, 9))
def test_a_split_backward_costs_as_much_as_a_whole_one(
    forward: int, backward: int, share: int
) -> None:
    costs = Costs((forward,), (backward,), (min(share, backward),))
    split = costs.of(Kind.BACKWARD_INPUT, 0) + costs.of(Kind.BACKWARD_WEIGHT, 0)
    assert split == costs.of(Kind.BACKWARD, 0) == backward
    assert costs.of(Kind.FORWARD, 0) == costs.of(Kind.RECOMPUTE, 0) == forward


@pytest.mark.parametrize("kind", [*SENDS, *RECEIVES, Kind.LOAD, Kind.REDUCE_TIED], ids=str)
def test_actions_that_do_not_compute_cost_nothing(kind: Kind) -> None:
    assert Costs.even(1).of(kind, 0) == 0


def test_each_stage_has_costs_of_its_own() -> None:
    """The slowest stage idles only during fill and drain."""
    costs = Costs((1, 3), (2, 6), (1, 3))
    timing = simulate(build("gpipe", 2, 4, "never"), costs)
    assert timing.busy == (12, 36)
    assert timing.makespan == 1 + 36 + 2
    assert timing.idle == ({"gradient": 15 + 3 * 4}, {"activation": 1, END: 2})


def by_payload(costs: Mapping[Payload, float], stages: int) -> dict[Edge, float]:
    """Return the costs of the transfers between any two stages."""
    return {
        Edge(source, target, payload): cost
        for payload, cost in costs.items()
        for source, target in itertools.product(range(stages), repeat=2)
    }


def test_a_transfer_lengthens_the_fill_and_the_drain() -> None:
    """One transfer each way for each stage but the last."""
    for stages, microbatches in GRID:
        even = Costs.even(stages)
        slow = Costs(
            even.forward,
            even.backward,
            even.backward_input,
            by_payload({Payload.ACTIVATION: 0.5, Payload.GRADIENT: 0.25}, stages),
        )
        schedule = build("gpipe", stages, microbatches, "never")
        longer = simulate(schedule, slow).makespan - simulate(schedule).makespan
        assert longer == pytest.approx(0.75 * (stages - 1))


def test_waits_for_a_transfer_are_counted_by_payload() -> None:
    costs = Costs((1, 1), (2, 2), (1, 1), by_payload({Payload.ACTIVATION: 10}, 2))
    timing = simulate(build("gpipe", 2, 1, "never"), costs)
    assert timing == Timing(16, (3, 3), ({"gradient": 13.0}, {"activation": 11.0, END: 2.0}))
    late = Costs((1, 1), (2, 2), (1, 1), by_payload({Payload.TARGET: 10}, 2))
    assert simulate(build("gpipe", 2, 1, "never"), late).idle[1] == {
        "activation": 1.0,
        "target": 10.0,
        END: 2.0,
    }


def test_both_ends_of_a_channel_handle_each_frame() -> None:
    schedule = build("gpipe", 3, 4, "never")
    timing = simulate(schedule, replace(Costs.even(3), handling=0.25))
    for actions, idle in zip(schedule.workers, timing.idle, strict=True):
        frames = [action for action in actions if action.kind in {*SENDS, *RECEIVES}]
        assert idle[HANDLING] == 0.25 * len(frames)


def test_a_sender_waits_for_a_full_channel() -> None:
    """Stage 0 is ten times as fast, and a channel holds one frame."""
    costs = Costs((1, 10), (2, 20), (1, 10))
    schedule = build("gpipe", 2, 5, "never")
    narrow = simulate(schedule, costs, capacity=1)
    assert narrow.idle[0][FULL] == 1 + 10 * 3 - 5  # frame 4 leaves when frame 3 is taken
    assert simulate(schedule, costs, capacity=5).idle[0].keys() == {"gradient"}


def test_busy_time_is_by_stage_and_idle_time_by_worker() -> None:
    timing = simulate(connect("vee", 2, V, fill_drain(V, 2)))
    assert timing.busy == (6.0,) * 4
    assert len(timing.idle) == 2
    for held, idle in zip(V.held, timing.idle, strict=True):
        assert sum(timing.busy[s] for s in held) + sum(idle.values()) == timing.makespan


def test_looped_stages_have_a_smaller_bubble() -> None:
    """Stages of half the length have a fill of half the length (Narayanan et al. 2021)."""
    looped = Placement.looped(4, 2)
    orders = [  # groups of four micro-batches, each up through both rounds
        [
            *(
                Action(Kind.FORWARD, stage, m)
                for group in (range(4), range(4, 8))
                for stage in held
                for m in group
            ),
            *(
                Action(Kind.BACKWARD, stage, m)
                for group in (range(4), range(4, 8))
                for stage in reversed(held)
                for m in group
            ),
        ]
        for held in looped.held
    ]
    schedule = connect("interleaved", 8, looped, orders)
    check(schedule)
    assert simulate(schedule, Costs.even(8, 0.5, 1)).makespan == 3 * 8 + 3 * 3 / 2
    assert simulate(build("gpipe", 4, 8, "never")).makespan == 3 * 8 + 3 * 3


def test_a_forward_only_schedule_takes_its_forwards() -> None:
    timing = simulate(forward_only(Placement.identity(3)))
    assert timing.makespan == 3
    assert timing.busy == (1, 1, 1)


def test_a_deadlock_is_an_error() -> None:
    stuck = parse("stuck stages=2 microbatches=1\n0: 0<G0 0F0 0>A0\n1: 1<A0 1F0 1B0 1>G0")
    with pytest.raises(
        ScheduleError,
        match=r"schedule stuck deadlocks with 4 frames: worker 0 cannot run 0F0: it waits for 1B0 "
        r"of worker 1; worker 1 cannot run 1F0: it waits for 0F0 of worker 0$",
    ):
        simulate(stuck)


# Laws.


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages, microbatches = draw(st.integers(1, 5)), draw(few)
    several = st.sets(st.sampled_from([(a, b) for b in range(stages) for a in range(b)]))
    skips = tuple(sorted(draw(several))) if stages > 1 else ()
    mode = draw(st.sampled_from(["always", "except_first", "never"]))
    made = draw(st.integers(0, 3))
    if made == 0:
        return one_forward_one_backward(stages, microbatches)
    if made == 1:
        return zero_bubble(stages, microbatches)
    if made == 2:
        placement = draw(st.sampled_from([V, Placement.looped(2, 2), Placement(((0, 1, 2),))]))
        return connect("any", microbatches, placement, fill_drain(placement, microbatches))
    return build("gpipe", stages, microbatches, mode, skips)


@st.composite
def prices(draw: st.DrawFn, stages: int) -> Costs:
    """Draw costs in eighths, which add up without rounding."""

    def some(least: int) -> tuple[float, ...]:
        numbers = st.integers(least, 40)
        return tuple(draw(st.lists(numbers, min_size=stages, max_size=stages).map(eighths)))

    backward = some(1)
    split = tuple(min(a, b) for a, b in zip(backward, some(0), strict=True))
    transfer = draw(st.dictionaries(st.sampled_from(Payload), st.integers(0, 40)))
    return Costs(
        some(1), backward, split, by_payload({what: t / 8 for what, t in transfer.items()}, stages)
    )


def runs(schedule: Schedule, capacity: int) -> bool:
    """Return whether channels of this capacity suffice."""
    try:
        check(schedule, capacity=capacity)
    except ScheduleError:
        return False
    return True


def eighths(numbers: list[int]) -> list[float]:
    return [number / 8 for number in numbers]


def slowly(schedule: Schedule, costs: Costs, capacity: int) -> list[float]:
    """Return when each worker ends, by relaxing the dependencies until nothing changes."""
    ends: dict[tuple[int, int], float] = {}
    sent: dict[Edge, list[tuple[int, int]]] = defaultdict(list)
    taken: dict[Edge, list[tuple[int, int]]] = defaultdict(list)
    for worker, actions in enumerate(schedule.workers):
        for place, action in enumerate(actions):
            if action.kind in SENDS:
                sent[edge_of(action)].append((worker, place))
            elif action.kind in RECEIVES:
                taken[edge_of(action)].append((worker, place))
    before: dict[tuple[int, int], list[tuple[tuple[int, int], float]]] = defaultdict(list)
    for edge, sends in sent.items():
        late = costs.transfers.get(edge, 0.0)
        for number, send in enumerate(sends):
            before[taken[edge][number]].append((send, late))
            if is_bounded(edge, schedule.placement) and number >= capacity:
                before[send].append((taken[edge][number - capacity], 0.0))
    changed = True
    while changed:
        changed = False
        for worker, actions in enumerate(schedule.workers):
            now = 0.0
            for place, action in enumerate(actions):
                now = max([now, *(ends.get(at, 0.0) + t for at, t in before[worker, place])])
                now += costs.of(action.kind, action.stage)
                if ends.get((worker, place)) != now:
                    ends[worker, place] = now
                    changed = True
    return [ends.get((w, len(acts) - 1), 0.0) for w, acts in enumerate(schedule.workers)]


@settings(deadline=None)
@given(schedules(), st.data(), st.integers(1, 4))
def test_times_are_those_of_the_longest_path(
    schedule: Schedule, data: st.DataObject, capacity: int
) -> None:
    assume(runs(schedule, capacity))
    costs = data.draw(prices(schedule.placement.stages))
    timing = simulate(schedule, costs, capacity=capacity)
    ends = slowly(schedule, costs, capacity)
    assert timing.makespan == max(ends)
    assert [idle.get(END, 0.0) for idle in timing.idle] == [max(ends) - end for end in ends]


@settings(deadline=None)
@given(schedules(), st.data(), st.integers(1, 4))
def test_a_timeline_has_the_times_of_the_simulated_step(
    schedule: Schedule, data: st.DataObject, capacity: int
) -> None:
    assume(runs(schedule, capacity))
    costs = data.draw(prices(schedule.placement.stages))
    found = timeline(schedule, costs, capacity=capacity)
    timing = simulate(schedule, costs, capacity=capacity)
    ends: dict[Action, float] = {}
    busy = [0.0] * schedule.placement.stages
    for actions, spans in zip(schedule.workers, found, strict=True):
        assert [s.action for s in spans] == [a for a in actions if costs.of(a.kind, a.stage)]
        now = 0.0
        for action, start, end in spans:
            assert (now <= start, end - start) == (True, costs.of(action.kind, action.stage))
            ends[action], now = end, end
            busy[action.stage] += end - start
    assert tuple(busy) == timing.busy
    for spans in found:
        for action, start, _ in spans:
            if action.kind is Kind.FORWARD:
                before = Action(Kind.FORWARD, action.stage - 1, action.microbatch)
                assert start >= ends.get(before, 0.0)
    last = max((s.end for spans in found for s in spans), default=0.0)
    assert last <= timing.makespan
    if not costs.transfers:
        assert last == timing.makespan


@settings(deadline=None)
@given(schedules(), st.data(), st.integers(1, 4))
def test_every_worker_is_busy_or_idle_from_begin_to_end(
    schedule: Schedule, data: st.DataObject, capacity: int
) -> None:
    assume(runs(schedule, capacity))
    costs = data.draw(prices(schedule.placement.stages))
    timing = simulate(schedule, costs, capacity=capacity)
    causes = {FULL, END, *(payload.value for payload in Payload)}
    for held, idle in zip(schedule.placement.held, timing.idle, strict=True):
        assert idle.keys() <= causes
        assert all(waited > 0 for waited in idle.values())
        assert sum(timing.busy[s] for s in held) + sum(idle.values()) == timing.makespan
    total = timing.makespan * len(timing.idle)
    assert timing.bubble == pytest.approx(sum(sum(i.values()) for i in timing.idle) / total)
    assert 0 <= timing.bubble < 1


@settings(deadline=None)
@given(schedules(), st.data())
def test_smaller_channels_never_make_a_step_shorter(
    schedule: Schedule, data: st.DataObject
) -> None:
    costs = data.draw(prices(schedule.placement.stages))
    spans = [
        simulate(schedule, costs, capacity=n).makespan if runs(schedule, n) else math.inf
        for n in (1, 2, 3, 4, 64)
    ]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < math.inf


@given(schedules(), st.integers(1, 4))
def test_a_schedule_that_deadlocks_is_not_timed(schedule: Schedule, capacity: int) -> None:
    if runs(schedule, capacity):
        simulate(schedule, capacity=capacity)
        return
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(schedule, capacity=capacity)


@given(stages=few, microbatches=few, capacity=st.integers(1, 5))
def test_gpipe_is_equally_fast_under_any_capacity(
    stages: int, microbatches: int, capacity: int
) -> None:
    for mode in ("always", "except_first", "never"):
        schedule = build("gpipe", stages, microbatches, mode)
        assert simulate(schedule, capacity=capacity) == simulate(schedule)


@slow
def test_half_a_million_actions_are_simulated_in_a_second() -> None:
    """Measured as the best CPU time of three runs, with a margin of two for a busy machine."""
    schedule = build("gpipe", 64, 1024, "always")
    assert sum(map(len, schedule.workers)) > 450_000
    took = []
    for _ in range(3):
        began = time.process_time()
        check(schedule)
        simulate(schedule)
        took.append(time.process_time() - began)
        if took[-1] < 2.0:
            return
    pytest.fail(f"it took {took} s")
