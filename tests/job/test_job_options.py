"""The options of a job."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ProtocolError, UsageError
from pipeworker.job.interval import Interval
from pipeworker.job.option_parsing import make_options
from pipeworker.job.options import Options


def options(**fields: Any) -> Options:
    return Options(**{"job_file": "/jobs/job.py", "stages": 2, "microbatches": 8, **fields})


positive = st.integers(1, 10**6)


def test_steps_and_epochs_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--steps 3 and --epochs 2: choose one"):
        options(steps=3, epochs=2)
    assert [o.passes for o in (options(), options(epochs=3), options(steps=3))] == [1, 3, None]


@pytest.mark.parametrize(
    ("every", "steps"), [(None, []), (2, [2, 4, 6]), ("epoch", [3, 6]), ("2", [2, 4, 6])]
)
def test_steps_that_are_followed_by_an_evaluation(every: Any, steps: list[int]) -> None:
    made = make_options("/job.py", 2, {"evaluate_every": every})
    assert Options.from_json(made.to_json()) == made
    ended = {step: step % 3 == 0 for step in range(1, 7)}
    assert [n for n, end in ended.items() if made.evaluates(n, epoch_ended=end)] == steps


@given(
    st.builds(
        options,
        job_file=st.text(),
        microbatches=positive,
        arguments=st.lists(st.text(), max_size=3).map(tuple),
        steps=st.none() | positive,
        balance=st.none() | st.tuples(positive, positive),
        clip_grad_norm=st.none() | st.floats(1e-6, 1e6),
        seed=st.integers(0, 2**63 - 1),
        threads=st.integers(1, 4096),
        worker_timeout=st.floats(0.1, 43200.0),
    )
)
def test_json_round_trip(made: Options) -> None:
    assert Options.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stages", 0, "--stages 0: must be 1 or more"),
        ("stages", 2**64, "--stages 18446744073709551616: must be 65536 or less"),
        ("microbatches", -1, "--microbatches -1: must be 1 or more"),
        ("microbatches", 2**20 + 1, "--microbatches 1048577: must be 1048576 or less"),
        ("threads", 0, "--threads 0: must be 1 or more"),
        ("threads", 9999, "--threads 9999: must be 4096 or less"),
        ("seed", -1, "--seed -1: must be 0 or more"),
        ("keep", 0, "--keep 0: must be 1 or more"),
        *(
            ("checkpoint_every", text, f"--checkpoint-every {text}: must be a number of steps")
            for text in ("", "0", "-1", "m", "0m", "1.5", "5d", "\u0661", "9" * 10, "5 m")
        ),
        ("seed", 2**63, "--seed 9223372036854775808: must be 9223372036854775807 or less"),
        ("steps", 0, "--steps 0: must be 1 or more"),
        ("steps", 2**63, "--steps 9223372036854775808: must be 9223372036854775807 or less"),
        ("epochs", 2**63, "--epochs 9223372036854775808: must be 9223372036854775807 or less"),
        ("epochs", 0, "--epochs 0: must be 1 or more"),
        ("evaluate_every", 0, "--evaluate-every 0: must be 1 or more"),
        ("best", "max:", "--best max:: must name a figure, as loss or max:accuracy"),
        ("patience", 0, "--patience 0: must be 1 or more"),
        ("patience", 3, "--patience 3: no evaluation is requested; add --evaluate-every"),
        ("best", "a", "--best a: no evaluation is requested; add --evaluate-every"),
        ("evaluate_every", "step", "--evaluate-every step: must be a number of steps, or epoch"),
        ("init_strict", False, "--no-init-strict: no file is given; add --init-from"),
        ("clip_grad_norm", 0.0, "--clip-grad-norm 0.0: must be greater than 0"),
        ("clip_grad_norm", float("nan"), "--clip-grad-norm nan: must be greater than 0"),
        ("worker_timeout", 0.0, "--worker-timeout 0.0: must be greater than 0"),
        ("worker_timeout", 43201.0, "--worker-timeout 43201: must be 43200 seconds or less"),
        *(
            (name, math.inf, f"--{name.replace('_', '-')} inf: must be finite")
            for name in ("clip_grad_norm", "clip_grad_value", "worker_timeout")
        ),
        ("balance", (2, 2, 1), "--balance 2,2,1: is for 3 stages, but there are 2"),
        ("schedule", "zigzag", "--schedule zigzag: must be one of gpipe"),
        ("virtual_stages", 0, "--virtual-stages 0: must be 1 or more"),
        ("virtual_stages", 2**15 + 1, "--virtual-stages 32769: must be 32768 or less on 2 workers"),
        (
            *("virtual_stages", 2),
            "--virtual-stages 2: --schedule gpipe has one stage on each worker; leave the option "
            "out, or choose --schedule interleaved-1f1b",
        ),
        ("recompute", "rarely", "--recompute rarely: must be one of auto, always, except_first"),
        ("precision", "fp8", "--precision fp8: must be one of fp32, bf16, fp16"),
        ("checkpoint_busy", "stop", "--checkpoint-busy stop: must be one of skip, wait"),
    ],
)
def test_out_of_range(name: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(**{name: value})


def test_evaluations_of_a_loop_of_its_own_or_before_the_first_step_have_a_best() -> None:
    assert options(best="max:a", patience=3, own_loop=True).patience == 3
    assert options(best="max:a", evaluate_first=True).best == "max:a"
    with pytest.raises(UsageError, match="--patience 3: no evaluation is requested"):
        options(patience=3, evaluate_first=True)


@pytest.mark.parametrize("text", ["", "10", "12:10", "0:3", "1:-1"])
def test_steps_to_profile_are_the_first_and_the_last(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--profile {text}: must be the first and the last"):
        options(profile_steps=text)


def test_other_text_is_no_options() -> None:
    for text in ("{", "[" * 10**5, "[]", '{"stages": 2}'):
        with pytest.raises(ProtocolError, match="not a job's options"):
            Options.from_json(text)


def test_options_for_fewer_stages() -> None:
    found = options(stages=3, balance=(1, 2, 3), memory=(5, 6, 7), min_stages=2).with_stages(1)
    assert (found.stages, found.balance, found.memory, found.min_stages) == (1, None, (5,), 1)
    assert options(balance="even", memory=(5, 6)).with_stages(3) == options(
        stages=3, balance="even", memory=(5, 6, 6)
    )


def test_a_profile_begins_before_the_run_ends() -> None:
    assert options(steps=20, profile_steps="20:30").profiled == (20, 30)
    assert options(profile_steps="20:30").profiled == (20, 30)
    with pytest.raises(UsageError, match="--profile 20:30: the run ends with step 19"):
        options(steps=19, profile_steps="20:30")


def test_virtual_stages_are_those_of_each_worker() -> None:
    default = options(schedule="interleaved-1f1b", stages=3)
    assert default.placement.held == ((0, 3), (1, 4), (2, 5))
    four = options(schedule="interleaved-1f1b", stages=3, virtual_stages=4)
    assert (four.workers, four.placement.stages) == (3, 12)
    assert four.with_stages(2).placement.stages == 8
    assert options(schedule="gpipe", virtual_stages=1).placement.stages == 2
    with pytest.raises(UsageError, match="--balance 1,1,1: is for 3 stages, but there are 12"):
        options(schedule="interleaved-1f1b", stages=3, virtual_stages=4, balance=(1, 1, 1))


@pytest.mark.parametrize(
    ("name", "value"), [("stages", 1), ("seed", 0), ("seed", 2**63 - 1), ("steps", 1)]
)
def test_at_the_edge_of_the_range(name: str, value: int) -> None:
    assert getattr(options(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("stages", "replicas", "name"), [(10**20, 1, "stages"), (2, 10**20, "replicas")]
)
def test_a_number_out_of_range_is_named_before_the_default_made_of_it(
    stages: int, replicas: int, name: str
) -> None:
    with pytest.raises(UsageError, match=rf"^--{name} {10**20}: must be \d+ or less$"):
        make_options("/jobs/job.py", stages, {"replicas": replicas})


def given_as(how: str, balance: list[int]) -> Options:
    """Return options with a balance for two stages, given in one of several ways."""
    if how == "options":
        return options(balance=tuple(balance))
    shown = ",".join(map(str, balance))
    value = {"list": balance, "tuple": tuple(balance), "text": shown}[how]
    return make_options("/jobs/job.py", 2, {"balance": value, "microbatches": 8, "threads": 1})


@pytest.mark.parametrize("how", ["options", "list", "tuple", "text"])
def test_a_balance_is_checked_equally_from_every_source(how: str) -> None:
    assert given_as(how, [2, 1]) == options(balance=(2, 1))
    for balance in ([0, 2], [-1, 3], [2, 0], [], [0]):
        shown = ",".join(map(str, balance))
        with pytest.raises(UsageError) as caught:
            given_as(how, balance)
        assert str(caught.value).startswith(
            f"--balance {shown!r}: not a list of layer counts; write one positive number"
        )
    for balance in ([3], [1, 1, 1]):
        shown = ",".join(map(str, balance))
        with pytest.raises(UsageError) as caught:
            given_as(how, balance)
        assert str(caught.value) == (
            f"--balance {shown}: is for {len(balance)} stage{'s' * (len(balance) > 1)}, but there "
            "are 2; write one number for each stage"
        )


@pytest.mark.parametrize(
    ("text", "every"),
    [
        *(("1", Interval(1)), ("007", Interval(7)), ("90s", Interval(seconds=90))),
        *(("30m", Interval(seconds=1800)), ("2h", Interval(seconds=7200))),
        ("end", Interval(seconds=math.inf)),
    ],
)
def test_intervals_are_read_from_text(text: str, every: Interval) -> None:
    assert Interval.parse(text) == every
    assert Options("job.py", 1, 1, checkpoint_every=text).checkpoint_every == text


OWN = "mine stages=2 microbatches=2\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n"
ONE = "one stages=1 microbatches=1\n0: 0F0 0B0\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stages": 3},
            "--schedule mine: has lines for 2 workers, and the job has 3; use --stages",
        ),
        (
            {"microbatches": 4},
            "--schedule mine: is for 2 micro-batches, and the job has 4; use --microbatches 2",
        ),
        (
            {"microbatches": 2, "replicas": 2},
            "is for 2 micro-batches, and the job has 1 in a replica; use --microbatches 4",
        ),
        (
            {"schedule": ONE, "stages": 2},
            "--schedule one: has lines for 1 worker, and the job has 2; use --stages 1",
        ),
        (
            {"schedule": ONE, "stages": 1},
            "--schedule one: is for 1 micro-batch, and the job has 2; use --microbatches 1",
        ),
        ({"recompute": "never"}, "--schedule mine and --recompute never: the schedule has an R"),
    ],
)
def test_a_schedule_of_the_jobs_own_must_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(**{"schedule": OWN, "stages": 2, "microbatches": 2, **changes})


def test_a_schedule_of_the_jobs_own_is_for_its_number_of_workers() -> None:
    own = options(schedule=OWN, stages=2, microbatches=2, recompute="offload")
    assert own.with_stages(2).schedule == OWN
    assert own.with_stages(1).schedule == "gpipe"
    assert options(schedule=OWN, stages=2, microbatches=7, evaluate_only=True).stages == 2
