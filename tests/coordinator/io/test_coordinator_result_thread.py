"""A thread that performs slow work beside the coordinator's loop."""

from __future__ import annotations

import select
import threading
from functools import partial

import pytest

from pipeworker.coordinator.io.result_thread import ResultThread


def test_tasks_run_in_order_and_their_results_are_handled_by_the_loop() -> None:
    disk, go, order = ResultThread("disk"), threading.Event(), list[str]()
    handled: list[tuple[int, threading.Thread]] = []

    def work(number: int) -> int:
        assert go.wait(60)
        order.append(f"task {number}")
        return number

    for number in (1, 2):
        disk.submit(
            partial(work, number),
            lambda found: handled.append((found, threading.current_thread())),
        )
    disk.handle_results()
    assert not select.select([disk.reads], [], [], 0)[0]
    assert (order, handled) == ([], [])
    go.set()
    while len(handled) < 2:
        assert select.select([disk.reads], [], [], 60)[0]
        disk.handle_results()
    assert order == ["task 1", "task 2"]
    assert handled == [(number, threading.current_thread()) for number in (1, 2)]
    assert not select.select([disk.reads], [], [], 0)[0]


def test_the_loop_raises_the_error_of_a_task_and_later_tasks_are_performed() -> None:
    disk, handled = ResultThread("disk"), list[int]()
    disk.submit(lambda: 1 // 0, handled.append)
    assert select.select([disk.reads], [], [], 60)[0]
    with pytest.raises(ZeroDivisionError):
        disk.handle_results()
    disk.submit(lambda: 2, handled.append)
    while not handled:
        assert select.select([disk.reads], [], [], 60)[0]
        disk.handle_results()
    assert handled == [2]
