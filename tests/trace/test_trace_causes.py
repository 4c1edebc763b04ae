"""Where the time of steps went: every second has one cause, and the cause is the right one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan.actions import RECEIVES, SENDS, Kind
from pipeworker.plan.orders import ORDERS, Order
from pipeworker.plan.placement import Placement
from pipeworker.plan.planner.planner import plan_order
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs, simulate
from pipeworker.trace import causes
from pipeworker.trace.causes import (
    CAUSES,
    CHECKPOINT,
    COORDINATOR,
    DATA,
    FILL_DRAIN,
    IMBALANCE,
    OTHER,
    RECOVERY,
    TRANSFER,
    Breakdown,
    WorkerTime,
    breakdown,
    planned_breakdown,
)
from pipeworker.trace.mini_batches import (
    MiniBatch,
    mini_batches,
    recoveries,
    schedule_of,
    undisturbed,
)
from pipeworker.trace.recorder import EVALUATION, SNAPSHOT
from pipeworker.trace.timeline import Command, Span, WorkerLife
from support.draws import draws
from support.pure.facts import DRAWN_ORDERS, layer, network, networks
from support.pure.timelines import BASE, draw_schedule, lives_of

UPDATE, LATE, BEFORE = 0.004, 0.003, 0.006
"""Seconds of a step of :func:`lives_of` besides its actions: the update, what comes after the last
action, and what else comes before the first one."""


def total(time: WorkerTime) -> float:
    return time.computing + sum(time.idle.values())


def explained(lives: list[WorkerLife]) -> Breakdown:
    return breakdown(lives, list(mini_batches(lives)))


@given(DRAWN_ORDERS, st.integers(1, 3), st.integers(1, 6), st.data())
def test_the_parts_of_every_worker_add_up_to_the_time_of_the_steps(
    order: Order, workers: int, microbatches: int, data: st.DataObject
) -> None:
    schedule, costs = draw_schedule(data, order, workers, microbatches)
    lives = lives_of(schedule, costs, late=LATE)
    found = explained(lives)
    makespan = simulate(schedule, costs).makespan
    assert found.seconds == pytest.approx(2 * (makespan + UPDATE + LATE + BEFORE))
    assert found.steps == (1, 2)
    for time in found.workers:
        assert total(time) == pytest.approx(found.seconds)
        assert min(time.idle.values()) > -1e-6
        assert time.idle.keys() == {*CAUSES}
        assert time.optimizer == pytest.approx(2 * UPDATE)
        again = [a.stage for a in schedule.workers[time.worker] if a.kind is Kind.RECOMPUTE]
        assert time.recompute == pytest.approx(2 * sum(costs.forward[stage] for stage in again))
        assert time.idle[COORDINATOR] == pytest.approx(2 * LATE)
        assert time.idle[OTHER] >= 2 * BEFORE - 1e-6


def test_the_time_between_commands_has_the_cause_that_the_caller_gives() -> None:
    order = ORDERS["gpipe"]
    schedule = order.build(order.place(2), 4, ["never"] * 2)
    lives = lives_of(schedule, Costs.even(2, 0.01, 0.02), late=LATE)
    found = breakdown(lives, list(mini_batches(lives)), OTHER)
    for time in found.workers:
        assert time.idle[COORDINATOR] == 0
        assert time.idle[OTHER] == pytest.approx(2 * (LATE + BEFORE))
        assert total(time) == pytest.approx(found.seconds)


def test_a_step_of_a_sample_ends_when_the_next_one_begins() -> None:
    """The actions of the next step are not recorded; its update is not that of a user's loop."""
    order = ORDERS["gpipe"]
    schedule = order.build(order.place(2), 4, ["never"] * 2)
    costs = Costs.even(2, 0.01, 0.02)
    whole = lives_of(schedule, costs, steps=4)

    def sampled(life: WorkerLife) -> WorkerLife:
        first, second, _, last = life.commands
        return replace(life, commands=(first, replace(second, actions=()), last))

    wanted = [(one.step, one.begin, one.end) for one in mini_batches(whole)]
    found = [(one.step, one.begin, one.end) for one in mini_batches(map(sampled, whole))]
    assert found == [wanted[0], wanted[3]]

    def own_loop(life: WorkerLife) -> WorkerLife:
        commands = []
        for command in life.commands:
            at = command.received + 5
            update = replace(command, received=at, answered=at + UPDATE, actions=())
            commands += [replace(command, spans=()), update]
        return replace(life, commands=tuple(commands))

    found = [(one.step, one.begin, one.end) for one in mini_batches(map(own_loop, whole))]
    assert found[:3] == wanted[:3]
    spans = [
        command.spans for one in mini_batches(map(own_loop, whole)) for command in one.commands
    ]
    assert all(len(some) == 1 for some in spans)


def test_an_update_before_an_evaluation_is_part_of_its_step() -> None:
    """The evaluation itself is part of no step. One worker updates for twice as long."""
    order = ORDERS["gpipe"]
    schedule = order.build(order.place(2), 4, ["never"] * 2)
    whole = lives_of(schedule, Costs.even(2, 0.01, 0.02))

    def evaluated(life: WorkerLife) -> WorkerLife:
        commands: list[Command] = []
        for command in life.commands:
            assert command.answered is not None
            begin, end = command.answered, command.answered + UPDATE * (1 + life.rank)
            spans = Span("update", begin, end), Span(EVALUATION, end, end + 5)
            after = Command(command.step, 0, begin, end + 5, spans)
            commands += [replace(command, spans=()), after]
        return replace(life, commands=tuple(commands))

    found = explained([*map(evaluated, whole)])
    assert [time.optimizer for time in found.workers] == pytest.approx([2 * UPDATE, 4 * UPDATE])
    for time in found.workers:
        assert total(time) == pytest.approx(found.seconds)
        assert min(time.idle.values()) > -1e-6
    assert found.seconds < 1


def test_a_snapshot_before_the_actions_of_a_step_is_a_checkpoint() -> None:
    order = ORDERS["gpipe"]

    def saved(command: Command) -> Command:
        (update,) = command.spans
        return replace(command, spans=(update, Span(SNAPSHOT, update.end, update.end + 0.002)))

    lives = lives_of(order.build(order.place(2), 4, ["never"] * 2))
    lives = [replace(life, commands=tuple(map(saved, life.commands))) for life in lives]
    found = explained(lives)
    for time in found.workers:
        assert time.idle[CHECKPOINT] == pytest.approx(2 * 0.002)
        assert time.optimizer == pytest.approx(2 * UPDATE)
        assert total(time) == pytest.approx(found.seconds)


def test_a_step_in_which_the_job_was_suspended_counts_only_by_how_long_that_was() -> None:
    order = ORDERS["gpipe"]
    schedule = order.build(order.place(2), 4, ["never"] * 2)
    costs = Costs.even(2, 0.01, 0.02)
    lives = lives_of(schedule, costs)
    calm = breakdown(lives, list(mini_batches(lives))[:1])
    first = lives[0].commands
    lives[0] = replace(lives[0], commands=(first[0], replace(first[1], suspended=7.0), *first[2:]))
    chosen, suspended = undisturbed(list(mini_batches(lives)))
    found = breakdown(lives, chosen, suspended=suspended)
    assert (found.steps, found.suspended) == ((1,), 7.0)
    assert found.seconds == pytest.approx(calm.seconds + 7)
    for time, before in zip(found.workers, calm.workers, strict=True):
        assert time.idle[OTHER] == pytest.approx(before.idle[OTHER] + 7)
        assert total(time) == pytest.approx(found.seconds)
    alone, suspended = undisturbed(list(mini_batches(lives))[1:])
    assert ([one.step for one in alone], suspended) == ([2], 0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_with_even_stages_only_the_schedule_is_to_blame(name: str) -> None:
    order = ORDERS[name]
    placement = order.place(4)
    schedule = order.build(placement, 8, ["never"] * 4)
    costs = Costs.even(4, 0.010, 0.020)
    found = explained(lives_of(schedule, costs, late=LATE))
    timing = simulate(schedule, costs)
    for time, idle in zip(found.workers, timing.idle, strict=True):
        assert time.forward == pytest.approx(2 * 8 * 0.010)
        assert time.backward == pytest.approx(2 * 8 * 0.020)
        assert time.idle[FILL_DRAIN] == pytest.approx(2 * sum(idle.values()))
        assert time.idle[IMBALANCE] == pytest.approx(0, abs=1e-6)
        assert time.idle[TRANSFER] == pytest.approx(0, abs=1e-6)


def test_a_schedule_is_put_together_once_a_mini_batch_however_many_workers_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[MiniBatch] = []

    def counted(one: MiniBatch, replica: int = 0) -> Schedule:
        made.append(one)
        return schedule_of(one, replica)

    monkeypatch.setattr(causes, "schedule_of", counted)
    schedule = ORDERS["1f1b"].build(Placement.identity(6), 6, ["never"] * 6)
    lives = lives_of(schedule, Costs.even(6, 0.010, 0.020))
    found = [*mini_batches(lives)]
    breakdown(lives, found)
    assert made == found


def test_a_slow_stage_makes_the_others_wait() -> None:
    order = ORDERS["1f1b"]
    schedule = order.build(order.place(4), 16, ["never"] * 4)
    costs = Costs((0.01, 0.01, 0.02, 0.01), (0.02, 0.02, 0.04, 0.02), (0.01,) * 4)
    found = explained(lives_of(schedule, costs, late=LATE))
    slow = found.workers[2]
    for time in found.workers:
        if time is not slow:
            assert time.idle[IMBALANCE] > 0.35 * found.seconds
    assert slow.idle[IMBALANCE] < 0.1 * found.seconds


def test_a_slow_stage_of_one_replica_makes_the_others_of_that_replica_wait() -> None:
    schedule = ORDERS["1f1b"].build(Placement.identity(4), 16, ["never"] * 4)
    slow = Costs((0.01, 0.01, 0.02, 0.01), (0.02, 0.02, 0.04, 0.02), (0.01,) * 4)
    even = Costs.even(4, 0.010, 0.020)
    first, second = (lives_of(schedule, costs, late=LATE) for costs in (even, slow))
    others = [replace(life, rank=4 + life.rank, replica=1) for life in second]
    found = explained([*first, *others])
    uneven = [time for time in found.workers[4:] if time.stages != (2,)]
    assert all(time.idle[IMBALANCE] < 0.01 * found.seconds for time in found.workers[:4])
    assert all(time.idle[IMBALANCE] > 0.35 * found.seconds for time in uneven)


def slower(lives: list[WorkerLife], kinds: object, seconds: float) -> list[WorkerLife]:
    """Return the same, in which each action of some kinds ends so much later, and all after it."""

    def shifted(command: Command) -> Command:
        late, actions = 0.0, []
        for action, begin, end in command.actions:
            assert end is not None
            begins = begin + late
            late += seconds * (action.kind in kinds)  # type: ignore[operator]
            actions.append((action, begins, end + late))
        ends = None if command.answered is None else command.answered + late
        spans = tuple(type(command.actions[0])(*one) for one in actions)
        return replace(command, actions=spans, answered=ends)

    return [replace(life, commands=tuple(map(shifted, life.commands))) for life in lives]


def test_data_and_transfers_that_take_long_are_causes_of_their_own() -> None:
    order = ORDERS["gpipe"]
    schedule = order.build(order.place(1), 2, ["never"])
    found = explained(slower(lives_of(schedule), {Kind.LOAD}, 0.5))
    (time,) = found.workers
    assert time.idle[DATA] == pytest.approx(2 * 0.5)
    schedule = order.build(order.place(2), 2, ["never"] * 2)
    found = explained(slower(lives_of(schedule), {*SENDS}, 0.1))
    first, last = found.workers
    assert first.idle[TRANSFER] > 0.399  # two activations and two targets a step
    assert last.idle[TRANSFER] > 0.399
    assert {*RECEIVES} & {a.kind for actions in schedule.workers for a in actions}


def test_what_offload_and_tied_weights_take_is_other_time() -> None:
    pairs = ((0, 1), (1, 0))
    schedule = ORDERS["gpipe"].build(Placement.identity(2), 4, ["offload"] * 2, (), pairs)
    calm = explained(lives_of(schedule))
    found = explained(slower(lives_of(schedule), {Kind.FETCH, Kind.REDUCE_TIED}, 0.1))
    for time, before, actions in zip(found.workers, calm.workers, schedule.workers, strict=True):
        kinds = [action.kind for action in actions]
        count = kinds.count(Kind.FETCH) + kinds.count(Kind.REDUCE_TIED)
        assert {Kind.FETCH, Kind.REDUCE_TIED} < {*kinds}
        assert time.idle[OTHER] - before.idle[OTHER] == pytest.approx(2 * count * 0.1)
        assert total(time) == pytest.approx(found.seconds)


def test_the_time_between_two_generations_is_recovery() -> None:
    order = ORDERS["gpipe"]
    lives = lives_of(order.build(order.place(1), 2, ["never"]))
    (first,) = lives
    one, two = first.commands
    assert two.received - one.received == pytest.approx(10)
    lives = [
        replace(first, commands=(one,)),
        replace(first, generation=2, commands=(two,)),
    ]
    found = explained(lives)
    assert one.answered is not None
    (time,) = found.workers
    assert time.idle[RECOVERY] == pytest.approx(two.received - one.answered)
    assert total(time) == pytest.approx(found.seconds)
    assert one.received > BASE


def test_a_generation_that_completes_no_step_leaves_two_recoveries() -> None:
    order = ORDERS["gpipe"]
    (life,) = lives_of(order.build(order.place(1), 2, ["never"]), steps=3)
    one, lost, two = life.commands
    lost = replace(lost, answered=None, actions=())
    lives = [replace(life, generation=n, commands=(c,)) for n, c in enumerate((one, lost, two), 1)]
    (time,) = explained(lives).workers
    assert one.answered is not None
    waited = lost.received - one.answered + two.received - lost.received
    assert time.idle[RECOVERY] == pytest.approx(waited * 2 / 3)
    for chosen in list(mini_batches(lives))[1:], list(mini_batches(lives))[:1]:
        assert breakdown(lives, chosen).workers[0].idle[RECOVERY] == 0


@pytest.mark.parametrize("done", [True, False])
def test_a_recovery_begins_with_the_last_moment_that_a_lost_worker_recorded(done: bool) -> None:
    order = ORDERS["gpipe"]
    (life,) = lives_of(order.build(order.place(1), 2, ["never"]), steps=3)
    one, lost, two = life.commands
    *before, last = lost.actions[:3]
    last = last if done else last._replace(end=None)
    first = replace(life, commands=(one, replace(lost, answered=None, actions=(*before, last))))
    (found,) = recoveries([first, replace(life, generation=2, commands=(two,))])
    assert found == ((1, 2), last.end if done else last.begin, two.received)
    early = replace(two, received=one.received)  # by a clock that is not known exactly
    (found,) = recoveries([first, replace(life, generation=2, commands=(early,))])
    assert found[1] == found[2]


def test_a_recovery_counts_by_the_share_of_the_steps_that_are_recorded() -> None:
    order = ORDERS["gpipe"]
    (life,) = lives_of(order.build(order.place(1), 2, ["never"]), steps=20)
    one, two = life.commands[0], life.commands[-1]
    began = life.commands[4].received
    lives = [
        replace(life, commands=(one,)),
        replace(life, generation=2, commands=(two,), began=began),
    ]
    found = explained(lives)
    (time,) = found.workers
    assert one.answered is not None
    assert time.idle[RECOVERY] == pytest.approx((began - one.answered) * 2 / 20)
    assert total(time) == pytest.approx(found.seconds)


def test_steps_that_not_all_workers_have_recorded_are_left_out() -> None:
    order = ORDERS["gpipe"]
    first, second = lives_of(order.build(order.place(2), 2, ["never"] * 2))
    second = replace(second, commands=second.commands[:1])
    assert explained([first, second]).steps == (1,)
    assert explained([]).seconds == 0


def test_a_step_in_which_a_worker_was_lost_is_left_out() -> None:
    order = ORDERS["gpipe"]
    first, second = lives_of(order.build(order.place(2), 2, ["never"] * 2))
    commands = (*second.commands[:-1], replace(second.commands[-1], answered=None))
    assert explained([first, replace(second, commands=commands)]).steps == (1,)


def test_a_generation_of_which_a_worker_has_recorded_nothing_is_left_out() -> None:
    order = ORDERS["gpipe"]
    lives = lives_of(order.build(order.place(3), 2, ["never"] * 3))
    assert explained(lives).steps == (1, 2)
    assert explained(lives[:1] + lives[2:]).steps == ()
    others = [replace(life, rank=3 + life.rank, replica=1) for life in lives]
    assert explained([*lives, *others]).steps == (1, 2)
    assert explained([*lives, *others[:2]]).steps == ()


@settings(max_examples=draws(20))
@given(networks(), DRAWN_ORDERS, st.integers(1, 4), st.integers(1, 3))
def test_the_parts_of_a_plan_add_up_to_its_step(
    facts: NetworkFacts, order: Order, microbatches: int, count: int
) -> None:
    planned = plan_order(facts, order, order.place(2), microbatches)
    found = planned_breakdown(planned, count)
    assert found.seconds == pytest.approx(count * planned.timing.makespan + planned.update)
    for time in found.workers:
        stages = [planned.stage_seconds[stage] for stage in time.stages]
        computed = [sum(s.forward for s in stages), sum(s.recompute for s in stages)]
        assert [time.forward, time.recompute] == pytest.approx([count * one for one in computed])
        assert time.backward == pytest.approx(count * sum(s.backward for s in stages))
        assert time.optimizer == planned.update
        assert total(time) == pytest.approx(found.seconds)
        assert min(time.idle.values()) >= 0


def test_a_plan_waits_for_its_schedule_for_slow_stages_and_for_transfers() -> None:
    even, slow = [layer(1.0, 2.0)] * 2, [layer(1.0, 2.0), layer(2.0, 4.0)]

    def idle(facts: NetworkFacts) -> list[dict[str, float]]:
        planned = plan_order(facts, ORDERS["gpipe"], Placement.identity(2), 4)
        workers = planned_breakdown(planned, 1).workers
        return [{c: s for c, s in time.idle.items() if s > 1e-9} for time in workers]

    assert idle(network(even)) == [{FILL_DRAIN: 3.0}] * 2
    assert idle(network(slow)) == [{FILL_DRAIN: 4.5, IMBALANCE: 10.5}, {FILL_DRAIN: 3.0}]
    late = replace(network(even), latency=0.5)
    assert idle(late) == [{FILL_DRAIN: 3.0, TRANSFER: 1.0}] * 2
