"""Text, numbers and tables for a terminal."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.display.text import (
    counts,
    data_size,
    duration,
    megabytes,
    number,
    sanitize,
    shell_join,
    strict,
    table,
)
from pipeworker.plan.figures import bytes_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07\x07bell\x1b[A\x9b\b", "red bell"),
        ("a\tb é 漢 \N{SNOWMAN}\nc\u3000d", "a\tb é 漢 \N{SNOWMAN}\nc\u3000d"),
        ("abc\u202e\u2066\u2069\u200f\u061c\u2028def", "abcdef"),
        ("over\rwritten", "overwritten"),
        ("caf\udce9", "caf?"),
    ],
)
def test_sanitized_text_cannot_move_the_cursor_or_reorder_a_line(text: str, shown: str) -> None:
    assert sanitize(text) == shown


@given(st.text())
def test_sanitized_text_is_printable_and_stays_as_it_is(text: str) -> None:
    found = sanitize(text)
    assert "".join(found.split()).isprintable()
    assert sanitize(found) == found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.3456789, "12.3457"),
        (0.001, "0.0010"),
        (0.00012345, "1.234e-04"),
        (-0.0001, "-1.000e-04"),
        (0.0, "0.0000"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0:00"), (62.0, "1:02"), (3723.0, "1:02:03"), (360000.0, "100:00:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_shell_reads_the_words_that_were_joined() -> None:
    """Paths are bytes: some are not UTF-8, and some of their characters are not to be seen."""
    names = [b"plain", b"a b", b"it's \\ here", b"caf\xe9", b"\xffab", b"tab\tend\n", b""]
    names += [text.encode() for text in ("café", "\u202ereversed", "wide\u3000", "\U0001f600")]
    joined = shell_join(map(os.fsdecode, names))
    assert joined.isprintable()
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("there is no bash here")
    done = subprocess.run(
        [shell, "-c", f"printf '%s\\0' {joined}"],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C"},
    )
    assert done.stdout.split(b"\0")[:-1] == names


def test_json_has_null_for_what_is_not_finite() -> None:
    found = {"a": [1.5, float("nan")], "b": (float("inf"), {"c": -float("inf")}, "nan", 3)}
    assert strict(found) == {"a": [1.5, None], "b": [None, {"c": None}, "nan", 3]}


def test_data_size() -> None:
    sizes = (0, 5, 1023, 1024, 10_240, 1 << 20, 15 * 2**30)
    assert [*map(data_size, sizes)] == ["0B", "5B", "1023B", "1.0K", "10K", "1.0M", "15G"]


def test_megabytes() -> None:
    sizes = [1_000_000, 0, 371_000_000]
    assert megabytes(sizes) == "1, ?, 371 MB"
    assert bytes_text(sizes[-1]) == "371 MB"  # as a plan has it


def test_columns_of_a_table_are_aligned() -> None:
    rows = [("run", "steps", "host"), ("a [b] c", "9", ""), ("漢", "10", "one\ntwo")]
    assert table(rows, right=[1]) == [
        "run      steps  host",
        "a [b] c      9",
        "漢          10  one",
        "                two",
    ]
    assert table([]) == []
    wide = "x" * 5000
    assert table([("a", wide)]) == [f"a  {wide}"]


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ((3, 5, 5, 3), "3,5,5,3"),
        ((1,) * 16, ",".join("1" * 16)),
        ((1,) * 64, "1×64"),
        ((3, *[5] * 30, 3), "3,5×30,3"),
    ],
)
def test_many_equal_numbers_are_counted(numbers: tuple[int, ...], shown: str) -> None:
    assert counts(numbers) == shown
