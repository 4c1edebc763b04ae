"""The checker against a slow reference, on random legal schedules and on broken ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.check import LiveMicroBatches, check
from pipeworker.plan.connect import connect, forward_only
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import with_fetches
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import simulate
from pipeworker.plan.text import parse
from support.draws import draws
from support.pure.orders import Which
from support.pure.reference_checker import Illegal, check_slowly

PLACEMENTS = [
    *(Placement.identity(stages) for stages in (1, 2, 3, 4)),
    *(
        Placement.looped(2, 2),
        Placement.looped(3, 2),
        Placement(((0, 3), (1, 2))),
        Placement(((0, 1), (2,))),
    ),
    *(Placement(((1,), (0,))), Placement(((0, 2), (1,))), Placement(((0, 1, 2),))),
]


def any_order(
    placement: Placement,
    microbatches: int,
    recompute: Which,
    split: Which,
    chance: random.Random,
) -> list[list[Action]]:
    """Draw a compute order in which each action comes after those that it needs."""
    last = placement.stages - 1
    needs: dict[Action, list[Action]] = {}

    def gradient(s: int, m: int) -> Action:
        return Action(Kind.BACKWARD_INPUT if split(s, m) else Kind.BACKWARD, s, m)

    def weights(s: int, m: int) -> Action:
        return Action(Kind.BACKWARD_WEIGHT if split(s, m) else Kind.BACKWARD, s, m)

    for s in range(placement.stages):
        for m in range(microbatches):
            forward = Action(Kind.FORWARD, s, m)
            needs[forward] = [Action(Kind.FORWARD, s, m - 1)] if m else []
            needs[forward] += [Action(Kind.FORWARD, s - 1, m)] if s else []
            back = [forward, *([gradient(s + 1, m)] if s < last else [])]
            before = [weights(s, m - 1)] if m else []
            if recompute(s, m):
                needs[Action(Kind.RECOMPUTE, s, m)] = [forward]
                back.append(Action(Kind.RECOMPUTE, s, m))
            if split(s, m):
                needs[weights(s, m)] = [gradient(s, m), *before]
                before = []
            needs[gradient(s, m)] = [*back, *before, *([gradient(s, m - 1)] if m else [])]
    orders: list[list[Action]] = [[] for _ in placement.held]
    done: set[Action] = set()
    while len(done) < len(needs):
        ready = sorted(a for a in needs if a not in done and done.issuperset(needs[a]))
        action = chance.choice(ready)
        done.add(action)
        orders[placement.owners[action.stage]].append(action)
    return orders


def any_schedule(chance: random.Random) -> Schedule:
    """Draw a schedule that is legal if channels hold enough frames."""
    placement = chance.choice(PLACEMENTS)
    stages, microbatches = placement.stages, chance.randint(1, 4)
    later = [(a, b) for b in range(stages) for a in range(b)]
    skips = tuple(sorted(pair for pair in later if chance.random() < 0.25))
    if chance.random() < 0.1:
        return forward_only(placement, skips)
    tied = [pair for pair in later if chance.random() < 0.25]
    tied += [(s, s) for s in range(stages) if chance.random() < 0.1]
    ties = tuple(sorted({*tied, *((b, a) for a, b in tied)}))
    recompute_share, split_share = chance.choice([0, 0.5, 1]), chance.choice([0, 0.5, 1])
    every = [(s, m) for s in range(stages) for m in range(microbatches)]
    recomputed = {at for at in every if chance.random() < recompute_share}
    split = {at for at in every if chance.random() < split_share}
    orders = any_order(
        placement,
        microbatches,
        lambda s, m: (s, m) in recomputed,
        lambda s, m: (s, m) in split,
        chance,
    )
    offloads = {s for s in range(stages) if chance.random() < 0.25}
    orders = [with_fetches(order, offloads) for order in orders]
    return connect("any", microbatches, placement, orders, skips, ties)


def mutated(schedule: Schedule, chance: random.Random) -> Schedule:
    """Change one action of one worker."""
    worker = chance.randrange(len(schedule.workers))
    actions = list(schedule.workers[worker])
    if not actions:
        return schedule
    i, j = chance.randrange(len(actions)), chance.randrange(len(actions))
    match chance.randrange(7):
        case 0:
            del actions[i]
        case 1:
            actions.insert(j, actions[i])
        case 2:
            actions[i], actions[j] = actions[j], actions[i]
        case 3:
            actions.insert(j, actions.pop(i))
        case 4:  # neighbours, which often may
            j = max(i - 1, 0)
            actions[i], actions[j] = actions[j], actions[i]
        case 5:
            actions[i] = another(actions[i], schedule, chance)
        case 6:  # where it would be next to right
            actions.insert(i, another(actions[i], schedule, chance))
    workers = list(schedule.workers)
    workers[worker] = tuple(actions)
    return replace(schedule, workers=tuple(workers))


def another(action: Action, schedule: Schedule, chance: random.Random) -> Action:
    match chance.randrange(4):
        case 0:
            return action._replace(kind=chance.choice(list(Kind)))
        case 1:
            return action._replace(stage=chance.randrange(schedule.placement.stages + 1))
        case 2:
            return action._replace(microbatch=chance.randrange(schedule.microbatches + 1))
    return action._replace(peer=chance.randrange(-1, schedule.placement.stages + 1))


def verdict(schedule: Schedule, capacity: int) -> LiveMicroBatches | str:
    """Return the result of the fast checker."""
    try:
        return check(schedule, capacity=capacity)
    except ScheduleError as error:
        return f"rejected: {error}"


def slow_verdict(schedule: Schedule, capacity: int) -> LiveMicroBatches | str:
    try:
        return check_slowly(schedule, capacity)
    except Illegal as error:
        return f"rejected: {error}"


@settings(max_examples=draws(40), deadline=None)
@given(st.integers(0, 2**48))
def test_any_order_that_respects_all_needs_is_legal(seed: int) -> None:
    schedule = any_schedule(random.Random(seed))
    assert check(schedule, capacity=64) == check_slowly(schedule, 64)
    assert parse(str(schedule)) == schedule
    assert simulate(schedule, capacity=64).makespan > 0


@settings(max_examples=draws(60), deadline=None)
@given(seed=st.integers(0, 2**48), mutations=st.integers(1, 3), capacity=st.integers(1, 4))
def test_the_fast_checker_agrees_with_the_slow_one(
    seed: int, mutations: int, capacity: int
) -> None:
    chance = random.Random(seed)
    schedule = any_schedule(chance)
    for _ in range(mutations):
        schedule = mutated(schedule, chance)
    fast, slow = verdict(schedule, capacity), slow_verdict(schedule, capacity)
    assert isinstance(fast, str) == isinstance(slow, str), f"{fast}\n{slow}\n{schedule}"
    if not isinstance(fast, str):
        assert fast == slow
        assert simulate(schedule, capacity=capacity).makespan > 0


@given(seed=st.integers(0, 2**48), twice=st.booleans())
def test_a_missing_or_repeated_action_is_rejected(seed: int, twice: bool) -> None:
    chance = random.Random(seed)
    schedule = any_schedule(chance)
    worker = chance.randrange(len(schedule.workers))
    actions = list(schedule.workers[worker])
    index = chance.randrange(len(actions))
    action = actions[index]
    if twice:
        actions.insert(chance.randint(0, len(actions)), action)
    else:
        del actions[index]
    workers = (*schedule.workers[:worker], tuple(actions), *schedule.workers[worker + 1 :])
    changed = replace(schedule, workers=workers)
    if action.kind in (Kind.RECOMPUTE, Kind.FETCH) and not twice:
        check(changed, capacity=64)  # whether to recompute or offload is the schedule's choice
        return
    with pytest.raises(ScheduleError):
        check(changed, capacity=64)
