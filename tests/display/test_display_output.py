"""Workers' output, read from their logs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.display.output import LineSplitter, LogReader, Printed, WorkerOutput
from pipeworker.host.streams import LOG_PREFIX, note
from pipeworker.plan.placement import Placement
from pipeworker.record.rundir import RunDir


def whole(*texts: str, mark: str = "[stage 0]") -> list[Printed]:
    return [Printed(mark, text) for text in texts]


def lines(*parts: str, ours: bool = False) -> list[str]:
    splitter = LineSplitter(ours=ours)
    return [line for part in parts for line in splitter.feed(part.encode())] + splitter.flush()


def test_lines_are_returned_when_they_are_complete() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == ["one"]
    assert splitter.redrawn == ""
    assert splitter.feed(b"o\n\nthree") == ["two", ""]
    assert splitter.flush() == ["three"]
    assert splitter.flush() == []


def test_a_redrawn_line_has_its_latest_state() -> None:
    """The carriage return may come before each state, as tqdm writes it, or after it."""
    splitter = LineSplitter()
    assert splitter.feed(b"\r  1%|") == []
    assert splitter.redrawn == "  1%|"
    assert splitter.feed(b"\r 50%|#") == []
    assert splitter.redrawn == " 50%|#"
    assert splitter.feed(b"\r100%|##\nnext") == ["100%|##"]
    assert splitter.redrawn == ""
    assert splitter.feed(b"\n a\r b\r") == ["next"]
    assert splitter.redrawn == " b"
    assert lines("done\r\n") == ["done"]


def test_lines_of_pipeworker_are_left_out_unless_requested(
    capfd: pytest.CaptureFixture[str],
) -> None:
    note("the job ended: x\n  at y")
    logged = capfd.readouterr().err
    assert logged == f"{LOG_PREFIX}the job ended: x\n{LOG_PREFIX}  at y\n"
    assert lines("one\n", logged, "two\n") == ["one", "two"]
    assert lines(logged, ours=True) == ["pipeworker: the job ended: x", "pipeworker:   at y"]
    assert lines("one\n", ours=True) == ["one"]
    assert lines("no end yet ", logged) == ["no end yet "]
    assert lines("\r 10%|#", logged, "\n") == [" 10%|#", ""]


def test_a_job_cannot_move_the_cursor() -> None:
    """Colours, titles, bells and cursor movements are removed; the text remains."""
    assert lines("\x1b[1;31mred\x1b[0m \x1b]0;title\x07\x07bell\x1b[A\x9b\b\n") == ["red bell"]
    assert lines("a\tb é 漢 \N{SNOWMAN}\n") == ["a\tb é 漢 \N{SNOWMAN}"]
    marks = "\u202e\u2066\u2069\u200f\u061c\u2028"  # these would reorder the text
    assert lines(f"abc{marks}def\n") == ["abcdef"]
    splitter = LineSplitter()
    assert splitter.feed(b"\xff\n") == ["\N{REPLACEMENT CHARACTER}"]


def test_a_long_line_of_pipeworker_is_left_out_as_a_whole() -> None:
    long = f"{LOG_PREFIX}{'x' * 10_000}"
    parts = ("one\n", long[:6000], long[6000:], "\ntwo\n")
    assert lines(*parts) == ["one", "two"]
    assert lines(long[:6000], long[6000:]) == []
    first, *others, last = lines(*parts, ours=True)
    assert (first, last) == ("one", "two")
    assert "".join(line.removeprefix("pipeworker: ") for line in others) == "x" * 10_000
    splitter = LineSplitter()
    assert splitter.feed(long.encode()) == splitter.flush() == []
    assert splitter.feed(b"after a skip\n") == ["after a skip"]


def test_lines_have_a_maximum_length() -> None:
    splitter = LineSplitter()
    found = [line for _ in range(100) for line in splitter.feed(b"x" * 1000)]
    assert {len(line) for line in found} == {4096}
    assert sum(map(len, [*found, *splitter.flush()])) == 100_000
    for number in range(10_000):
        assert splitter.feed(b"\r %d" % number) == []
    assert splitter.redrawn == " 9999"
    assert len(pickle.dumps(splitter)) < 5000  # what it keeps of the unfinished line


@given(st.lists(st.text("ab\n\r", max_size=6), max_size=8))
def test_lines_do_not_depend_on_how_the_data_is_chunked(parts: list[str]) -> None:
    assert lines(*parts) == lines("".join(parts))


@pytest.fixture
def log(tmp_path: Path) -> LogReader:
    (tmp_path / "worker-0.log").write_text("before\n")
    return LogReader(tmp_path / "worker-0.log", "[stage 0]")


def write(log: LogReader, text: str) -> None:
    with log.path.open("a") as file:
        file.write(text)


def test_a_log_is_followed_from_its_present_end(log: LogReader) -> None:
    """An earlier start of the job wrote the lines before it."""
    assert [*log.read()] == []
    write(log, "one\ntwo\nthr")
    assert [*log.read()] == whole("one", "two")
    write(log, "ee\n\r 1%")
    assert [*log.read()] == [*whole("three"), Printed("[stage 0]", " 1%", whole=False)]
    assert [*log.read()] == []
    assert [*log.flush()] == whole(" 1%")
    assert [*log.flush()] == []


def test_delayed_lines_that_are_removed_from_the_log_are_not_shown(log: LogReader) -> None:
    """A job file that ends the job as soon as it is run has its output moved to the verdict."""
    write(log, "one\n")
    assert [*log.read(delayed=True)] == []
    write(log, "two\n")
    assert [*log.read(delayed=True)] == whole("one")
    log.path.write_text("before\none\n")
    assert [*log.read(delayed=True)] == []
    write(log, "2\n")
    assert [*log.read(delayed=True)] == []
    assert [*log.read()] == whole("2")


def test_a_log_that_does_not_exist_yet(tmp_path: Path) -> None:
    log = LogReader(tmp_path / "worker-0.log", "[stage 0]")
    assert [*log.read(), *log.flush()] == []
    write(log, "one\n")
    assert [*log.read()] == whole("one")
    log.path.write_text("")  # another process truncated it
    assert [*log.read()] == []
    write(log, "two\n")
    assert [*log.read()] == whole("two")
    log.path.unlink()
    assert [*log.read(), *log.flush()] == []


def test_a_replaced_worker_begins_a_new_line(log: LogReader) -> None:
    """The last line of a worker that was killed has no end."""
    write(log, "before the en")
    assert [*log.read()] == []
    assert [*log.flush()] == whole("before the en")
    write(log, "anew\n")
    assert [*log.read()] == whole("anew")


def test_what_was_flushed_before_a_delayed_read_is_not_shown_again(log: LogReader) -> None:
    write(log, "help")
    assert [*log.flush()] == whole("help")
    write(log, "hello again\n")
    assert [*log.read(delayed=True), *log.read(delayed=True)] == whole("hello again")


def test_output_that_comes_too_quickly_is_left_to_the_log(log: LogReader) -> None:
    write(log, "".join(f"line {number}\n" for number in range(20_000)))  # 230 KB
    skipped, *some = [printed.text for printed in log.read()]
    assert skipped == f"... 196 KB came too quickly to be shown: see {log.path}"
    assert 500 < len(some) < 900
    assert some == [f"line {number}" for number in range(20_000 - len(some), 20_000)]
    assert [*log.read()] == []


def test_a_short_burst_of_output_is_shown(log: LogReader) -> None:
    """A large model may be printed, of which each read returns a part."""
    written = [f"layer {number}" for number in range(4_000)]  # 44 KB
    write(log, "".join(f"{line}\n" for line in written))
    reads = [[*log.read()] for _ in range(3)]
    assert max(map(len, reads)) < 1000
    assert [printed for read in reads for printed in read] + [*log.flush()] == whole(*written)


def marks(folder: Path, shown: str, placement: Placement) -> list[str]:
    """Return the marks of the workers whose output is shown."""
    run_dir = RunDir(folder)
    output = WorkerOutput(run_dir, shown, placement)
    for rank in range(placement.ranks):
        path = run_dir.worker_log(rank)
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write("x\n")
    return [printed.mark for printed in output.read()]


def test_workers_whose_output_is_shown(tmp_path: Path) -> None:
    def shown(which: str, stages: int, replicas: int = 1) -> list[str]:
        return marks(tmp_path, which, Placement.identity(stages, replicas))

    assert shown("stage", 3) == ["[stage 0]", "[stage 2]"]
    assert shown("stage", 1) == ["[stage 0]"]
    assert shown("stage", 2, 2) == ["[stage 0]", "[stage 1]"]  # of the first replica
    assert shown("all", 3) == ["[stage 0]", "[stage 1]", "[stage 2]"]
    assert shown("all", 1, 2) == ["[stage 0 of replica 0]", "[stage 0 of replica 1]"]
    assert shown("none", 3) == []


def test_the_last_stage_may_be_on_any_worker(tmp_path: Path) -> None:
    assert marks(tmp_path, "stage", Placement.looped(3, 2)) == ["[stages 0, 3]", "[stages 2, 5]"]
    v_shaped = Placement(((0, 3), (1, 2)))
    assert marks(tmp_path, "stage", v_shaped) == ["[stages 0, 3]"]


def test_the_last_stage_may_move_to_another_worker(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    (tmp_path / "logs").mkdir()
    output = WorkerOutput(run_dir, "stage", Placement.identity(3))
    run_dir.worker_log(1).write_text("before the last stage moved here\n")
    output.follow(Placement.identity(2))
    with run_dir.worker_log(1).open("a") as file:
        file.write("as the last\n")
    assert [*output.read()] == whole("as the last", mark="[stage 1]")
    output.follow(Placement(((0, 1),)))
    with run_dir.worker_log(0).open("a") as file:
        file.write("alone\n")
    assert [*output.read()] == whole("alone", mark="[stages 0, 1]")
