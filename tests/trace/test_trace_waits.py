"""The costs, for every worker, of waits for data() and for a late command."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.orders import ORDERS, Order
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs
from pipeworker.trace.causes import COORDINATOR, DATA, OTHER, TRANSFER, Breakdown, breakdown
from pipeworker.trace.mini_batches import mini_batches
from pipeworker.trace.timeline import WorkerLife
from pipeworker.trace.waits import Waits
from support.draws import draws
from support.pure.facts import DRAWN_ORDERS
from support.pure.timelines import BASE, draw_schedule, recorded_lives


def schedule_of(name: str, workers: int, microbatches: int, replicas: int = 1) -> Schedule:
    order = ORDERS[name]
    placement = order.place(workers).copies(replicas)
    return order.build(placement, microbatches, ["never"] * placement.stages)


def explained(lives: Sequence[WorkerLife]) -> Breakdown:
    return breakdown(lives, list(mini_batches(lives)))


@settings(max_examples=draws(40))
@given(DRAWN_ORDERS, st.integers(1, 4), st.integers(1, 12), st.floats(0, 1), st.data())
def test_data_costs_every_worker_as_much_as_it_adds_to_the_step(
    order: Order, workers: int, microbatches: int, load: float, data: st.DataObject
) -> None:
    schedule, costs = draw_schedule(data, order, workers, microbatches)
    without, slow = (explained(recorded_lives(schedule, costs, [each])) for each in (0.0, load))
    added = slow.seconds - without.seconds
    assert slow.workers[0].idle[DATA] == pytest.approx(load)
    for time, before in zip(slow.workers[1:], without.workers[1:], strict=True):
        assert time.parts == pytest.approx(
            before.parts | {DATA: before.idle[DATA] + added}, abs=1e-9
        )
    for time in slow.workers:
        assert sum(time.parts.values()) == pytest.approx(slow.seconds)
        assert min(time.idle.values()) > -1e-9


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zbv"])
def test_all_workers_wait_for_a_slow_data(name: str) -> None:
    """The first one waits to send to a worker that reads, and the others wait for that one."""
    schedule = schedule_of(name, 4, 16)
    costs = Costs.even(schedule.placement.stages, 1e-4, 2e-4)
    found = explained(recorded_lives(schedule, costs, [0.5]))
    for time in found.workers:
        assert time.idle[DATA] > 0.95 * found.seconds
        assert time.idle[TRANSFER] == pytest.approx(0, abs=1e-9)
        assert time.idle[OTHER] == pytest.approx(0, abs=1e-9)


def test_data_that_is_read_while_the_first_stage_waits_anyway_costs_the_others_nothing() -> None:
    costs = Costs.even(3, 0.010, 0.020)
    found = explained(recorded_lives(schedule_of("gpipe", 3, 4), costs, [0.059]))
    assert found.workers[0].idle[DATA] == pytest.approx(0.059)
    assert [time.idle[DATA] for time in found.workers[1:]] == [0, 0]


@pytest.mark.parametrize("load", [(0.5, 0.5), (0.5, 0.1), (0.0, 0.5)])
def test_a_replica_waits_for_the_data_of_another_one(load: tuple[float, float]) -> None:
    schedule = schedule_of("gpipe", 2, 4, replicas=2)
    costs = Costs.even(2, 1e-3, 2e-3)
    found = explained(recorded_lives(schedule, costs, load))
    assert len(found.workers) == 4
    for time in found.workers:
        assert time.idle[DATA] > 0.9 * max(load)
        assert time.idle[TRANSFER] == pytest.approx(0, abs=1e-9)
        assert sum(time.parts.values()) == pytest.approx(found.seconds)


def test_a_replica_that_computes_longer_is_a_transfer_and_not_a_wait_for_data() -> None:
    schedule, costs = schedule_of("gpipe", 2, 4, replicas=2), Costs.even(2, 1e-3, 2e-3)
    lives = recorded_lives(schedule, costs, [0.0, 0.0], times=[1.0, 2.0])
    found = explained(lives)
    assert [time.idle[DATA] for time in found.workers] == [0, 0, 0, 0]
    own_step = 5 * 0.003  # and that of the other replica takes twice as long
    assert found.workers[0].idle[TRANSFER] == pytest.approx(own_step)
    assert [time.idle[TRANSFER] for time in found.workers[2:]] == pytest.approx([0, 0])
    for time in found.workers:
        assert sum(time.parts.values()) == pytest.approx(found.seconds)


def test_a_wait_for_a_first_stage_whose_command_came_late_is_the_coordinators() -> None:
    costs = Costs.even(3, 0.010, 0.020)
    lives = recorded_lives(schedule_of("1f1b", 3, 6), costs, [0.0], [0.3, 0.0, 0.1])
    found = explained(lives)
    for time in found.workers:
        assert time.idle[COORDINATOR] == pytest.approx(0.3)
        assert time.idle[OTHER] == pytest.approx(0, abs=1e-9)
    own_loop = breakdown(lives, list(mini_batches(lives)), OTHER)
    assert [time.idle[OTHER] for time in own_loop.workers] == pytest.approx([0.3] * 3)


def test_a_command_that_came_after_that_of_the_first_stage_costs_only_its_own_worker() -> None:
    costs = Costs.even(2, 0.010, 0.020)
    found = explained(recorded_lives(schedule_of("1f1b", 2, 4), costs, [0.0], [0.0, 0.3]))
    assert [time.idle[COORDINATOR] for time in found.workers] == pytest.approx([0.0, 0.3])
    for time in found.workers:
        assert sum(time.parts.values()) == pytest.approx(found.seconds)


def test_a_send_waits_until_its_channel_has_room() -> None:
    schedule = schedule_of("gpipe", 2, 8)
    lives = recorded_lives(schedule, Costs.even(2, 0.01, 0.02), [1.0])
    waits = Waits.of(lives, [life.commands[0] for life in lives])
    (command,) = lives[1].commands
    within = {span.action: waits.within(lives[1], span) for span in command.actions}
    full = [
        a.microbatch for a, seconds in within.items() if a.kind is Kind.SEND_GRADIENT and seconds
    ]
    assert full == [4]  # the first stage reads, and receives the others at once after that
    load = next(span for span in lives[0].commands[0].actions if span.action.kind is Kind.LOAD)
    assert load.end is not None
    assert waits.ready[0][Action(Kind.SEND_GRADIENT, 1, 4)] == pytest.approx(load.end)
    assert waits.late[0] == pytest.approx(load.end - BASE - 0.01 * 9 - 0.02)


def test_a_worker_waits_until_what_it_sent_is_received() -> None:
    first, last = recorded_lives(schedule_of("gpipe", 2, 4), Costs.even(2, 0.01, 0.02), [1.0])
    (command,), (other,) = last.commands, first.commands
    waits = Waits.of([first, last], [other, command])
    done = command.actions[-1].end
    assert done is not None
    begun = next(s.begin for s in other.actions if s.action == Action(Kind.RECEIVE_GRADIENT, 0, 3))
    assert waits.taken[1] == pytest.approx(begun)
    assert command.answered == pytest.approx(begun)
    assert waits.behind(last, command, begun + 9) == pytest.approx(begun + 9 - done)
