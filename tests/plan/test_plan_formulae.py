"""The registered schedules against the published formulae: a step's duration, and graphs held.

K workers, M micro-batches; F, I and W are the durations of a forward and of the parts of a backward
on the stages of a whole worker. The durations asserted are those of whole steps: an optimizer step
needs the gradients of all stages, so that the next step cannot begin in this one's drain.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeworker.plan.actions import Kind
from pipeworker.plan.check import check
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.recompute import RECOMPUTE_MODES
from support.draws import draws
from support.pure.makespans import checked, makespan, peak_graphs
from support.slow import mostly_slow, slow

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
    [
        *((1, 3), (2, 5), (3, 4), (4, 7), (8, 32)),
        *(pytest.param(*size, marks=slow) for size in [(2, 2), (4, 8), (8, 13), (8, 23), (16, 47)]),
    ],
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
    """The bound. Published: 24 with rounds of K, 22 with rounds of equal size."""
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


@pytest.mark.parametrize("prices", [(1, 1, 1), (1, 2, 1), (2, 3, 2), (3, 2, 1)])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 4), (2, 5), (4, 8), (5, 23), (8, 9)])
def test_zb_h1_has_the_bubble_without_the_weight_parts(
    workers: int, microbatches: int, prices: tuple[int, int, int]
) -> None:
    """(K - 1)(F + I - W) for M of at least K, and K micro-batches: Qi et al. 2023, table 2."""
    forward, inputs, weights = prices
    schedule = checked("zb-h1", workers, microbatches)
    bubble = (workers - 1) * (forward + inputs - weights)
    assert makespan(schedule, *prices) == microbatches * sum(prices) + bubble
    for worker in range(workers):
        assert peak_graphs(schedule, worker) <= workers


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("workers", "microbatches"), SHAPES)
def test_no_step_is_shorter_than_its_bound(name: str, workers: int, microbatches: int) -> None:
    """M (F + I + W) + max((K - 1) F, (K - 1)(F + I) - (c - 1) F).

    The last worker begins after K - 1 forwards. The first gradient reaches the first worker after
    (K - 1)(F + I) more than its own forward, and with at most c graphs it has c - 1 forwards to run
    until then; all else comes later. ZB-H2 shortens no step, because ZB-H1 meets the bound.
    """
    schedule = checked(name, workers, microbatches)
    for forward, inputs, weights in PRICES:
        held = peak_graphs(schedule, 0)
        fill = (workers - 1) * forward
        waiting = (workers - 1) * (forward + inputs) - (held - 1) * forward
        bound = microbatches * (forward + inputs + weights) + max(fill, waiting)
        found = makespan(schedule, forward, inputs, weights)
        assert found >= bound
        if name == "zb-h1" and forward == inputs == weights:
            assert found == bound


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 2), (4, 4), (4, 16), (5, 23), (8, 9)])
def test_zbv_only_waits_while_the_pipeline_fills(workers: int, microbatches: int) -> None:
    """(K - 1) F of one of the two stages, the bound, and K micro-batches: Qi et al. 2023."""
    schedule = checked("zbv", workers, microbatches)
    assert makespan(schedule, 1, 1, 1) == 6 * microbatches + workers - 1
    assert max(peak_graphs(schedule, worker) for worker in range(workers)) == 2 * workers


@pytest.mark.parametrize("workers", mostly_slow([2, 16, 3, 5, 8, 4, 9, 6], 2))
@pytest.mark.parametrize("rounds", [1, 3])
def test_v_half_has_half_of_the_memory_and_of_the_bubble(workers: int, rounds: int) -> None:
    """(K + 2) // 2 micro-batches, each two graphs: Qi et al. 2024 (2405.15362)."""
    count = rounds * workers
    schedule, eager = checked("v-half", workers, count), checked("1f1b", workers, count)
    bubble = makespan(schedule, 1, 1, 1) - 6 * count
    assert bubble <= (makespan(eager, 2, 2, 2) - 6 * count) / 2
    limit = 2 * ((workers + 2) // 2)
    assert max(peak_graphs(schedule, worker) for worker in range(workers)) <= limit
    if rounds > 1:
        assert peak_graphs(schedule, workers - 1) == limit


@pytest.mark.parametrize("workers", mostly_slow([2, 16, 3, 5, 8, 4, 9, 6], 2))
@pytest.mark.parametrize("rounds", [1, 3])
def test_v_min_has_a_third_of_the_memory(workers: int, rounds: int) -> None:
    """(K + 4) // 3 micro-batches, and a bubble of 2/3 of 1F1B's, and two units where K is 3n."""
    count = rounds * workers
    schedule = checked("v-min", workers, count)
    gap = 0 if workers % 3 else 2
    assert makespan(schedule, 1, 1, 1) - 6 * count == 4 * workers - 5 + gap
    limit = 2 * ((workers + 4) // 3)
    peaks = [peak_graphs(schedule, worker) for worker in range(workers)]
    assert max(peaks) <= limit
    if rounds > 1:
        assert limit in peaks


@pytest.mark.parametrize("prices", [(1, 1, 1), (2, 3, 2), (3, 2, 1), (1, 2, 1)])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 4), (2, 8), (4, 8), (5, 23), (8, 32)])
def test_dualpipev_is_within_its_formula(
    workers: int, microbatches: int, prices: tuple[int, int, int]
) -> None:
    """(K - 1)(F&B + B - 3 W) of a stage, and 2K + 1 graphs: DeepSeek-AI 2025, for M from 2K.

    Here F&B is F + B: the two run one after the other. What F sends travels while B runs, so that
    the other worker need not wait for both.
    """
    schedule = checked("dualpipev", workers, microbatches)
    forward, inputs, weights = prices
    whole = inputs + weights
    bubble = (workers - 1) * ((forward + whole) + whole - 3 * weights)
    assert makespan(schedule, *prices) <= 2 * microbatches * sum(prices) + bubble
    assert max(peak_graphs(schedule, worker) for worker in range(workers)) == 2 * workers + 1


@pytest.mark.parametrize("name", sorted({*ORDERS} - {"gpipe"}))
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 3), (4, 3), (4, 9), (8, 16)])
def test_a_worker_holds_one_recomputed_graph(name: str, workers: int, microbatches: int) -> None:
    """From its recompute to its weight part, which follows the input part at once."""
    schedule = checked(name, workers, microbatches, "always")
    for worker in range(workers):
        assert peak_graphs(schedule, worker) == 1
    live = check(schedule)
    assert set(live.activations) == {1}
    assert max(live.deferred) <= 1
    assert max(live.inputs) <= microbatches


@given(
    name=st.sampled_from(sorted(ORDERS)),
    workers=st.integers(1, 20),
    microbatches=st.integers(1, 50),
    mode=st.sampled_from(RECOMPUTE_MODES),
)
@settings(max_examples=draws(30))
def test_channels_of_four_frames_are_enough(
    name: str, workers: int, microbatches: int, mode: str
) -> None:
    schedule = checked(name, workers, microbatches, mode)
    count = sum(action.kind is Kind.FORWARD for order in schedule.workers for action in order)
    assert count == schedule.placement.stages * microbatches
