"""The options of a run that is resumed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.job import resume_options
from pipeworker.job.options import Options

BEFORE = Options(
    *("/jobs/job.py", 4, 8),
    arguments=("a", "b c"),
    steps=100,
    schedule="gpipe",
    balance=(1, 2, 2, 1),
    clip_grad_norm=1.0,
    seed=7,
    threads=3,
    backend="tls",
    stop_on_nan=True,
)


def merged(*allow: str, **changes: Any) -> Options:
    return Options("/jobs/job.py", **resume_options.merge(BEFORE, changes, allow))


def differs(names: str, **changes: Any) -> str:
    """Return the message for options that differ, if those in `names` are allowed to."""
    allow = resume_options.parse_allowed(names.split())
    with pytest.raises(UsageError) as caught:
        resume_options.check_unchanged(BEFORE, merged(*allow, **changes), allow, "the run in R")
    return str(caught.value)


def test_options_that_are_not_given_are_the_recorded_ones() -> None:
    assert merged() == BEFORE
    found = merged(steps=200, recompute="never", stop_on_nan=False)
    assert (found.steps, found.recompute, found.stop_on_nan) == (200, "never", False)
    assert (found.seed, found.threads, found.backend) == (7, 3, "tls")
    resume_options.check_unchanged(BEFORE, found, (), "the run in R")


def test_given_steps_replace_recorded_epochs() -> None:
    found = merged(epochs=3)
    assert (found.steps, found.epochs) == (None, 3)
    assert resume_options.merge(found, {"steps": 7}, ()).get("epochs") is None
    with pytest.raises(UsageError, match="--steps 7 and --epochs 3: choose one"):
        merged(steps=7, epochs=3)


def test_stages_do_not_change_the_micro_batches() -> None:
    assert merged(stages=2).microbatches == 8


def test_a_balance_is_dropped_with_another_number_of_stages() -> None:
    assert merged(stages=4).balance == (1, 2, 2, 1)
    assert merged(stages=2).balance is None
    assert merged(stages=2, balance=(2, 4)).balance == (2, 4)
    assert resume_options.merge(BEFORE, {"schedule": "another"}, ())["balance"] is None


def test_an_even_balance_and_one_size_of_memory_stay_with_another_number_of_stages() -> None:
    before = dataclasses.replace(BEFORE, balance="even", memory=(9,))
    found = resume_options.merge(before, {"stages": 2}, ())
    assert (found["balance"], found["memory"]) == ("even", (9,))
    before = dataclasses.replace(BEFORE, memory=(6, 7, 8, 9))
    assert resume_options.merge(before, {"steps": 2}, ())["memory"] == (6, 7, 8, 9)
    assert resume_options.merge(before, {"schedule": "1f1b"}, ())["memory"] == (6, 7, 8, 9)
    assert resume_options.merge(before, {"stages": 2}, ())["memory"] is None
    assert resume_options.merge(before, {"stages": 2, "memory": (8, 9)}, ())["memory"] == (8, 9)


def test_another_number_of_virtual_stages_drops_the_balance() -> None:
    four = merged(schedule="interleaved-1f1b", virtual_stages=4, stages=1, balance=(1, 2, 2, 1))
    assert resume_options.merge(four, {}, ())["balance"] == (1, 2, 2, 1)
    changed = resume_options.merge(four, {"virtual_stages": 3}, ())
    assert (changed["virtual_stages"], changed["balance"]) == (3, None)
    changed = resume_options.merge(four, {"schedule": "1f1b"}, ())
    assert (changed["virtual_stages"], changed["balance"]) == (None, None)
    assert resume_options.merge(four, {"schedule": four.schedule}, ())["virtual_stages"] == 4


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"seed": 0}, "--seed (7, now 0)"),
        ({"microbatches": 16}, "--microbatches (8, now 16)"),
        ({"accumulate": 2}, "--accumulate (1, now 2)"),
        ({"precision": "bf16"}, "--precision (fp32, now bf16)"),
        ({"clip_grad_norm": 0.5}, "--clip-grad-norm (1.0, now 0.5)"),
        ({"clip_grad_value": 0.5}, "--clip-grad-value (off, now 0.5)"),
        ({"deferred_batch_norm": True}, "--deferred-batch-norm (off, now on)"),
        ({"threads": 1}, "--threads (3, now 1)"),
        ({"compile": True}, "--compile (off, now on)"),
        ({"deterministic": True}, "--deterministic (off, now on)"),
        ({"arguments": ("a",)}, "arguments (a 'b c', now a)"),
        ({"arguments": ()}, "arguments (a 'b c', now none)"),
    ],
)
def test_options_that_change_the_numbers_must_be_allowed_by_name(
    changes: dict[str, Any], shown: str
) -> None:
    (name,) = (n.replace("_", "-") for n in changes)
    assert differs("", **changes) == (
        f"the run in R: would continue with other numbers, by {shown}; leave them out, or allow "
        f"them to change: --allow-change {name}"
    )
    others = [other for other in resume_options.NUMBERS if other not in changes]
    assert shown in differs(" ".join(others), **changes)
    for spelling in (name, name.replace("-", "_")):
        allow = resume_options.parse_allowed([spelling])
        resume_options.check_unchanged(BEFORE, merged(*allow, **changes), allow, "the run in R")


def test_one_message_lists_all_differences() -> None:
    text = differs("seed", seed=1, threads=1, precision="fp16", stages=1)
    assert text.endswith(
        "by --precision (fp32, now fp16), --threads (3, now 1); leave them out, or allow them to "
        "change: --allow-change precision --allow-change threads"
    )


def test_arguments_can_be_allowed_to_be_none() -> None:
    assert merged().arguments == merged("seed").arguments == ("a", "b c")
    assert merged("arguments").arguments == ()
    assert merged("arguments", arguments=("x",)).arguments == ("x",)


@pytest.mark.parametrize("name", ["stages", "sead", "", "--seed", "job_file"])
def test_names_that_cannot_be_allowed(name: str) -> None:
    expected = (
        f"--allow-change {name.replace('_', '-')}: must be one of seed, microbatches, accumulate"
    )
    with pytest.raises(UsageError, match=re.escape(expected)):
        resume_options.parse_allowed(["seed", name])


def test_a_former_name_among_those_that_may_change_leads_to_the_present_one() -> None:
    for name, present in (("restarts", "max-restarts"), ("init-partial", "init-strict")):
        expected = f"--allow-change {name}: this option was renamed; use {present}"
        with pytest.raises(UsageError, match=f"^{expected}$"):
            resume_options.parse_allowed([name])


def test_a_loop_of_its_own_is_resumed_by_such_a_loop_alone() -> None:
    own = Options("/jobs/script.py", 2, 8, own_loop=True)
    assert not resume_options.merge(own, {}, ())["own_loop"]
    other = dataclasses.replace(own, own_loop=False)
    resume_options.check_unchanged(own, own, (), "the run in R")
    with pytest.raises(UsageError, match=r"the run in R: has the loop of a pipeworker\.Pipeline"):
        resume_options.check_unchanged(own, other, (), "the run in R")
    with pytest.raises(UsageError, match=r"the run in R: has no loop of its own"):
        resume_options.check_unchanged(other, own, (), "the run in R")


OWN = "mine stages=4 microbatches=8\n" + "\n".join(
    f"{s}: " + " ".join(f"{s}{k}{m}" for k in "FB" for m in range(8)) for s in range(4)
)


def test_a_schedule_of_the_jobs_own_is_dropped_with_another_number_of_stages() -> None:
    before = dataclasses.replace(BEFORE, schedule=OWN)
    assert resume_options.merge(before, {"steps": 9}, ())["schedule"] == OWN
    found = resume_options.merge(before, {"stages": 2}, ())
    assert (found["schedule"], found["balance"]) == ("gpipe", None)
    other = OWN.replace("mine", "other")
    assert resume_options.merge(before, {"stages": 2, "schedule": other}, ())["schedule"] == other
