"""Options from what was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.job.given import complete


def test_what_is_not_given_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = complete("job.py", 3, {"steps": None, "seed": 7})
    assert (options.microbatches, options.threads, options.steps, options.seed) == (12, 1, None, 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert complete("job.py", 3, {}).threads == 4
    assert complete("job.py", 3, {"threads": 2}).threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert complete("job.py", 3, {}).threads == 1


@pytest.mark.parametrize("balance", ["1,2", [1, 2], (1, 2)])
def test_a_balance_may_be_written_in_several_ways(balance: Any) -> None:
    assert complete("job.py", 2, {"balance": balance}).balance == (1, 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", "3", "--steps '3': a str"),
        ("steps", 3.0, "--steps 3.0: a float"),
        ("seed", True, "--seed True: a bool"),
        ("stop_on_nan", 1, "--stop-on-nan 1: a int"),
        *(("balance", given, "not a list of layer counts") for given in ([1, "2"], (1.5, 1.5))),
        ("clip_grad_norm", "1", "--clip-grad-norm '1': a str"),
        ("init_from", {"0.weight": 1}, "--init-from {'0.weight': 1}: a dict"),
    ],
)
def test_a_value_of_the_wrong_type(name: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        complete("job.py", 2, {name: value})


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_named_from_where_the_command_is(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete("job.py", 2, {"init_from": kind("a.pt")}).init_from == str(tmp_path / "a.pt")


def test_a_whole_number_is_a_float_too() -> None:
    assert complete("job.py", 2, {"clip_grad_norm": 1}).clip_grad_norm == 1
