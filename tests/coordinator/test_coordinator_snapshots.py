"""Copies of the state: when, in which memory, and what may be gone back to."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.states import State
from pipeworker.coordinator.steps.snapshots import BUDGET, Mark, Snapshots
from pipeworker.wire.lines import Snapshot
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.presence import Welcome
from pipeworker.wire.messages.step import RunStep, StepDone
from support.coordinator import Scripted, copies, of, of_messages, replaced, saves


def copied(job: Scripted, step: int, *whole: int) -> Copy | None:
    """What is copied after a step, at whose end these are whole, by rank; else all that was told.

    All are told the same.
    """
    for rank in job.ranks:
        more = {"copied": whole[rank]} if whole else {}
        effects = job.done(rank, step, **more)
    told = copies(effects)
    assert len({*told}) == bool(told)
    assert len(told) in (0, len(job.ranks))
    return told[0] if told else None


# Which memory.


def test_two_memories_take_turns() -> None:
    job = replaced().running()
    assert [copied(job, step) for step in range(1, 6)] == [
        Copy(1, 0),
        Copy(2, 1),
        Copy(3, 0),
        Copy(4, 1),
        Copy(5, 0),
    ]


def test_the_last_snapshot_stays_until_the_next_one_is_whole_on_all_workers() -> None:
    job = replaced().running()
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2, 1, 1) == Copy(2, 1)
    assert copied(job, 3, 2, 1) is None  # 1 is all that both have
    assert copied(job, 4, 2, 1) is None
    assert copied(job, 5, 2, 2) == Copy(5, 0)
    assert [line.step for line in of(job.effects, Snapshot)] == [1, 2]


def test_until_there_is_a_snapshot_any_memory_may_be_copied_into() -> None:
    job = replaced().running()
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2, -1, 1) == Copy(2, 1)
    assert copied(job, 3, 1, 1) is None  # the first is one now, the second on its way
    assert of(job.effects, Snapshot) == [Snapshot(1, 0, 2)]
    assert copied(job, 4, 2, 2) == Copy(4, 0)
    assert of(job.effects, Snapshot) == [Snapshot(1, 0, 2), Snapshot(2, 1, 2)]


def test_of_two_copies_that_are_whole_the_newer_one_counts() -> None:
    job = replaced().running()
    copied(job, 1)
    copied(job, 2, -1, -1)
    assert copied(job, 3, 2, 2) == Copy(3, 0)
    assert of(job.effects, Snapshot) == [Snapshot(2, 1, 2)]


def test_a_copy_for_which_a_worker_has_no_room_is_never_a_snapshot() -> None:
    """It makes none; what it copies later is another."""
    job = replaced().running()
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2, 1, -1) == Copy(2, 1)
    job.save_asked()
    assert copied(job, 3, 2, -1) == Copy(3, 0, save=True)
    copied(job, 4, 2, 3)
    assert of(job.effects, Snapshot) == []
    assert copied(job, 5, 3, 3) == Copy(5, 1)
    assert of(job.effects, Snapshot) == [Snapshot(3, 0, 2)]
    for step in (6, 7, 8):
        assert copied(job, step, 5, 3) is None
    assert of(job.effects, Snapshot) == [Snapshot(3, 0, 2)]


def test_what_is_written_to_disk_stays_until_it_is() -> None:
    job = replaced(checkpoint_every="2").running()
    copied(job, 1)
    assert copied(job, 2) == Copy(2, 1, save=True)
    assert copied(job, 3) == Copy(3, 0)
    assert copied(job, 4) is None  # 3 is the snapshot now, and 2 is being written
    job.says(Saved(0, 2))
    assert copied(job, 5) is None
    job.says(Saved(1, 2))
    assert copied(job, 6) == Copy(6, 1, save=True)


def test_a_checkpoint_is_a_snapshot_too() -> None:
    job = replaced(snapshot_every=50, checkpoint_every="2").running()
    assert [copied(job, step) for step in (1, 2)] == [None, Copy(2, 0, save=True)]
    copied(job, 3)
    assert of(job.effects, Snapshot) == [Snapshot(2, 0, 2)]


def test_a_checkpoint_does_not_give_way_to_a_snapshot_on_its_way() -> None:
    """It is copied over it, and the last snapshot stays."""
    job = replaced(checkpoint_every="4").running()
    copied(job, 1)
    copied(job, 2)
    assert copied(job, 3, 2, 2) == Copy(3, 0)
    assert copied(job, 4, 2, 2) == Copy(4, 0, save=True)
    assert copied(job, 5, 4, 3) is None
    assert of(job.effects, Snapshot)[-1] == Snapshot(2, 1, 2)
    assert copied(job, 6, 4, 4) == Copy(6, 1)
    assert of(job.effects, Snapshot)[-1] == Snapshot(4, 0, 2)


def test_a_checkpoint_goes_where_nothing_is_on_its_way_if_it_can() -> None:
    """There may be no snapshot yet; then the one on its way will be the first."""
    job = replaced(checkpoint_every="2").running()
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2, -1, 1) == Copy(2, 1, save=True)
    copied(job, 3, 1, 1)
    assert of(job.effects, Snapshot) == [Snapshot(1, 0, 2)]


@pytest.mark.parametrize(("steps", "slot"), [(2, 1), (3, 0)])
def test_what_is_saved_at_once_does_not_go_over_the_last_snapshot(steps: int, slot: int) -> None:
    """A worker may be lost while it is written."""
    job = replaced(steps=steps).running()
    for step in range(1, steps + 1):
        job.step(step)
    assert [told.next for told in saves(job.effects)] == [Save(steps, slot)] * 2
    job.exited(1, -9)
    job.join()
    assert job.sent(1, Welcome)[-1].restore == Restore(steps - 1, slot=1 - slot, ranks=2)


def test_a_memory_that_is_saved_from_holds_no_older_copy() -> None:
    """What was on its way there is whole, and then overwritten."""
    job = replaced(checkpoint_every="1", checkpoint_busy="wait").running()
    assert copied(job, 1) == Copy(1, 0, save=True)
    copied(job, 2, -1, -1)
    assert [told.next for told in saves(job.effects)] == [Save(2, 0)] * 2
    job.saved(1)
    job.saved(2)
    job.committed(1)
    job.committed(2)
    assert job.state() is State.STEPPING
    copied(job, 3, 1, 1)
    assert of(job.effects, Snapshot) == []


def test_with_one_memory_there_are_no_snapshots() -> None:
    for job in (
        Scripted(2, steps=99, snapshot_every=1).running(),
        Scripted(2, steps=99, snapshot_every=1, restarts=0, replaceable=True).running(),
    ):
        assert [copied(job, step) for step in range(1, 5)] == [None] * 4
        job.save_asked()
        assert copied(job, 5) == Copy(5, 0, save=True)
        assert copied(job, 6) is None
        assert of(job.effects, Snapshot) == []


# When.


def test_every_so_many_steps() -> None:
    job = replaced(snapshot_every=3, steps=99).running()
    taken = [copy.step for step in range(1, 12) if (copy := copied(job, step))]
    assert taken == [3, 6, 9]


def test_a_snapshot_is_never_of_a_step_that_is_half_done() -> None:
    """Also where the last one is long ago."""
    job = replaced(accumulate=3, snapshot_every=1).running()
    for step in (1, 2, 3):
        assert copied(job, step) is None
        assert copied(job, step) is None
        assert copied(job, step) == Copy(step, (step - 1) % 2)
    for advance in of_messages(job.effects, Advance):
        beside = advance.next
        assert not advance.copy or (isinstance(beside, RunStep) and beside.first == 0)


def test_a_snapshot_comes_behind_the_evaluation_of_its_step() -> None:
    job = replaced(evaluate_every=1).running()
    assert copied(job, 1) is None
    assert copies(job.evaluated(1)) == [Copy(1, 0)] * 2


def ran(snapshots: Snapshots, step: int, *seconds: float) -> None:
    """A copy of a step was whole after so many seconds of work, by rank."""
    slot = snapshots.free
    assert slot is not None
    snapshots.copy(Mark(step), slot)
    snapshots.ran(
        [
            StepDone(rank, step + 1, (), (), (), 0.0, 0.0, 0, None, step, spent)
            for rank, spent in enumerate(seconds)
        ]
    )


def test_how_often_is_chosen_by_what_a_copy_costs() -> None:
    """The cheapest of the last four counts; until there are four, each step is copied."""
    snapshots = Snapshots(2, cores=2)
    for step, cost in enumerate((0.9, 0.2, 0.4, 0.3), 1):
        assert snapshots.rate(0.5) == 1
        ran(snapshots, step, cost, 0.1)
    assert snapshots.rate(0.5) == 20  # 0.2 s of 20 times 0.5 s
    assert snapshots.rate(0.5) * 0.5 * BUDGET == 0.2
    assert snapshots.rate(0.51) == 20
    assert snapshots.rate(0.49) == 21
    assert snapshots.rate(100.0) == 1
    assert snapshots.rate(1e-9) == 1000
    assert snapshots.rate(0.0) == 1
    for step in (5, 6, 7, 8):
        ran(snapshots, step, 0.4, 0.1)
    assert snapshots.rate(0.5) == 40


def test_workers_that_share_cores_pay_for_each_others_copies() -> None:
    alone, shared = Snapshots(2, cores=4), Snapshots(2, cores=2)
    for step in range(1, 5):
        for snapshots in (alone, shared):
            ran(snapshots, step, *[0.2] * 4)
    assert alone.rate(0.5) == 20
    assert shared.rate(0.5) == 40


def test_it_is_time_again_so_many_steps_behind_the_last_snapshot() -> None:
    snapshots = Snapshots(2)
    for step in (1, 2, 3, 4):
        assert snapshots.due(step, 0.5)
        ran(snapshots, step, 0.2)
    assert not snapshots.due(23, 0.5)
    assert snapshots.due(24, 0.5)
    assert snapshots.due(5, 50.0)  # a long step pays for it at once
    user = Snapshots(2, every=7)
    assert not user.due(6, 0.5)
    assert user.due(7, 0.5)
    assert not Snapshots(1, every=1).due(7, 0.5)


# What is gone back to.


def written(snapshots: Snapshots, step: int, slot: int = 1) -> None:
    """A checkpoint is complete."""
    snapshots.write(Mark(step), slot, 1)
    snapshots.wrote(0, step, (), "")
    assert snapshots.saved(step, f"checkpoints/{step}")


def test_the_newest_of_what_is_whole_is_gone_back_to() -> None:
    snapshots = Snapshots(2)
    assert snapshots.newest is None
    written(snapshots, 3)
    assert snapshots.newest == (Mark(3), Restore(3, "checkpoints/3"))
    ran(snapshots, 5, 0.1, 0.1)
    assert snapshots.newest == (Mark(5), Restore(5, slot=0, ranks=2))
    written(snapshots, 6)
    assert snapshots.newest == (Mark(6), Restore(6, "checkpoints/6"))


def test_of_equals_memory_goes_before_disk() -> None:
    snapshots = Snapshots(2)
    ran(snapshots, 5, 0.1)
    written(snapshots, 5, slot=0)
    assert snapshots.newest == (Mark(5), Restore(5, slot=0, ranks=1))


def test_what_cannot_be_completed_is_not_gone_back_to() -> None:
    snapshots = Snapshots(2)
    snapshots.write(Mark(4), 1, 2)
    snapshots.wrote(0, 4, (), "no space left")
    snapshots.wrote(1, 4, (), "")
    assert not snapshots.saved(4, "checkpoints/4")
    snapshots.write(Mark(5), 1, 1)
    snapshots.wrote(0, 5, (), "")
    assert snapshots.saved(5, "")
    assert snapshots.newest is None


def test_what_was_under_way_when_workers_were_lost_is_nothing() -> None:
    snapshots = Snapshots(2)
    ran(snapshots, 1, 0.1)
    snapshots.copy(Mark(2), 1)
    snapshots.write(Mark(2), 1, 2)
    assert snapshots.lost() == [2]
    snapshots.ran([StepDone(0, 9, (), (), (), 0.0, 0.0, 0, None, 8)])
    assert snapshots.newest == (Mark(1), Restore(1, slot=0, ranks=1))
    assert snapshots.wrote(0, 2, (), "") is None
    assert snapshots.free == 1
