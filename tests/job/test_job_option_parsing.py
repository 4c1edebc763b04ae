"""Parsing of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from pipeworker.errors import UsageError
from pipeworker.job.option_parsing import format_option, make_options


def test_options_that_are_not_given_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = make_options("job.py", 3, {"steps": None, "keep": None, "seed": 7})
    assert (options.microbatches, options.threads, options.steps, options.seed) == (12, 1, None, 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert make_options("job.py", 3, {}).threads == 4
    assert make_options("job.py", 3, {"threads": 2}).threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3, 2")  # for two levels of parallel regions
    assert make_options("job.py", 2, {}).threads == 3
    for wrong in ("many", "0", "\u00b2", "9" * 5000, "0" * 5000 + "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        assert make_options("job.py", 3, {}).threads == 1


@pytest.mark.parametrize("balance", ["1,2", [1, 2], (1, 2)])
def test_a_balance_may_be_written_in_several_ways(balance: Any) -> None:
    assert make_options("job.py", 2, {"balance": balance}).balance == (1, 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", "3", "--steps '3': must be of type int, not str"),
        ("steps", 3.0, "--steps 3.0: must be of type int, not float"),
        ("seed", True, "--seed True: must be of type int, not bool"),
        ("replicas", "2", "--replicas '2': must be of type int, not str"),
        (
            "evaluate_every",
            "\u00b2",
            "--evaluate-every \u00b2: must be a number of steps, or epoch",
        ),
        ("evaluate_every", "9" * 5000, "9: must be a number of steps, or epoch"),
        ("stop_on_nan", 1, "--stop-on-nan 1: must be of type bool, not int"),
        *(("balance", given, "not a list of layer counts") for given in ([1, "2"], (1.5, 1.5))),
        ("clip_grad_norm", "1", "--clip-grad-norm '1': must be of type float, not str"),
        (
            "init_from",
            {"0.weight": 1},
            "--init-from {'0.weight': 1}: must be of type str, not object",
        ),
    ],
)
def test_a_value_of_the_wrong_type(name: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_options("job.py", 2, {name: value})


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_relative_to_the_working_directory(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_options("job.py", 2, {"init_from": kind("a.pt")})
    assert made.init_from == str(tmp_path / "a.pt")


def test_a_whole_number_and_one_of_numpy_are_floats_too() -> None:
    for value in (1, numpy.float64(1)):
        assert make_options("job.py", 2, {"clip_grad_norm": value}).clip_grad_norm == 1


def test_a_number_of_steps_between_checkpoints_may_be_a_number() -> None:
    assert make_options("job.py", 2, {"checkpoint_every": 9}).checkpoint_every == "9"


def test_micro_batches_are_by_default_those_of_a_schedule_of_the_jobs_own() -> None:
    own = "mine stages=2 microbatches=2\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n"
    assert make_options("job.py", 2, {"schedule": own}).microbatches == 2
    assert make_options("job.py", 2, {"schedule": own, "replicas": 3}).microbatches == 6


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("16GB", (16 * 10**9,)),
        ("1.5 GiB,900MB", (3 << 29, 900 * 10**6)),
        (["1kb", "2KiB"], (1000, 2048)),
        (4096, (4096,)),
        (16e9, (16 * 10**9,)),
        (None, None),
    ],
)
def test_sizes_of_memory(given: Any, sizes: tuple[int, ...] | None) -> None:
    assert make_options("/job.py", 2, {"memory": given}).memory == sizes


@pytest.mark.parametrize("given", ["16", "16GB"])
def test_sizes_of_memory_are_for_all_workers_or_for_each(given: str) -> None:
    assert make_options("/job.py", 3, {"memory": given}).memory
    with pytest.raises(UsageError, match="has 2 sizes, and a replica has 3 workers"):
        make_options("/job.py", 3, {"memory": f"{given},{given}"})
    with pytest.raises(UsageError, match="has 2 sizes, and a replica has 1 worker;"):
        make_options("/job.py", 1, {"memory": f"{given},{given}"})


@pytest.mark.parametrize("given", ["", "GB", "0", "-1GB", "1PB", "1e3GB", "16GB,", "9" * 30, "nan"])
def test_other_sizes_of_memory_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="not a size of memory; write one as 16GB"):
        make_options("/job.py", 2, {"memory": given})


def test_an_even_balance_and_the_fastest_schedule() -> None:
    assert make_options("/job.py", 2, {"balance": "even"}).balance == "even"
    assert make_options("/job.py", 2, {"schedule": "auto"}).schedule == "auto"
    for more, text in (({"balance": "1,2"}, "--balance"), ({"virtual_stages": 2}, "--virtual")):
        with pytest.raises(UsageError, match=f"{text}.* leave {text}"):
            make_options("/job.py", 2, {"schedule": "auto", **more})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("csv", True, "--csv"),
        ("csv", False, "--no-csv"),
        ("no_profile", True, "--no-profile"),
        ("no_profile", False, "--no-profile (by default)"),
        ("steps", None, "--steps (by default)"),
        ("memory", (1, 2), "--memory 1,2"),
        ("arguments", ("a b", "c"), "-- 'a b' c"),
    ],
)
def test_an_option_is_shown_as_a_command_line_writes_it(name: str, value: Any, text: str) -> None:
    assert format_option(name, value) == text
