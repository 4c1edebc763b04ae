"""The coordinator under generated events: the protocol, and all kinds of faults.

The invariants are written once, in `Watch`, and checked after every event.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.generated.lives import (
    ASKED,
    FAILING,
    FATAL,
    HARMLESS,
    LOSSES,
    ODD,
    PLAIN,
    Happening,
    Life,
    Repeat,
    Rush,
    files,
    lives,
    loops,
    often,
)
from coordinator.generated.world import World
from pipeworker.coordinator.effects import Commit
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.plan.orders import ORDERS
from pipeworker.wire.lines import SaveRequest, Verdict, Warned
from pipeworker.wire.messages.directions import Advance, Finish
from pipeworker.wire.messages.step import CallKind
from support.draws import draws
from support.pure.coordinator import LOOPED, of

LOST = (Cause.LOST, Cause.HUNG, Cause.PEER, Cause.TRANSIENT, Cause.SIGNAL)
ORDER = st.lists(st.integers(0, 7), min_size=1, max_size=9)


@pytest.fixture(autouse=True, scope="module")
def looped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ORDERS, "looped", LOOPED)
        yield


def rows(world: World) -> list[int]:
    return [row.step for row in of(world.script.effects, StepResult)]


def evaluations(world: World) -> list[int]:
    return [evaluation.step for evaluation in of(world.script.effects, Evaluation)]


@settings(max_examples=draws(40), deadline=None)
@given(lives(replaceable=True), often(HARMLESS, ASKED, ODD, FATAL, FAILING))
def test_invariants_hold_for_any_events(life: Life, happenings: list[Happening]) -> None:
    world = World(life, strict=False)
    for happening in happenings:
        world.perform(happening)
    world.silence()
    assert world.watch.ended
    assert world.script.job.end
    world.check_replay()


@settings(max_examples=draws(25), deadline=None)
@given(lives(replaceable=True), often(HARMLESS, ASKED), ORDER)
def test_without_a_fault_every_step_is_done(
    life: Life, happenings: list[Happening], order: list[int]
) -> None:
    """For any order of messages, messages of other peers, and number of checkpoints."""
    world = World(life)
    for happening in happenings:
        world.perform(happening)
    world.finish(order)
    script = world.script
    assert (script.ended.status, script.ended.steps) == ("done", life.steps)
    assert script.ended.causes == ()
    assert rows(world) == life.rows
    assert of(script.effects, Commit)[-1].state.step == life.steps
    for worker in world.workers:
        assert worker.received[-1] == Advance(Finish())
    world.check_replay()


@settings(max_examples=draws(25), deadline=None)
@given(
    files(accumulate=2, replaceable=True, least=4),
    st.lists(st.tuples(st.integers(0, 20), LOSSES | LOSSES | ASKED), min_size=1, max_size=5),
    ORDER,
)
def test_every_step_is_recorded_once_whichever_worker_is_lost(
    life: Life, happenings: list[tuple[int, Happening]], order: list[int]
) -> None:
    """The job ends as without a loss, or because there were too many losses.

    `World` checks that every state to resume from is complete.
    """
    world = World(life)
    for turns, happening in happenings:
        for turn in range(turns):
            world.deliver(order[turn % len(order)])
        world.perform(happening)
    world.finish(order)
    script = world.script
    if script.ended.status == "failed":
        assert script.job.end
        assert script.job.end.failure
        assert script.job.end.failure.cause in LOST
        assert of(script.effects, Warned)[-1].text.startswith("the job is not restarted: ")
        return
    assert len(script.ended.causes) <= world.losses
    assert (script.ended.status, script.ended.steps) == ("done", life.steps)
    assert rows(world) == life.rows
    assert evaluations(world) == life.evaluations
    assert of(script.effects, Commit)[-1].state.step == life.steps
    world.check_replay()


@settings(max_examples=draws(16), deadline=None)
@given(lives(replaceable=True), often(ASKED, FAILING), ORDER)
def test_a_full_disk_fails_checkpoints_and_twice_in_a_row_the_job(
    life: Life, happenings: list[Happening], order: list[int]
) -> None:
    world = World(life)
    for happening in happenings:
        world.perform(happening)
    world.finish(order)
    script, tried = world.script, world.watch.tried
    pairs = list(itertools.pairwise(tried))
    if (False, False) in pairs:
        later = tried[pairs.index((False, False)) + 2 :]
        assert later in ([], [True])  # one that was being completed already
        assert script.ended.status == "failed"
        assert script.job.end
        assert script.job.end.failure
        assert script.job.end.failure.message == "no space left"
    else:
        assert script.ended.status == "done"
        assert rows(world) == life.rows
        warned = [warn for warn in of(script.effects, Warned) if "no space left" in warn.text]
        assert len(warned) == tried.count(False)


@settings(max_examples=draws(15), deadline=None)
@given(files(accumulate=1), st.data())
def test_repeated_messages_count_once(life: Life, data: st.DataObject) -> None:
    """For messages that name their step; a repeated call or mini-batch of a step has no number."""
    world = World(life)
    while world.deliver(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            world.perform(Repeat(data.draw(st.integers(0, 99))))
    assert (world.script.ended.status, world.script.ended.steps) == ("done", life.steps)
    assert evaluations(world) == life.evaluations


@settings(max_examples=draws(20), deadline=None)
@given(lives(), st.booleans(), st.integers(0, 60), ORDER)
def test_a_checkpoint_changes_no_other_result(
    life: Life, alone: bool, moment: int, order: list[int]
) -> None:
    if alone:  # it is the only checkpoint before the last one
        options = life.options | {"checkpoint_every": "end", "patience": None}
        life = dataclasses.replace(life, options=options)
    plain, saving = World(life), World(life)
    plain.finish(order)
    for turn in range(moment):
        saving.deliver(order[turn % len(order)])
    before, over = saving.watch.rows, saving.watch.ended
    last = saving.script.state() in (State.SAVING, State.COMMITTING)  # the job ends after it
    saving.handle(SaveRequest())
    saving.finish(order)
    for rank in saving.script.ranks:
        assert saving.script.runs(rank) == plain.script.runs(rank)
    for kind in (StepResult, Evaluation, Verdict):
        # Compared as text, because a norm may be NaN.
        assert str(of(saving.script.effects, kind)) == str(of(plain.script.effects, kind))
    *others, final = of(plain.script.effects, Commit)
    *more, end = of(saving.script.effects, Commit)
    if life.calls:  # it lacks an evaluation that an own loop makes afterwards
        end, final = (
            dataclasses.replace(commit, state=dataclasses.replace(commit.state, evaluation=None))
            for commit in (end, final)
        )
    assert end == final
    if life.calls or others:  # the requested one may wait for another one
        return
    assert [commit.state.step for commit in more] in ([], [before], [before + 1])
    if not more:  # the requested one is the last one
        assert over or last or final.state.step - before <= 1


@settings(max_examples=draws(16), deadline=None)
@given(
    loops(PLAIN),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(PLAIN)), max_size=12),
)
def test_a_call_out_of_turn_leaves_no_step_half_done(
    life: Life, rushes: list[tuple[int, CallKind]]
) -> None:
    world = World(life, strict=False)
    for turns, kind in rushes:
        for turn in range(turns):
            world.deliver(turn)
        world.perform(Rush(kind))
    world.silence()
    assert world.watch.ended
