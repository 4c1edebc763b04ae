"""The reader of the records of a run: each record is returned once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import UnreadableFile
from pipeworker.record import run_feed
from pipeworker.record.metrics.rows import Rows
from pipeworker.record.run_feed import KINDS, PlaceFile, RunFeed
from pipeworker.record.rundir import RunDir
from pipeworker.runs.resume import truncate_rows


@contextmanager
def reader(folder: Path, *kinds: str, before: int = 0, done: int | None = None) -> Iterator[Any]:
    """Yield a function that returns what is new, and is done with the first `done` of it."""
    run_dir = RunDir(folder)
    places = PlaceFile(run_dir.hooks, kinds or KINDS, before)
    feed = RunFeed(run_dir, kinds or KINDS, places)

    def new(**how: bool) -> list[str]:
        found = feed.new(**how)
        for record in found[:done]:
            places.advance(record)
        return [f"{record.kind[3]}{record.step}" for record in found]

    yield new
    feed.close()
    places.close()


def record(folder: Path, *words: str) -> None:
    """Record steps (``s1``), evaluation passes (``e1``) and checkpoints (``c1``)."""
    run_dir = RunDir(folder)
    for word in words:
        step = int(word[1:])
        if word[0] == "c":
            run_dir.checkpoints.at(step).mkdir(parents=True)
        else:
            file = Rows(run_dir.metrics if word[0] == "s" else run_dir.evaluation)
            file.add({"step": step})
            file.close()


def test_records_come_in_the_order_of_steps_and_once(tmp_path: Path) -> None:
    with reader(tmp_path) as new:
        assert new() == []
        record(tmp_path, "e0", "s1", "s2", "e2", "c2", "s3")
        assert new() == ["e0", "s1", "s2", "e2", "c2", "s3"]
        assert new() == []
        record(tmp_path, "s4", "e4")
        assert new() == ["s4", "e4"]


def test_an_evaluation_waits_for_the_row_of_its_step(tmp_path: Path) -> None:
    """The rows are read one file after the other, while the job goes on."""
    record(tmp_path, "s1", "e2", "c2")
    with reader(tmp_path) as new:
        assert new() == ["s1"]
        record(tmp_path, "s2")
        assert new() == ["s2", "e2", "c2"]


def test_the_last_reading_leaves_nothing(tmp_path: Path) -> None:
    record(tmp_path, "s1", "e2")
    with reader(tmp_path) as new:
        assert [new(final=True), new(final=True), new(final=True)] == [["s1"], ["e2"], []]


def test_half_a_row_waits_for_the_other_half(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with reader(tmp_path) as new:
        assert new() == ["s1"]
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('ep": 2}\n')
        assert new() == ["s2"]


def test_a_row_that_is_longer_than_what_is_read_at_once_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_feed, "MAX_READ_BYTES", 4)
    record(tmp_path, "s1", "s2")
    with reader(tmp_path) as new, (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step"')
        file.flush()
        assert [new(), new(), new()] == [["s1"], ["s2"], []]
        file.write(": 3}\n")
        file.flush()
        assert new() == ["s3"]


def test_a_line_that_is_no_row_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with reader(tmp_path) as new:
        assert new() == ["s1", "s2"]


def test_records_do_not_wait_for_steps_that_are_not_read(tmp_path: Path) -> None:
    record(tmp_path, "e1", "c1")
    with reader(tmp_path, "on_evaluation", "on_checkpoint") as new:
        assert new() == ["e1", "c1"]


def test_a_reader_that_was_killed_before_its_first_record_keeps_its_place(tmp_path: Path) -> None:
    with reader(tmp_path, before=3):
        pass
    record(tmp_path, "s3", "s4")
    with reader(tmp_path, before=9) as new:
        assert new() == ["s4"]


def test_a_kind_that_is_not_read_for_a_while_keeps_its_place(tmp_path: Path) -> None:
    record(tmp_path, "e1", "e2", "e2")
    with reader(tmp_path, "on_evaluation") as new:
        assert new() == ["e1", "e2", "e2"]
    with reader(tmp_path, "on_step") as new:
        assert new() == []
    record(tmp_path, "e2", "e3")
    with reader(tmp_path, "on_evaluation", before=9) as new:
        assert new() == ["e2", "e3"]


def test_a_reader_continues_behind_its_place(tmp_path: Path) -> None:
    record(tmp_path, "s1", "e1", "e1", "s2", "c2")
    with reader(tmp_path, done=2) as new:
        assert new() == ["s1", "e1", "e1", "s2", "c2"]
    with reader(tmp_path) as new:
        assert new() == ["e1", "s2", "c2"]
    with reader(tmp_path) as new:
        assert new() == []


def test_rows_that_are_removed_and_written_again_are_not_new(tmp_path: Path) -> None:
    record(tmp_path, "s1", "s2", "e2", "s3", "e3")
    with reader(tmp_path) as new:
        assert len(new()) == 5
    truncate_rows(tmp_path / "metrics.jsonl", 1)
    truncate_rows(tmp_path / "evaluation.jsonl", 1)
    with reader(tmp_path, before=1) as new:
        record(tmp_path, "s2", "e2")
        assert new() == []
        record(tmp_path, "s3", "e3", "s4", "e4")
        assert new() == ["s4", "e4"]


def test_a_kind_that_is_new_in_a_resumed_run_begins_there(tmp_path: Path) -> None:
    record(tmp_path, "s1", "s2", "c2")
    with reader(tmp_path, "on_step", before=2) as new:
        record(tmp_path, "s3")
        assert new() == ["s3"]
    record(tmp_path, "c3", "c4")
    with reader(tmp_path, "on_step", "on_checkpoint", before=3) as new:
        assert new(final=True) == ["c4"]


def test_a_place_file_that_is_damaged_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "hooks.json"
    for text in ("{", '{"on_step": 1}', json.dumps({"on_step": ["a", 1]})):
        path.write_text(text)
        with pytest.raises(UnreadableFile, match="remove it"):
            PlaceFile(path, KINDS, 0)
