"""Schedules read from text: comments, positions of mistakes, and the orders that a file gives."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError, UsageError
from pipeworker.plan.actions import COMPUTE
from pipeworker.plan.check import check
from pipeworker.plan.connect import connect, forward_only
from pipeworker.plan.orders import ORDERS, resolve
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import RECOMPUTE_MODES
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.text import format_compute, is_text, name_of, parse
from support.pure.orders import build, legal

MINE = """\
# fills with two micro-batches
mine stages=2 microbatches=3

0: 0F0 0F1 0B0 0F2 0R1 0B1 0B2   # stage 0 keeps two of three
1: 1F0 1B0 1F1 1B1 1F2 1B2
"""


def test_comments_and_blank_lines_are_ignored() -> None:
    schedule = parse(MINE)
    assert (schedule.name, schedule.microbatches) == ("mine", 3)
    assert str(schedule).splitlines()[1] == "0: 0F0 0F1 0B0 0F2 0R1 0B1 0B2"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("0R1", "0X1", "line 4, column 20: '0X1' is not an action"),
        ("1B0 1F1", "1B0 F1", "line 5, column 12: 'F1' is not an action"),
        ("mine stages=2", "mine stages=two", "line 2: 'mine stages=two"),
        ("1: 1F0", "2: 1F0", "line 5: expected the line of worker 1"),
        ("1: 1F0 1B0 1F1 1B1 1F2 1B2", "", "line 4: the head has 2 workers, but 1 line follows"),
        ("microbatches=3", "microbatches=3 placement=0,1", "line 5: the head has 1 worker, but 2"),
        ("microbatches=3", "microbatches=3 placement=0/2", "line 2: placement 0/2 does not hold"),
        # What would take gigabytes.
        ("microbatches=3", "microbatches=999999999", "line 2: the head has 999999999 micro-batch"),
        ("stages=2", "stages=999999999", "line 5: the head has 999999999 workers, but 2 lines"),
        (
            *("stages=2 microbatches=3", "stages=99999999 microbatches=3 placement=0/1"),
            "line 2: placement 0/1 does not hold",
        ),
    ],
)
def test_a_mistake_has_its_line_and_column(old: str, new: str, why: str) -> None:
    assert old in MINE
    with pytest.raises(ScheduleError) as raised:
        parse(MINE.replace(old, new, 1))
    assert str(raised.value).startswith(why)


def test_a_name_is_not_a_text() -> None:
    assert not is_text("gpipe")
    assert is_text(MINE)
    assert [name_of(value) for value in ("gpipe", "mine stages=1\n")] == ["gpipe", "mine"]


@given(
    name=st.sampled_from(sorted(ORDERS)),
    workers=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    mode=st.sampled_from(RECOMPUTE_MODES),
)
def test_the_printed_text_of_a_schedule_gives_the_same_schedule(
    name: str, workers: int, microbatches: int, mode: str
) -> None:
    schedule = build(name, workers, microbatches, mode)
    text = format_compute(schedule, "mine")
    assert {a.kind for actions in parse(text).workers for a in actions} <= COMPUTE
    order = resolve(text)
    placement = order.place(workers)
    modes = (mode,) * placement.stages
    again = order.build(placement, microbatches, modes)
    assert (again.name, again.workers) == ("mine", schedule.workers)
    assert format_compute(parse(str(schedule)), "mine") == text


def drawn(stages: int, microbatches: int, seed: int) -> Schedule:
    """Return a random legal schedule."""
    chance = random.Random(seed)
    placement = Placement.identity(stages)
    orders = legal(placement, microbatches, lambda ready, _: chance.choice(ready))
    return connect("drawn", microbatches, placement, orders)


@given(stages=st.integers(1, 4), microbatches=st.integers(2, 12), seed=st.integers(0, 1 << 30))
def test_fewer_micro_batches_run_wherever_all_of_them_do(
    stages: int, microbatches: int, seed: int
) -> None:
    schedule = drawn(stages, microbatches, seed)
    try:
        check(schedule)
    except ScheduleError:
        assume(False)
    order = resolve(format_compute(schedule, "mine"))
    for count in range(1, microbatches):
        fewer = order.build(order.place(stages), count, ("never",) * stages)
        check(fewer)
        kept = [a for a in schedule.workers[0] if a.kind in COMPUTE and a.microbatch < count]
        assert [a for a in fewer.workers[0] if a.kind in COMPUTE] == kept


def test_a_written_order_is_for_its_workers_and_micro_batches() -> None:
    order = resolve(MINE)
    assert (order.name, order.microbatches, order.virtual_stages) == ("mine", 3, 1)
    with pytest.raises(UsageError, match="mine: has lines for 2 workers, and the job has 3; use"):
        order.place(3)
    with pytest.raises(ScheduleError, match="is for 3 micro-batches, not 4; use --microbatches 3"):
        order.build(order.place(2), 4, ("never",) * 2)


def test_a_written_order_places_stages_and_gets_the_connections_of_the_job() -> None:
    text = "v stages=4 microbatches=1 placement=0,3/1,2\n0: 0F0 3F0 3B0 0B0\n1: 1F0 2F0 2B0 1B0\n"
    order = resolve(text)
    assert order.place(2, replicas=2) == Placement(((0, 3), (1, 2)), 2)
    made = order.build(order.place(2), 1, ("never",) * 4, ((0, 2),), ((0, 2), (2, 0)))
    check(made)
    assert "0>S0@2" in str(made)
    assert "2>TIE0@0" in str(made)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("0F0 0>A0", "0>A0 0F0", "worker 0: 0>A0 stands where pipeworker places 0F0; leave out"),
        (" 0>T1@1", "", "worker 0: 0L0 stands where pipeworker places 0>T1@1"),
        ("1>G1", "1>G1 1>G0", "worker 1: 1>G0 stands where pipeworker places the end of the line"),
        (" 1>G1", "", "worker 1: the end of the line stands where pipeworker places 1>G1"),
    ],
)
def test_connections_that_stand_elsewhere_are_rejected(old: str, new: str, why: str) -> None:
    text = str(build("gpipe", 2, 2, "never"))
    assert text.count(old) == 1
    with pytest.raises(ScheduleError) as raised:
        resolve(text.replace(old, new))
    assert str(raised.value).startswith(why)


def test_a_forward_only_text_is_no_order() -> None:
    with pytest.raises(ScheduleError, match="it is forward-only"):
        resolve(str(forward_only(Placement.identity(2))))
