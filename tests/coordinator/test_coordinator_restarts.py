"""How many losses are too many."""

from __future__ import annotations

from pipeworker.coordinator.restarts import WINDOW, Restarts
from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.position import Phase, Position

GONE = Failure(Cause.LOST, "gone", 1)
ALL_USED = "2 restarts within an hour are all used (--restarts)"


def at(
    layer: int, *, step: int = 3, microbatch: int = 0, rank: int = 1, cause: Cause = Cause.LOST
) -> Failure:
    return Failure(cause, "gone", rank, Position(Phase.FORWARD, step, microbatch, layer))


def goes_on(restarts: Restarts, failure: Failure, now: float) -> str:
    """Why the job does not."""
    enough = restarts.enough(failure, now)
    if not enough:
        restarts.begin(f"gone at {now:g}", now)
    return enough


def test_so_many_within_an_hour() -> None:
    restarts = Restarts(2)
    assert [goes_on(restarts, GONE, now) for now in (0.0, 10.0, 20.0)] == ["", "", ALL_USED]
    assert restarts.causes == ["gone at 0", "gone at 10"]


def test_an_hour_later_a_loss_counts_no_more() -> None:
    restarts = Restarts(2)
    assert [goes_on(restarts, GONE, now) for now in (0.0, 10.0)] == ["", ""]
    assert goes_on(restarts, GONE, WINDOW - 0.1) == ALL_USED
    assert goes_on(restarts, GONE, WINDOW) == ""
    assert goes_on(restarts, GONE, WINDOW + 9.9) == ALL_USED
    assert goes_on(restarts, GONE, WINDOW + 10.0) == ""
    assert len(restarts.causes) == 4  # they are told all the same


def test_with_restarts_0_the_first_one_is_too_many() -> None:
    assert goes_on(Restarts(0), GONE, 0.0) == "--restarts 0"


def test_twice_at_the_same_place_is_no_accident() -> None:
    restarts = Restarts(9)
    assert goes_on(restarts, at(4), 0.0) == ""
    assert goes_on(restarts, at(4), 10.0) == "it happened again at the same place"


def test_another_place_is_another_one() -> None:
    restarts = Restarts(99)
    others = (at(4), at(5), at(4, step=4), at(4, microbatch=1), at(4, rank=0))
    for failure in (*others, at(4, cause=Cause.HUNG), at(4), at(5), at(4)):
        assert goes_on(restarts, failure, 0.0) == ""


def test_where_no_layer_is_computed_is_no_place() -> None:
    """A worker that is killed by hand while it waits, twice."""
    restarts = Restarts(9)
    assert [goes_on(restarts, at(-1), now) for now in (0.0, 1.0, 2.0)] == [""] * 3
