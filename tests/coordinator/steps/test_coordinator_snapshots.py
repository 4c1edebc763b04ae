"""Copies of the state: when, into which slot, and from which a job may resume."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.effects import JobState, Send
from pipeworker.coordinator.events import ParentReads
from pipeworker.coordinator.steps.snapshots import BUDGET, LACKED_MEMORY, Snapshots
from pipeworker.coordinator.waiting import State
from pipeworker.wire.lines import Snapshot, Warned
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.presence import Welcome
from pipeworker.wire.messages.step import RunStep, StepDone
from support.pure.coordinator import ScriptedJob, copies, messages_of, of, replaceable_job, saves


def copied(job: ScriptedJob, step: int, *whole: int) -> Copy | None:
    """Run a step, and return the copy that all workers are directed to make beside the next one.

    Args:
        job: the job.
        step: the step.
        whole: by rank, the step whose copy is complete; if omitted, the last requested copy is.
    """
    for rank in job.ranks:
        more = {"snapshot_step": whole[rank]} if whole else {}
        effects = job.done(rank, step, **more)
    requested = copies(effects)
    assert len({*requested}) == bool(requested)
    assert len(requested) in (0, len(job.ranks))
    return requested[0] if requested else None


# Slots.


def test_two_slots_are_used_in_turn() -> None:
    job = replaceable_job().running()
    assert [copied(job, step) for step in range(1, 6)] == [
        Copy(1, 0),
        Copy(2, 1),
        Copy(3, 0),
        Copy(4, 1),
        Copy(5, 0),
    ]


def test_the_last_snapshot_stays_until_the_next_is_complete_on_all_workers() -> None:
    job = replaceable_job().running()
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2, 1, 1) == Copy(2, 1)
    assert copied(job, 3, 2, 1) is None  # only 1 is complete on both
    assert copied(job, 4, 2, 1) is None
    assert copied(job, 5, 2, 2) == Copy(5, 0)
    assert [line.step for line in of(job.effects, Snapshot)] == [1, 2]


def test_without_a_snapshot_any_slot_may_be_used() -> None:
    job = replaceable_job().running()
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2, -1, 1) == Copy(2, 1)
    assert copied(job, 3, 1, 1) is None  # the first is complete now, the second is being copied
    assert of(job.effects, Snapshot) == [Snapshot(1, 0, 2)]
    assert copied(job, 4, 2, 2) == Copy(4, 0)
    assert of(job.effects, Snapshot) == [Snapshot(1, 0, 2), Snapshot(2, 1, 2)]


def test_the_newer_of_two_complete_copies_counts() -> None:
    job = replaceable_job().running()
    copied(job, 1)
    copied(job, 2, -1, -1)
    assert copied(job, 3, 2, 2) == Copy(3, 0)
    assert of(job.effects, Snapshot) == [Snapshot(2, 1, 2)]


def test_a_copy_that_one_worker_cannot_make_is_no_snapshot() -> None:
    """The worker makes no copy in that step; its later copies are of other steps."""
    job = replaceable_job().running()
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2, 1, -1) == Copy(2, 1)
    job.request_checkpoint()
    assert copied(job, 3, 2, -1) == Copy(3, 0, save=True)
    copied(job, 4, 2, 3)
    assert of(job.effects, Snapshot) == []
    assert copied(job, 5, 3, 3) == Copy(5, 1)
    assert of(job.effects, Snapshot) == [Snapshot(3, 0, 2)]
    for step in (6, 7, 8):
        assert copied(job, step, 5, 3) is None
    assert of(job.effects, Snapshot) == [Snapshot(3, 0, 2)]


def test_a_slot_that_is_being_written_is_not_reused() -> None:
    job = replaceable_job(checkpoint_every="2", checkpoint_busy="skip").running()
    copied(job, 1)
    assert copied(job, 2) == Copy(2, 1, save=True)
    assert copied(job, 3) == Copy(3, 0)
    assert copied(job, 4) is None  # 3 is the snapshot, and 2 is being written
    job.receive(Saved(0, 2))
    assert copied(job, 5) is None
    job.receive(Saved(1, 2))
    assert copied(job, 6) == Copy(6, 1, save=True)


def test_a_checkpoint_is_a_snapshot_too() -> None:
    job = replaceable_job(snapshot_every=50, checkpoint_every="2").running()
    assert [copied(job, step) for step in (1, 2)] == [None, Copy(2, 0, save=True)]
    copied(job, 3)
    assert of(job.effects, Snapshot) == [Snapshot(2, 0, 2)]


def test_a_checkpoint_replaces_an_unfinished_copy() -> None:
    """The copy is overwritten, and the last snapshot stays."""
    job = replaceable_job(checkpoint_every="4").running()
    copied(job, 1)
    copied(job, 2)
    assert copied(job, 3, 2, 2) == Copy(3, 0)
    assert copied(job, 4, 2, 2) == Copy(4, 0, save=True)
    assert copied(job, 5, 4, 3) is None
    assert of(job.effects, Snapshot)[-1] == Snapshot(2, 1, 2)
    assert copied(job, 6, 4, 4) == Copy(6, 1)
    assert of(job.effects, Snapshot)[-1] == Snapshot(4, 0, 2)


def test_a_checkpoint_prefers_a_slot_without_an_unfinished_copy() -> None:
    """If there is no snapshot yet, the unfinished copy will be the first one."""
    job = replaceable_job(checkpoint_every="2").running()
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2, -1, 1) == Copy(2, 1, save=True)
    copied(job, 3, 1, 1)
    assert of(job.effects, Snapshot) == [Snapshot(1, 0, 2)]


@pytest.mark.parametrize(("steps", "slot"), [(2, 1), (3, 0)])
def test_a_blocking_checkpoint_does_not_overwrite_the_last_snapshot(steps: int, slot: int) -> None:
    """A worker may be lost while the checkpoint is written."""
    job = replaceable_job(steps=steps).running()
    for step in range(1, steps + 1):
        job.step(step)
    assert [advance.next for advance in saves(job.effects)] == [Save(steps, slot)] * 2
    job.exited(1, -9)
    job.join()
    assert job.sent(1, Welcome)[-1].restore == Restore(steps - 1, slot=1 - slot, ranks=2)


def test_a_slot_used_by_a_checkpoint_holds_no_earlier_copy() -> None:
    """The unfinished copy is completed and then overwritten."""
    job = replaceable_job(checkpoint_every="1", checkpoint_busy="wait").running()
    assert copied(job, 1) == Copy(1, 0, save=True)
    assert copied(job, 2, -1, -1) == Copy(2, 1, save=True)
    copied(job, 3, -1, -1)
    assert [advance.next for advance in saves(job.effects)] == [Save(3, 0)] * 2
    for step in (1, 2, 3):
        job.saved(step)
        job.checkpoint_committed(step)
    assert job.state() is State.STEPPING
    copied(job, 4, 1, 1)
    assert of(job.effects, Snapshot) == []


def test_with_one_slot_there_are_no_snapshots() -> None:
    for job in (
        ScriptedJob(2, steps=99, snapshot_every=1).running(),
        ScriptedJob(2, steps=99, snapshot_every=1, max_restarts=0, replaceable=True).running(),
    ):
        assert [copied(job, step) for step in range(1, 5)] == [None] * 4
        job.request_checkpoint()
        assert copied(job, 5) == Copy(5, 0, save=True)
        assert copied(job, 6) is None
        assert of(job.effects, Snapshot) == []


# Intervals.


def test_every_so_many_steps() -> None:
    job = replaceable_job(snapshot_every=3, steps=99).running()
    copied_steps = [copy.step for step in range(1, 12) if (copy := copied(job, step))]
    assert copied_steps == [3, 6, 9]


def test_no_snapshot_is_taken_within_a_step() -> None:
    """Even if the last one is long ago."""
    job = replaceable_job(accumulate=3, snapshot_every=1).running()
    for step in (1, 2, 3):
        assert copied(job, step) is None
        assert copied(job, step) is None
        assert copied(job, step) == Copy(step, (step - 1) % 2)
    for advance in messages_of(job.effects, Advance):
        beside = advance.next
        assert not advance.copy or (isinstance(beside, RunStep) and beside.first == 0)


def test_a_snapshot_follows_the_evaluation_of_its_step() -> None:
    job = replaceable_job(evaluate_every=1).running()
    assert copied(job, 1) is None
    assert copies(job.evaluated(1)) == [Copy(1, 0, save=True)] * 2
    job.saved()
    assert copied(job, 2) is None
    assert copies(job.evaluated(2)) == [Copy(2, 1)] * 2


def test_another_copy_follows_one_that_is_torn() -> None:
    job = replaceable_job().running()
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2) == Copy(2, 1)
    job.done(0, 3, snapshot_step=2)
    effects = job.done(1, 3, snapshot_step=1, snapshot_torn=2)
    assert copies(effects) == [Copy(3, 1)] * 2
    assert copied(job, 4) == Copy(4, 0)
    assert [line.step for line in of(job.effects, Snapshot)] == [1, 3]


def test_a_snapshot_that_lacks_memory_causes_one_warning() -> None:
    job = replaceable_job().running()
    assert copied(job, 1) == Copy(1, 0)
    for step in (2, 3):
        job.done(0, step, snapshot_step=-1)
        job.done(1, step, snapshot_step=-1, snapshot_lacked_memory=True)
    assert [warned.text for warned in of(job.effects, Warned)] == [LACKED_MEMORY]
    assert not of(job.effects, Snapshot)


def ran(snapshots: Snapshots, step: int, *seconds: float) -> None:
    """Complete the copy of a step after these seconds of work, by rank."""
    slot = snapshots.free_slot
    assert slot is not None
    snapshots.begin_copy(JobState(step), slot)
    snapshots.step_done(
        [
            StepDone(rank, step + 1, (), (), (), 0.0, 0.0, 0, None, step, spent)
            for rank, spent in enumerate(seconds)
        ]
    )


def test_the_interval_depends_on_the_cost_of_a_copy() -> None:
    """The cheapest of the last four copies counts; before that every step is copied."""
    snapshots = Snapshots(2, cores=2)
    for step, cost in enumerate((0.9, 0.2, 0.4, 0.3), 1):
        assert snapshots.interval(1.0) == 1
        ran(snapshots, step, cost, 0.1)
    assert snapshots.interval(1.0) == 20  # 0.2 s of 20 times 1 s
    assert snapshots.interval(1.0) * 1.0 * BUDGET == 0.2
    assert snapshots.interval(1.02) == 20
    assert snapshots.interval(0.98) == 21
    assert snapshots.interval(100.0) == 1
    assert snapshots.interval(1e-9) == 1000
    assert snapshots.interval(0.0) == 1
    for step in (5, 6, 7, 8):
        ran(snapshots, step, 0.4, 0.1)
    assert snapshots.interval(1.0) == 40


def test_copies_that_cost_nothing_are_a_second_apart() -> None:
    snapshots = Snapshots(2)
    for step in range(1, 5):
        assert snapshots.interval(0.1) == 1
        ran(snapshots, step, 1e-6)
    assert [snapshots.interval(seconds) for seconds in (0.05, 0.2, 1.0, 9.0)] == [20, 5, 1, 1]


def test_shared_cores_multiply_the_cost_of_a_copy() -> None:
    alone, shared = Snapshots(2, cores=4), Snapshots(2, cores=2)
    for step in range(1, 5):
        for snapshots in (alone, shared):
            ran(snapshots, step, *[0.2] * 4)
    assert alone.interval(1.0) == 20
    assert shared.interval(1.0) == 40


def test_a_snapshot_is_due_an_interval_after_the_last_one() -> None:
    snapshots = Snapshots(2)
    for step in (1, 2, 3, 4):
        assert snapshots.is_due(step, 1.0)
        ran(snapshots, step, 0.2)
    assert not snapshots.is_due(23, 1.0)
    assert snapshots.is_due(24, 1.0)
    assert snapshots.is_due(5, 50.0)  # one long step suffices
    user = Snapshots(2, every=7)
    assert not user.is_due(6, 1.0)
    assert user.is_due(7, 1.0)
    assert not Snapshots(1, every=1).is_due(7, 1.0)


# The state to resume from.


def written(snapshots: Snapshots, step: int, slot: int = 1) -> None:
    """Complete a checkpoint."""
    snapshots.begin_write(JobState(step), slot, 1)
    snapshots.part_written(Saved(0, step))
    assert snapshots.checkpoint_ended(step, f"checkpoints/{step}")


def test_the_newest_complete_state_is_resumed_from() -> None:
    snapshots = Snapshots(2)
    assert snapshots.newest is None
    written(snapshots, 3)
    assert snapshots.newest == (JobState(3), Restore(3, "checkpoints/3"))
    ran(snapshots, 5, 0.1, 0.1)
    assert snapshots.newest == (JobState(5), Restore(5, slot=0, ranks=2))
    written(snapshots, 6)
    assert snapshots.newest == (JobState(6), Restore(6, "checkpoints/6"))


def test_memory_is_preferred_to_disk_for_the_same_step() -> None:
    snapshots = Snapshots(2)
    ran(snapshots, 5, 0.1)
    written(snapshots, 5, slot=0)
    assert snapshots.newest == (JobState(5), Restore(5, slot=0, ranks=1))


def test_a_failed_checkpoint_is_not_resumed_from() -> None:
    snapshots = Snapshots(2)
    snapshots.begin_write(JobState(4), 1, 2)
    snapshots.part_written(Saved(0, 4, error="no space left"))
    snapshots.part_written(Saved(1, 4))
    assert not snapshots.checkpoint_ended(4, "checkpoints/4")
    snapshots.begin_write(JobState(5), 1, 1)
    snapshots.part_written(Saved(0, 5))
    assert snapshots.checkpoint_ended(5, "")
    assert snapshots.newest is None


def test_unfinished_copies_are_discarded_when_workers_are_lost() -> None:
    snapshots = Snapshots(2)
    ran(snapshots, 1, 0.1)
    snapshots.begin_copy(JobState(2), 1)
    snapshots.begin_write(JobState(2), 1, 2)
    assert snapshots.workers_lost() == [2]
    snapshots.step_done([StepDone(0, 9, (), (), (), 0.0, 0.0, 0, None, 8)])
    assert snapshots.newest == (JobState(1), Restore(1, slot=0, ranks=1))
    assert snapshots.part_written(Saved(0, 2)) is None
    assert snapshots.free_slot == 1


def test_a_snapshot_is_reported_before_its_predecessor_is_overwritten() -> None:
    """The launcher knows it, in case the coordinator is lost."""
    job = replaceable_job().running()
    reported: dict[int, int] = {}  # by slot, the step that the launcher would resume from
    for step in range(1, 6):
        for effect in job.step(step, snapshot_step=step - 1):
            match effect:
                case Snapshot():
                    reported = {effect.slot: effect.step}
                case Send(_, Advance(_, _, copy)) if copy is not None:
                    assert copy.slot not in reported
                    assert copy.step == step
        assert step == 1 or list(reported.values()) == [step - 1]


def test_the_snapshot_that_a_suspended_launcher_knows_is_not_overwritten() -> None:
    """The line about the next one would wait until the launcher reads."""
    job = replaceable_job(checkpoint_every="4", checkpoint_busy="skip").running()
    assert [copied(job, step) for step in (1, 2)] == [Copy(1, 0), Copy(2, 1)]
    job.handle(ParentReads(False))
    assert [copied(job, step) for step in (3, 4, 5)] == [None] * 3
    assert of(job.effects, Snapshot) == [Snapshot(1, 0, 2), Snapshot(2, 1, 2)]
    job.handle(ParentReads(True))
    assert copied(job, 6) == Copy(6, 0)
    assert copied(job, 7) == Copy(7, 1)


def test_a_suspended_launcher_that_knows_no_snapshot_learns_of_the_first_one() -> None:
    job = replaceable_job().running()
    job.handle(ParentReads(False))
    assert copied(job, 1) == Copy(1, 0)
    assert copied(job, 2) == Copy(2, 1)
    assert [copied(job, step) for step in (3, 4, 5)] == [None] * 3
    assert of(job.effects, Snapshot)[:1] == [Snapshot(1, 0, 2)]


def test_a_suspended_launcher_skips_no_checkpoint_that_is_due_by_its_step() -> None:
    job = replaceable_job(checkpoint_every="4").running()
    assert [copied(job, step) for step in (1, 2)] == [Copy(1, 0), Copy(2, 1)]
    job.handle(ParentReads(False))
    assert copied(job, 3) is None
    job.step(4)
    assert [advance.next for advance in saves(job.effects)] == [Save(4, 0)] * 2
    job.saved(4)
    job.checkpoint_committed(4)
    assert job.state() is State.STEPPING


def test_the_last_checkpoint_may_overwrite_the_snapshot_that_a_suspended_launcher_knows() -> None:
    job = replaceable_job(steps=4).running()
    for step in (1, 2):
        job.step(step)
    job.handle(ParentReads(False))
    for step in (3, 4):
        job.step(step)
    assert [advance.next for advance in saves(job.effects)] == [Save(4, 0)] * 2
