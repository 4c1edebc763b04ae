"""A job's own schedule, read from its file and proven."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pipeworker.errors import ScheduleError, UnreadableFile, UsageError
from pipeworker.job.option_parsing import format_option, make_options
from pipeworker.runs.begin import RunRequest
from pipeworker.runs.listing import option_text
from pipeworker.runs.schedule_file import read_schedule
from support.pure.orders import build

MINE = "mine stages=2 microbatches=2\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my order.txt"
    path.write_text(f"# a comment\n{MINE}")
    return path


def test_a_file_gives_its_order_under_the_name_of_the_file(file: Path) -> None:
    text = read_schedule(file)
    assert text == MINE.replace("mine", "my-order.txt")
    assert read_schedule(text) == text
    assert read_schedule("gpipe") == "gpipe"


def test_the_actions_of_a_recorded_plan_are_a_schedule_file(file: Path) -> None:
    file.write_text(str(build("gpipe", 2, 3, "except_first")))
    assert read_schedule(file).splitlines()[1] == "0: 0F0 0F1 0F2 0B0 0R1 0B1 0R2 0B2"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: '' is not a schedule's head"),
        (MINE.replace("0B1", "0B2"), "worker 0: 0B2 is not one of the micro-batches"),
        (MINE.replace(" 0B1", ""), "worker 0: 0B1 is missing"),
        (MINE.replace("1F1 1B1", "1B1 1F1"), "worker 1: 1B1 comes before its 1F1"),
        (MINE.replace("0F1 0B0", "0B0 0F1").replace("1B0 1F1", "1F1 1B0"), "deadlocks"),
        (MINE.replace("0F1", "0F1 0F1"), "worker 0: 0F1 appears twice"),
        (MINE.replace("1F1", "2F1"), "worker 1: 2F1 is of a stage it does not hold; it holds 1"),
        (MINE.replace("0F1", "1F1"), "worker 0: 1F1 is of a stage it does not hold; it holds 0"),
    ],
)
def test_a_schedule_that_cannot_run_is_rejected(file: Path, text: str, why: str) -> None:
    file.write_text(text)
    with pytest.raises(ScheduleError, match=rf"^--schedule {re.escape(str(file))}: .*{why}"):
        read_schedule(file)


def test_a_file_that_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: no such schedule or file; use one of gpipe"):
        read_schedule("nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="bytes: not a text file"):
        read_schedule(tmp_path / "bytes")
    with pytest.raises(UsageError, match=": is a directory; give the path of a file"):
        read_schedule(tmp_path)
    with pytest.raises(UsageError, match="--schedule: is empty; give a name"):
        read_schedule("")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableFile, match="not a regular file"):
        read_schedule(tmp_path / "pipe")


def test_options_are_shown_with_the_name_of_their_schedule(file: Path) -> None:
    text = read_schedule(file)
    assert format_option("schedule", text) == "--schedule my-order.txt"
    assert option_text(text) == "my-order.txt"


def test_a_schedule_decides_the_default_number_of_micro_batches(file: Path) -> None:
    text = read_schedule(file)
    assert make_options("/job.py", 2, {"schedule": text}).microbatches == 2
    assert make_options("/job.py", 2, {"schedule": text, "replicas": 3}).microbatches == 6


def test_a_script_gives_the_path_of_the_file(file: Path) -> None:
    options = RunRequest("/job.py", 2, {"schedule": file}).new_options()
    assert options.schedule == read_schedule(file)
