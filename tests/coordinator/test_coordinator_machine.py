"""The coordinator's decisions: events in, effects out, time by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.coordinator.effects import (
    Commit,
    Dropped,
    Effect,
    Ended,
    Log,
    Planned,
    Send,
    Status,
    Warn,
)
from pipeworker.coordinator.machine import (
    ECHO_GRACE,
    INTERRUPT_GRACE,
    JOIN_FACTOR,
    SILENT_AFTER,
    Exited,
    Machine,
    State,
)
from pipeworker.coordinator.scaler import Scaler
from pipeworker.job.options import Options
from pipeworker.plan.schedule import build, format_actions
from pipeworker.wire.messages import (
    Advance,
    Batch,
    Cause,
    Described,
    Evaluate,
    Evaluation,
    EvaluationDone,
    Failed,
    Failure,
    Finish,
    FromWorker,
    Heartbeat,
    Hello,
    Phase,
    Plan,
    Position,
    Ready,
    RunStep,
    Save,
    Saved,
    SkipRoute,
    StepDone,
    StepResult,
    TiedWeights,
    ToWorker,
    Update,
    Welcome,
)

T = TypeVar("T")

LAYERS = ("Linear", "ReLU", "Linear", "Tanh", "Linear")
BATCH = Batch(signature=1, samples=10, microbatches=4, epoch=0)
PATIENCE = 60.0
NOWHERE = Position()


class Job:
    """A machine, its workers as plain messages, and everything it ever did."""

    def __init__(self, stages: int = 2, **options: Any) -> None:
        options = {"microbatches": 4, "steps": 3, **options}
        self.options = Options("job.py", stages, **options)
        self.stages = stages
        self.now = 100.0
        self.machine = Machine(self.options, "runs/x", self.now)
        self.effects: list[Effect] = []

    def did(self, effects: list[Effect]) -> list[Effect]:
        self.effects += effects
        return effects

    def says(self, message: FromWorker, peer: bytes | None = None) -> list[Effect]:
        """A message arrives from the worker whose rank it bears, or from `peer`."""
        sender = b"w%d" % message.rank if peer is None else peer
        return self.did(self.machine.received(sender, message, self.now))

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        return self.did(self.machine.tick(self.now))

    def exited(self, rank: int, code: int, position: Position = NOWHERE) -> list[Effect]:
        return self.did(self.machine.exited(Exited(rank, code, position), self.now))

    def interrupt(self) -> list[Effect]:
        return self.did(self.machine.interrupt(self.now))

    # A happy life, in pieces.

    def join(self, *ranks: int) -> list[Effect]:
        for rank in ranks or range(self.stages):
            effects = self.says(Hello(rank, "host", 1000 + rank))
        return effects

    def describe(self, layers: tuple[str, ...] = LAYERS) -> list[Effect]:
        for rank in range(self.stages):
            effects = self.says(Described(rank, layers, ()))
        return effects

    def ready(self, batch: Batch | None = BATCH) -> list[Effect]:
        for rank in range(self.stages):
            message = Ready(rank, ("Linear", "ReLU"), 8, "cpu", batch if rank == 0 else None)
            effects = self.says(message)
        return effects

    def running(self) -> Job:
        self.join()
        self.describe()
        self.ready()
        assert self.machine.state is State.RUNNING
        return self

    def done(self, rank: int, step: int, **more: Any) -> list[Effect]:
        last = rank == self.stages - 1
        message = StepDone(
            rank,
            step,
            losses=(0.25, 0.5) if last else (),
            counts=(),
            squares=(1.0,),
            busy=0.5,
            learning_rate=0.1,
            peak_memory=100 * rank + step,
            batch=BATCH if rank == 0 else None,
        )
        return self.says(dataclasses.replace(message, **more))

    def step(self, step: int, **more: Any) -> list[Effect]:
        """Every stage is done; returns what the last one's message caused. `more` is for all."""
        for rank in range(self.stages):
            effects = self.done(rank, step, **more)
        return effects

    def saved(self) -> list[Effect]:
        for rank in range(self.stages):
            effects = self.says(Saved(rank, 3))
        return effects

    # What it did.

    def sent(self, rank: int, kind: type[T]) -> list[T]:
        return [m for m in sent_to(self.effects, rank) if isinstance(m, kind)]

    @property
    def ended(self) -> Ended:
        (ended,) = of(self.effects, Ended)
        return ended

    @property
    def failure(self) -> Failure:
        """Of a job that failed: told once, to everyone who joined."""
        assert self.ended.status is Status.FAILED
        assert self.ended.failure
        assert self.machine.state is State.ENDED
        finished = [s for s in of(self.effects, Send) if isinstance(s.message, Finish)]
        assert [s.peer for s in finished] == self.machine.peers
        for message in (s.message for s in finished):
            assert isinstance(message, Finish)
            assert message.exit_status == self.ended.exit_status
            assert message.reason.startswith(self.ended.failure.message)
        return self.ended.failure


def of(effects: list[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent_to(effects: list[Effect], rank: int) -> list[ToWorker]:
    return [effect.message for effect in of(effects, Send) if effect.peer == b"w%d" % rank]


# The happy life.


def test_a_whole_life() -> None:
    job = Job(stages=2, recompute="never")
    assert job.join(0)[1] == Send(b"w0", Welcome(job.options.to_json(), "runs/x"))
    assert job.join(1)[-1] == Log("all ranks joined")

    assert job.says(Described(0, LAYERS, ())) == []
    plans = job.says(Described(1, LAYERS, ()))
    edges = ("0>1/activation", "0>1/target", "1>0/gradient")
    assert of(plans, Send) == [
        Send(b"w0", Plan(0, 2, 0, 3, edges, ())),
        Send(b"w1", Plan(1, 2, 3, 5, edges, ())),
    ]
    assert "schedule gpipe is proven" in of(plans, Log)[0].text

    job.now += 5
    assert job.says(Ready(0, LAYERS[:3], 40, "cpu", BATCH)) == []
    planned, *first = job.says(Ready(1, LAYERS[3:], 20, "cpu", None))
    assert isinstance(planned, Planned)
    assert [stage.layers for stage in planned.stages] == [(0, 3), (3, 5)]
    assert planned.proof.bubble == pytest.approx(1 / 5)
    actions = [format_actions(stage) for stage in build("gpipe", 2, 4, "never").stages]
    assert first == [
        Send(b"w%d" % rank, Advance(None, RunStep(1, BATCH, False, actions[rank])))
        for rank in (0, 1)
    ]

    job.now += 2.0
    assert job.done(1, 1) == []
    onward = job.done(0, 1)
    assert [onward[0], onward[2]] == [
        Send(b"w%d" % rank, Advance(Update(1, 1.0), RunStep(2, BATCH, False, "")))
        for rank in (0, 1)
    ]
    assert onward[1:2] == [
        StepResult(
            step=1,
            loss=0.75,
            samples=10,
            seconds=2.0,
            samples_per_second=5.0,
            grad_norm=math.sqrt(2.0),
            lr=0.1,
            bubble=0.75,
            epoch=0,
        )
    ]

    job.now += 1.0
    assert sent_to(job.step(2), 0) == [Advance(Update(2, 1.0), RunStep(3, BATCH, True, ""))]
    assert sent_to(job.step(3), 1) == [Advance(Update(3, 1.0), None), Save(3)]
    assert job.machine.state is State.SAVING

    assert job.says(Saved(1, 3)) == []
    assert job.says(Saved(0, 3)) == [Commit(3)]
    assert job.did(job.machine.committed())[1:] == [
        Send(b"w0", Finish("", 0)),
        Send(b"w1", Finish("", 0)),
        Ended(Status.DONE, 0, 3, (3, 103), pytest.approx((0.75 + 0.5 + 0) / 3), None),
    ]
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2, 3]
    assert job.step(4) == job.join() == job.tick(1000) == job.exited(0, -9) == []
    assert job.interrupt() == job.machine.lost("x") == job.machine.defect("x") == []


@pytest.mark.parametrize("microbatches", [1, 4, 64])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_two_messages_a_worker_a_step(stages: int, microbatches: int) -> None:
    job = Job(stages, microbatches=microbatches, steps=50)
    job.join()
    job.describe()
    job.ready(dataclasses.replace(BATCH, microbatches=microbatches))
    batch = dataclasses.replace(BATCH, microbatches=microbatches)
    for step in range(1, 11):
        before = len(of(job.effects, Send))
        for rank in range(stages):  # one in
            job.done(rank, step, batch=batch if rank == 0 else None)
        assert len(of(job.effects, Send)) - before == stages  # one out
        for rank in range(stages):
            advance = job.sent(rank, Advance)[-1]
            assert advance.update == Update(step, 1.0)
            assert advance.run == RunStep(step + 1, batch, False, "")


@given(stages=st.integers(1, 5), data=st.data())
def test_no_update_before_every_stage_is_done(stages: int, data: st.DataObject) -> None:
    """All-or-none: in whatever order stages answer, the last answer alone moves the job on."""
    job = Job(stages).running()
    for step in (1, 2):
        order = data.draw(st.permutations(range(stages)))
        for rank in order[:-1]:
            assert job.done(rank, step) == []
            assert job.done(rank, step) == []  # said twice, counted once
        updates = [send.message for send in of(job.done(order[-1], step), Send)]
        assert [u.update for u in updates if isinstance(u, Advance)] == [Update(step, 1.0)] * stages


def test_no_update_when_a_stage_fails_instead() -> None:
    job = Job(3).running()
    job.done(0, 1)
    job.done(2, 1)
    job.says(Failed(1, Failure(Cause.USER, "no")))
    assert job.done(1, 1) == []
    assert not any(a.update for rank in range(3) for a in job.sent(rank, Advance))
    assert job.ended.steps == 0


def test_the_first_step_ends_the_data_of_one_pass() -> None:
    """Without --steps the job ends where the first stage has no next mini-batch."""
    job = Job(2, steps=None).running()
    assert job.step(1, batch=None)[0] == Send(
        b"w0", Advance(Update(1, 1.0, epoch_ended=True), None)
    )
    assert job.machine.state is State.SAVING


def test_a_smaller_batch_gets_its_own_actions_and_a_larger_one_again() -> None:
    small = dataclasses.replace(BATCH, microbatches=2, samples=2)
    job = Job(2, steps=None, recompute="never").running()
    job.step(1, batch=small)
    job.step(2, batch=small)
    job.step(3)
    run = [a.run.actions for a in job.sent(0, Advance) if a.run]
    four, two = (format_actions(build("gpipe", 2, m, "never").stages[0]) for m in (4, 2))
    assert run == [four, two, "", four]


def test_a_given_balance_is_used() -> None:
    job = Job(2, balance=(1, 4))
    job.join()
    job.describe()
    assert [(p.first, p.stop) for r in (0, 1) for p in job.sent(r, Plan)] == [(0, 1), (1, 5)]


# What a step comes to.


def stepped(job: Job, **more: Any) -> tuple[StepResult, float]:
    """The row of step 1 and the update's scale."""
    effects = job.step(1, **more)
    (row,) = of(effects, StepResult)
    (update,) = {a.update for a in job.sent(0, Advance) if a.update}
    return row, update.scale


def test_clipping_scales_to_the_norm_over_all_stages() -> None:
    row, scale = stepped(Job(2, clip_grad_norm=1.0).running(), squares=(6.0, 2.0))
    assert row.grad_norm == 4.0
    assert scale == 1.0 / (4.0 + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    assert stepped(Job(2, clip_grad_norm=4.1).running(), squares=(6.0, 2.0))[1] == 1.0
    assert stepped(Job(2).running(), squares=(6.0, 2.0))[1] == 1.0


def test_token_weighted_losses_divide_by_the_count() -> None:
    job = Job(1, clip_grad_norm=1.0).running()
    row, scale = stepped(job, losses=(6.0, 2.0), counts=(3.0, 1.0), squares=(64.0,))
    assert (row.loss, row.grad_norm) == (2.0, 2.0)
    assert scale == 1 / 4 * (1 / (2 + 1e-6))


@given(st.lists(st.floats(0, 1e300), min_size=4, max_size=12), st.integers(1, 3))
def test_the_norm_does_not_depend_on_the_grouping(squares: list[float], cut: int) -> None:
    one, two = Job(1).running(), Job(2).running()
    one.step(1, squares=tuple(squares))
    two.done(0, 1, squares=tuple(squares[:cut]))
    two.done(1, 1, squares=tuple(squares[cut:]))
    (a,), (b,) = of(one.effects, StepResult), of(two.effects, StepResult)
    assert a.grad_norm == b.grad_norm


def test_losses_add_left_to_right() -> None:
    """As the plain loop adds them; a compensated sum would give 1.0."""
    row, _ = stepped(Job(1).running(), losses=(0.1,) * 10)
    assert row.loss == 0.9999999999999999


@pytest.mark.parametrize(
    "odd",
    [
        {"squares": (math.inf,)},
        {"squares": (math.nan,)},
        {"squares": (1.7e308, 1.7e308)},  # finite, with a sum that is not
        {"counts": (math.inf, -math.inf)},
        {"counts": (0.0,)},
        {"losses": ()},
        {"learning_rate": math.nan},
    ],
    ids=str,
)
def test_odd_numbers_end_nothing(odd: dict[str, Any]) -> None:
    job = Job(2, clip_grad_norm=1.0).running()
    stepped(job, **odd)
    assert job.machine.state is State.RUNNING


def test_a_loss_that_is_not_finite_is_a_warning() -> None:
    job = Job(1).running()
    job.step(1, losses=(math.nan, 1.0))
    (warning,) = of(job.effects, Warn)
    assert "loss is nan at step 1" in warning.text
    assert "--stop-on-nan" in warning.text
    assert math.isnan(of(job.effects, StepResult)[0].loss)
    assert job.machine.state is State.RUNNING


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_stop_on_nan_ends_before_the_update(loss: float) -> None:
    job = Job(2, stop_on_nan=True).running()
    job.step(1)
    job.step(2, losses=(loss,))
    assert f"loss is {loss} at step 2" in job.failure.message
    assert job.failure.position == Position(Phase.LOSS, 2)
    assert job.ended.exit_status == 1
    assert [a.update for a in job.sent(0, Advance)] == [None, Update(1, 1.0)]
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2]


# Failures: the first cause is kept.

OURS = Position(Phase.BACKWARD, 1, 2, 3)


def test_a_failure_ends_the_job_at_once() -> None:
    job = Job(3).running()
    failure = Failure(Cause.USER, "layer 3 raised", -1, OURS, "Linear", "Traceback")
    job.says(Failed(2, failure))
    assert job.failure == dataclasses.replace(failure, rank=2)
    assert job.ended.exit_status == 1
    assert job.says(Failed(1, Failure(Cause.USER, "me too"))) == []


def test_an_echo_waits_for_its_cause() -> None:
    job = Job(3).running()
    job.says(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.says(Failed(2, Failure(Cause.PEER, "1>2 closed")))
    job.tick(ECHO_GRACE / 2)
    assert job.machine.state is State.RUNNING
    job.exited(1, -9, Position(Phase.FORWARD, 1, 0, 1))
    assert job.failure.message == "the worker of stage 1 was killed by signal 9"
    assert job.failure.cause is Cause.LOST
    assert job.failure.layer_class == ""  # layer 1 is not one of stage 1
    assert len([text for log in of(job.effects, Log) if "echo" in (text := log.text)]) == 2


def test_echoes_alone_name_who_went_silent() -> None:
    job = Job(3).running()
    job.now += SILENT_AFTER
    for rank in (0, 2):
        job.says(Failed(rank, Failure(Cause.PEER, "closed")))
    job.tick(ECHO_GRACE - 0.1)
    assert job.machine.state is State.RUNNING
    job.tick(0.1)
    assert job.failure.rank == 1
    assert job.failure.message == "the worker of stage 1 (pid 1001 on host) is gone"


def test_an_echo_without_any_cause_is_shown_as_it_is() -> None:
    job = Job(2).running()
    job.says(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.now += ECHO_GRACE
    job.says(Heartbeat(1, Position()))
    job.tick()
    assert job.failure.cause is Cause.PEER
    assert job.failure.message == "0>1 closed, and nobody reported why"


def test_a_signal_to_all_is_an_interrupt() -> None:
    job = Job(2).running()
    for rank in (0, 1):
        job.says(Failed(rank, Failure(Cause.SIGNAL, "SIGTERM")))
    job.tick(ECHO_GRACE)
    assert job.ended.status is Status.INTERRUPTED
    assert job.ended.exit_status == 130


def test_a_signal_to_one_is_a_loss() -> None:
    job = Job(2).running()
    job.says(Failed(1, Failure(Cause.SIGNAL, "the worker of stage 1 was ended by SIGTERM")))
    job.exited(1, 143)
    assert job.failure.cause is Cause.LOST
    assert "SIGTERM" in job.failure.message


@pytest.mark.parametrize(
    ("code", "how"),
    [(-11, "was killed by signal 11"), (3, "exited with status 3"), (0, "status 0")],
)
def test_an_exit_before_the_end_is_a_failure(code: int, how: str) -> None:
    job = Job(2).running()
    job.exited(1, code, Position(Phase.FORWARD, 1, 0, 3))
    assert how in job.failure.message
    assert (job.failure.rank, job.failure.layer_class) == (1, "Linear")
    assert job.ended.exit_status == 1


def test_silence_is_a_hang_that_names_the_stage() -> None:
    job = Job(3, worker_timeout=PATIENCE).running()
    stuck = Position(Phase.FORWARD, 1, 0, 2)
    job.says(Heartbeat(1, stuck))
    for _ in range(2):
        job.now += PATIENCE / 2
        for rank in (0, 2):
            job.says(Heartbeat(rank, Position()))
        job.tick()
    assert job.machine.state is State.RUNNING
    job.tick(0.1)
    assert job.failure.cause is Cause.HUNG
    assert job.failure.message == "stage 1 (pid 1001 on host) has not answered for 60 s"
    assert (job.failure.position, job.failure.layer_class) == (stuck, "Linear")


def test_missing_ranks_are_named() -> None:
    job = Job(4, worker_timeout=PATIENCE)
    job.join(0, 2)
    for _ in range(JOIN_FACTOR * 2):
        job.tick(PATIENCE / 2)
        job.says(Heartbeat(0, Position()))
        job.says(Heartbeat(2, Position()))
    assert job.machine.state is State.GATHERING
    job.tick(0.1)
    assert job.failure.message == "rank 1, 3 did not join within 300 s"


@pytest.mark.parametrize("event", ["abandoned", "lost", "defect"])
def test_what_a_job_cannot_do_without(event: str) -> None:
    job = Job(2).running()
    match event:
        case "abandoned":
            job.did(job.machine.abandoned(-1))
            assert job.failure.message == "the process that started the job is gone"
        case "lost":
            job.did(job.machine.lost("no fork server"))
            assert (job.failure.cause, job.failure.message) == (Cause.LOST, "no fork server")
        case "defect":
            job.did(job.machine.defect("disk full"))
            assert (job.failure.cause, job.failure.message) == (Cause.INTERNAL, "disk full")
    assert job.ended.exit_status == 1


def test_the_starter_that_is_a_worker_is_lost_as_one() -> None:
    job = Job(2).running()
    job.did(job.machine.abandoned(0))
    assert job.failure.message == "the worker of stage 0 (pid 1000 on host) is gone"


# Mistakes of the user.


@pytest.mark.parametrize(
    ("options", "layers", "why"),
    [
        ({"stages": 3}, LAYERS[:2], "model() has 2: use --stages 2"),
        ({"balance": (1, 2)}, LAYERS, "adds up to 3 layers"),
        ({"schedule": "zigzag"}, LAYERS, "unknown schedule 'zigzag'"),
        ({"recompute": "rarely"}, LAYERS, "unknown recompute mode"),
    ],
    ids=str,
)
def test_a_job_that_cannot_be_planned_is_the_users_mistake(
    options: dict[str, Any], layers: tuple[str, ...], why: str
) -> None:
    job = Job(**options)
    job.join()
    job.describe(layers)
    assert job.failure.cause is Cause.USAGE
    assert job.ended.exit_status == 2
    assert why in job.failure.message


def test_workers_must_agree_on_the_model() -> None:
    job = Job(2)
    job.join()
    job.says(Described(0, LAYERS, ()))
    job.says(Described(1, LAYERS[:4], ()))
    assert "different layers on different workers" in job.failure.message
    assert job.ended.exit_status == 2


def test_a_usage_error_of_a_worker_gives_exit_status_2() -> None:
    job = Job(2)
    job.join()
    job.says(Failed(1, Failure(Cause.USAGE, "loss is missing")))
    assert job.failure.rank == 1
    assert job.ended.exit_status == 2


# Interrupts.


def test_an_interrupt_takes_effect_at_the_end_of_the_step() -> None:
    job = Job(2).running()
    job.step(1)
    assert of(job.interrupt(), Ended) == []
    assert job.interrupt() == []  # once is enough
    job.done(0, 2)
    job.tick(INTERRUPT_GRACE)
    assert job.machine.state is State.RUNNING
    job.done(1, 2)
    assert job.ended == Ended(Status.INTERRUPTED, 130, 2, (2, 102), job.ended.bubble, None)
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2]
    assert sent_to(job.effects, 0)[-1] == Finish("interrupted", 130)


def test_an_interrupt_that_is_overdue_ends_the_step() -> None:
    job = Job(2).running()
    job.interrupt()
    job.done(0, 1)
    job.tick(INTERRUPT_GRACE + 0.1)
    assert job.ended.status is Status.INTERRUPTED
    assert job.ended.steps == 0


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_before_the_first_step_an_interrupt_ends_at_once(joined: int) -> None:
    job = Job(2)
    if joined:
        job.join(*range(joined))
    job.interrupt()
    assert job.ended.exit_status == 130


def test_an_interrupt_while_saving_lets_the_checkpoint_complete() -> None:
    job = Job(1, steps=1).running()
    job.step(1)
    job.interrupt()
    assert job.saved() == [Commit(1)]
    job.did(job.machine.committed())
    assert job.ended.status is Status.DONE


# What is not acted on.


def test_a_rank_joins_once() -> None:
    job = Job(2)
    job.join()
    for rank in (0, 2, -1):
        dropped, answer = job.says(Hello(rank, "host", 7), peer=b"late")
        assert isinstance(dropped, Dropped)
        assert answer == Send(b"late", Finish(f"rank {rank} is taken or not part of this job", 1))
        assert not job.machine.knows(b"late")
    assert job.machine.peers == [b"w0", b"w1"]
    job.describe()
    assert job.machine.state is State.BUILDING


@pytest.mark.parametrize(
    "message",
    [
        Described(0, LAYERS, ()),
        Ready(0, LAYERS, 1, "cpu", BATCH),
        Saved(0, 1),
        StepDone(0, 2, (), (), (), 0.0, 0.0, 0, BATCH),
        StepDone(0, 0, (), (), (), 0.0, 0.0, 0, BATCH),
    ],
    ids=lambda m: f"{type(m).__name__}-{getattr(m, 'step', '')}",
)
def test_what_comes_at_the_wrong_time_is_dropped(message: FromWorker) -> None:
    job = Job(2).running()
    assert [type(effect) for effect in job.says(message)] == [Dropped]
    assert of(job.done(1, 1), Send) == []
    assert len(of(job.done(0, 1), Send)) == 2


def test_a_worker_speaks_for_its_own_rank_alone() -> None:
    job = Job(2).running()
    job.done(0, 1)
    for peer in (b"w0", b"stranger"):
        done = StepDone(1, 1, (1.0,), (), (), 0.0, 0.0, 0, None)
        assert [type(effect) for effect in job.says(done, peer)] == [Dropped]
        failed = Failed(1, Failure(Cause.USER, "not me"))
        assert [type(effect) for effect in job.says(failed, peer)] == [Dropped]
    assert job.machine.state is State.RUNNING
    failed = Failed(0, Failure(Cause.USER, "it was the other one", rank=1))
    job.says(failed)
    assert job.failure.rank == 0


@given(data=st.data())
def test_no_order_of_events_breaks_the_machine(data: st.DataObject) -> None:
    """Whatever comes, in whatever order: one end at most, told to all who joined, then silence."""
    job = Job(2, worker_timeout=5.0)
    ranks = st.integers(-1, 2)
    batches = st.sampled_from([None, BATCH])
    causes = st.sampled_from(Cause)
    event = st.one_of(
        st.builds(Hello, ranks, st.just("host"), st.just(1)),
        st.builds(Described, ranks, st.just(LAYERS), st.just(())),
        st.builds(lambda rank, batch: Ready(rank, LAYERS, 1, "cpu", batch), ranks, batches),
        st.builds(
            lambda rank, step, batch: StepDone(rank, step, (1.0,), (), (1.0,), 0.1, 0.1, 1, batch),
            ranks,
            st.integers(0, 3),
            batches,
        ),
        st.builds(Saved, ranks, st.just(3)),
        st.builds(lambda rank, cause: Failed(rank, Failure(cause, "m")), ranks, causes),
        st.sampled_from(["interrupt", "exit", "tick", "commit"]),
    )
    start = data.draw(st.sampled_from([Job.join, Job.running, lambda job: None]))
    start(job)
    for chosen in data.draw(st.lists(event, max_size=25)):
        over = job.machine.state is State.ENDED
        match chosen:
            case "interrupt":
                effects = job.interrupt()
            case "exit":
                effects = job.exited(data.draw(st.integers(0, 1)), 1)
            case "tick":
                effects = job.tick(data.draw(st.sampled_from([0.2, 3.0, 10.0])))
            case "commit":
                committing = job.effects and isinstance(job.effects[-1], Commit) and not over
                effects = job.did(job.machine.committed()) if committing else []
            case _:
                effects = job.says(chosen)
        assert not (over and effects)
    ends = of(job.effects, Ended)
    assert len(ends) == (job.machine.state is State.ENDED)
    finished = [s.peer for s in of(job.effects, Send) if isinstance(s.message, Finish)]
    for peer in job.machine.peers:
        assert finished.count(peer) >= len(ends)


# Evaluation, accumulation, loss scale; skips and ties.


def evaluation(job: Job, step: int, loss: float = 0.5) -> list[Effect]:
    for rank in range(job.stages):
        result = Evaluation(step, loss, ("accuracy",), (0.75,))
        last = rank == job.stages - 1
        effects = job.says(EvaluationDone(rank, step, 1000, result if last else None))
    return effects


def test_an_evaluation_comes_after_the_update_and_before_the_next_step() -> None:
    job = Job(2, evaluate_every=2).running()
    job.step(1)
    effects = job.step(2)
    asked = Advance(Update(2, 1.0), None, Evaluate(2))
    assert [sent_to(effects, rank) for rank in (0, 1)] == [[asked], [asked]]
    assert job.says(StepDone(0, 2, (), (), (), 0.0, 0.1, 0, BATCH)) == []  # not awaited, no harm
    job.now += 5.0
    effects = evaluation(job, 2)
    result = Evaluation(2, 0.5, ("accuracy",), (0.75,))
    assert effects[0] == result
    assert sent_to(effects, 1) == [Advance(None, RunStep(3, BATCH, True, ""), None, result)]
    job.now += 1.0
    row = of(job.step(3), StepResult)[0]
    assert row.seconds == 1.0  # the evaluation is not part of the step


def test_an_evaluation_after_the_last_step_comes_before_the_save() -> None:
    job = Job(1, steps=1, evaluate_every=1).running()
    job.step(1)
    assert job.machine.state is State.RUNNING
    evaluated = Evaluation(1, 0.5, ("accuracy",), (0.75,))
    assert sent_to(evaluation(job, 1), 0) == [Advance(None, None, None, evaluated), Save(1)]


def test_an_interrupt_during_an_evaluation_ends_after_it() -> None:
    job = Job(2, evaluate_every=1).running()
    job.step(1)
    job.interrupt()
    assert job.machine.state is State.RUNNING
    evaluation(job, 1)
    assert job.ended.status is Status.INTERRUPTED


def test_accumulation_updates_once_after_several_mini_batches() -> None:
    job = Job(2, accumulate=3, steps=2).running()
    job.now += 1.0
    for number in (1, 2):
        effects = job.step(1, losses=(0.5, 0.25))
        run = RunStep(1, BATCH, False, "", 4 * number)
        assert effects == [Send(b"w%d" % rank, Advance(None, run)) for rank in (0, 1)]
    effects = job.step(1, losses=(0.0, 0.75))
    (row,) = of(effects, StepResult)
    assert (row.loss, row.samples, row.grad_norm) == (0.75, 30, math.sqrt(2.0) / 3)
    assert sent_to(effects, 0) == [Advance(Update(1, 1 / 3), RunStep(2, BATCH, False, ""))]
    assert [a.run.last for a in job.sent(0, Advance) if a.run] == [False] * 4
    job.step(2)
    job.step(2)
    assert [a.run.last for a in job.sent(0, Advance) if a.run][-1] is True


def test_data_that_ends_within_a_step_gives_a_smaller_step() -> None:
    job = Job(1, accumulate=3, steps=None).running()
    job.step(1)
    (update,) = [a.update for a in of_messages(job.step(1, batch=None), Advance)]
    assert update == Update(1, 0.5, epoch_ended=True)


def of_messages(effects: list[Effect], kind: type[T]) -> list[T]:
    return [m for m in (s.message for s in of(effects, Send)) if isinstance(m, kind)]


def test_counts_add_up_over_the_mini_batches_of_a_step() -> None:
    job = Job(1, accumulate=2).running()
    job.step(1, losses=(2.0,), counts=(4.0,))
    effects = job.step(1, losses=(4.0,), counts=(8.0,))
    assert of(effects, StepResult)[0].loss == 0.5
    assert of_messages(effects, Advance)[0].update == Update(1, 1 / 12)


def test_the_loss_scale_is_one_for_all_and_falls_when_a_gradient_overflows() -> None:
    job = Job(2, precision="fp16", clip_grad_norm=1.0).running()
    scale = 2.0**16
    assert [a.run.loss_scale for a in job.sent(1, Advance) if a.run] == [scale]
    effects = job.step(1, squares=((3 * scale) ** 2,))
    (row,) = of(effects, StepResult)
    assert row.grad_norm == math.sqrt(18)
    assert row.loss_scale == scale
    (advance,) = sent_to(effects, 0)
    assert isinstance(advance, Advance)
    assert advance.update == Update(1, 1 / scale / (math.sqrt(18) + 1e-6))
    effects = job.step(2, squares=(math.inf,))
    (advance,) = sent_to(effects, 1)
    assert isinstance(advance, Advance)
    assert advance.update
    assert advance.update.overflow
    assert advance.run
    assert advance.run.loss_scale == scale / 2
    job.step(3)
    assert job.saved() == [Commit(3, Scaler(scale / 2, 1))]


def test_an_overflow_without_a_loss_scale_is_no_overflow() -> None:
    effects = Job(1).running().step(1, squares=(math.inf,))
    assert of_messages(effects, Advance)[0].update == Update(1, 1.0)


def test_skips_and_ties_are_planned_between_stages() -> None:
    job = Job(2, balance=(3, 2))
    job.join()
    job.says(
        Described(
            0,
            LAYERS,
            (SkipRoute(0, 4, "x"), SkipRoute(0, 1, "y")),
            (TiedWeights(("0.weight", "4.weight"), ()), TiedWeights(("1.bias", "2.bias"), ())),
        )
    )
    effects = job.says(Described(1, LAYERS, ()))
    (first,), (second,) = (sent_to(effects, rank) for rank in (0, 1))
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert first.skips == (SkipRoute(0, 0, "y"), SkipRoute(0, 1, "x"))
    assert second.skips == (SkipRoute(0, 1, "x"),)
    both = TiedWeights(("0.weight", "4.weight"), (0, 1))
    assert first.ties == (both, TiedWeights(("1.bias", "2.bias"), (0, 0)))
    assert second.ties == (both,)
    assert {"0>1/skip", "1>0/skip-gradient", "0>1/tied", "1>0/tied"} <= set(second.edges)


def test_the_scale_doubles_after_a_long_run_of_good_steps() -> None:
    scaler = Scaler()
    for _ in range(1999):
        scaler = scaler.after(overflow=False)
    assert scaler == Scaler(2.0**16, 1999)
    assert scaler.after(overflow=False) == Scaler(2.0**17)
    assert scaler.after(overflow=True) == Scaler(2.0**15)
    for _ in range(100):
        scaler = scaler.after(overflow=True)
    assert scaler.scale == 2.0**-24


def test_an_epoch_that_ends_within_a_step_has_ended() -> None:
    """Three mini-batches an epoch, two a step."""
    job = Job(1, accumulate=2, steps=None).running()
    ended = []
    for step in range(1, 7):
        epochs = [((2 * step - 1) // 3), (2 * step) // 3]  # of the mini-batches to come
        for epoch in epochs:
            effects = job.step(step, batch=dataclasses.replace(BATCH, epoch=epoch))
        (advance,) = of_messages(effects, Advance)
        assert advance.update
        ended.append(advance.update.epoch_ended)
    assert ended == [False, True, True, False, True, True]
