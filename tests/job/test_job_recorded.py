"""What a run that goes on is asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.job import recorded
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


def merged(*allow: str, **said: Any) -> Options:
    return Options("/jobs/job.py", **recorded.merged(BEFORE, said, allow))


def differs(names: str, **said: Any) -> str:
    """What is said of options that differ, when these are allowed to."""
    allow = recorded.allowed(names.split())
    with pytest.raises(UsageError) as caught:
        recorded.check(BEFORE, merged(*allow, **said), allow, "the run in R")
    return str(caught.value)


def test_what_is_not_said_is_what_was_recorded() -> None:
    assert merged() == BEFORE
    found = merged(steps=200, recompute="never", stop_on_nan=False)
    assert (found.steps, found.recompute, found.stop_on_nan) == (200, "never", False)
    assert (found.seed, found.threads, found.backend) == (7, 3, "tls")
    recorded.check(BEFORE, found, (), "the run in R")


def test_steps_that_are_said_are_instead_of_epochs() -> None:
    found = merged(epochs=3)
    assert (found.steps, found.epochs) == (None, 3)
    assert recorded.merged(found, {"steps": 7}, ())["epochs"] is None
    with pytest.raises(UsageError, match="--steps 7 and --epochs 3: choose one"):
        merged(steps=7, epochs=3)


def test_stages_do_not_change_the_micro_batches() -> None:
    assert merged(stages=2).microbatches == 8


def test_a_balance_is_for_its_stages() -> None:
    assert merged(stages=4).balance == (1, 2, 2, 1)
    assert merged(stages=2).balance is None
    assert merged(stages=2, balance=(2, 4)).balance == (2, 4)
    assert recorded.merged(BEFORE, {"schedule": "another"}, ())["balance"] is None


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"seed": 0}, "--seed: 7, now 0"),
        ({"microbatches": 16}, "--microbatches: 8, now 16"),
        ({"accumulate": 2}, "--accumulate: 1, now 2"),
        ({"precision": "bf16"}, "--precision: fp32, now bf16"),
        ({"clip_grad_norm": 0.5}, "--clip-grad-norm: 1.0, now 0.5"),
        ({"clip_grad_value": 0.5}, "--clip-grad-value: off, now 0.5"),
        ({"deferred_batch_norm": True}, "--deferred-batch-norm: off, now on"),
        ({"threads": 1}, "--threads: 3, now 1"),
        ({"compile": True}, "--compile: off, now on"),
        ({"deterministic": True}, "--deterministic: off, now on"),
        ({"arguments": ("a",)}, "arguments: a 'b c', now a"),
    ],
)
def test_other_numbers_must_be_allowed_by_name(said: dict[str, Any], shown: str) -> None:
    (name,) = (n.replace("_", "-") for n in said)
    assert differs("", **said) == (
        "the run in R was begun with other options, and would go on with other numbers:\n"
        f"  {shown}\nleave them out, or say that they may differ: --allow {name}"
    )
    others = [other for other in recorded.NUMBERS if other not in said]
    assert shown in differs(" ".join(others), **said)
    for spelling in (name, name.replace("-", "_")):
        allow = recorded.allowed([spelling])
        recorded.check(BEFORE, merged(*allow, **said), allow, "the run in R")


def test_all_differences_are_said_at_once() -> None:
    text = differs("seed", seed=1, threads=1, precision="fp16", stages=1)
    assert text.splitlines()[1:] == [
        "  --precision: fp32, now fp16",
        "  --threads: 3, now 1",
        "leave them out, or say that they may differ: --allow precision --allow threads",
    ]


def test_arguments_can_be_allowed_to_be_none() -> None:
    assert merged().arguments == merged("seed").arguments == ("a", "b c")
    assert merged("arguments").arguments == ()
    assert merged("arguments", arguments=("x",)).arguments == ("x",)


@pytest.mark.parametrize("name", ["stages", "sead", "", "--seed", "job_file"])
def test_names_that_need_no_leave(name: str) -> None:
    expected = f"--allow {name.replace('_', '-')}: must be one of seed, microbatches, accumulate"
    with pytest.raises(UsageError, match=re.escape(expected)):
        recorded.allowed(["seed", name])


def test_a_loop_of_a_script_goes_on_in_no_other() -> None:
    own = Options("/jobs/script.py", 2, 8, own_loop=True)
    with pytest.raises(UsageError, match=r"the run in R is of a pipeworker\.Pipeline"):
        recorded.check(own, own, (), "the run in R")
