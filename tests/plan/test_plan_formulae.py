"""The registered schedules against the published formulae: a step's duration, and graphs held.

K workers, M micro-batches; F, I and W are the durations of a forward and of the parts of a backward
on the stages of a whole worker. The durations asserted are those of whole steps: an optimizer step
needs the gradients of all stages, so that the next step cannot begin in this one's drain.
"""

from __future__ import annotations

import pytest

from support.makespans import checked, makespan, peak_graphs

SHAPES = [(1, 1), (1, 5), (2, 1), (3, 2), (3, 4), (4, 4), (4, 8), (5, 23), (8, 9), (8, 32)]
PRICES = [(1, 1, 1), (1, 1, 0), (2, 3, 2), (1, 2, 1)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("workers", "microbatches"), SHAPES)
def test_gpipe_and_1f1b_take_equally_long(name: str, workers: int, microbatches: int) -> None:
    """(M + K - 1)(F + B): Huang et al. 2019; Narayanan et al. 2021."""
    schedule = checked(name, workers, microbatches)
    for forward, inputs, weights in PRICES:
        whole = forward + inputs + weights
        found = makespan(schedule, forward, inputs, weights)
        assert found == (microbatches + workers - 1) * whole


@pytest.mark.parametrize(("workers", "microbatches"), SHAPES)
def test_1f1b_holds_as_many_microbatches_as_workers_follow(workers: int, microbatches: int) -> None:
    eager, filled = (checked(name, workers, microbatches) for name in ("1f1b", "gpipe"))
    for worker in range(workers):
        assert peak_graphs(eager, worker) == min(microbatches, workers - worker)
        assert peak_graphs(filled, worker) == microbatches


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize(
    ("workers", "microbatches"),
    [(1, 3), (2, 2), (2, 5), (3, 4), (4, 7), (4, 8), (8, 13), (8, 23), (8, 32), (16, 47)],
)
def test_interleaved_stages_divide_the_bubble(
    workers: int, microbatches: int, virtual: int
) -> None:
    """(K - 1)(F + B) / V, for any M of at least K: Narayanan et al. 2021, for multiples of K."""
    schedule = checked("interleaved-1f1b", workers, microbatches, virtual=virtual)
    for prices in PRICES:
        steady, bubble = microbatches * virtual * sum(prices), (workers - 1) * sum(prices)
        assert makespan(schedule, *prices) == steady + bubble


def test_rounds_that_are_no_multiple_of_the_workers_leave_no_gap() -> None:
    """Rounds of exactly K take 24 here, and the best that is known took 21."""
    assert makespan(checked("interleaved-1f1b", 3, 4), 1, 1, 0) == 20


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("virtual", [2, 3])
def test_interleaved_stages_hold_a_little_more(workers: int, virtual: int) -> None:
    """K (1 + (K - 1) / (K V)) micro-batches of a whole worker, so V times as many graphs."""
    schedule = checked("interleaved-1f1b", workers, 4 * workers, virtual=virtual)
    assert peak_graphs(schedule, 0) == workers * virtual + workers - 1


def test_one_stage_a_worker_interleaves_nothing() -> None:
    schedule, single = checked("interleaved-1f1b", 4, 9, virtual=1), checked("1f1b", 4, 9)
    assert schedule.workers == single.workers
