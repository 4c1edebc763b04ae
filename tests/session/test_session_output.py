"""What the job prints, read from the logs of its workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.host.streams import OURS, note
from pipeworker.record.rundir import RunDir
from pipeworker.session.show.output import Cutter, Log, Output, Said


def whole(*texts: str, mark: str = "[stage 0]") -> list[Said]:
    return [Said(mark, text) for text in texts]


def lines(*parts: str, ours: bool = False) -> list[str]:
    cutter = Cutter(ours=ours)
    return [line for part in parts for line in cutter.feed(part.encode())] + cutter.end()


def test_lines_are_shown_when_they_are_complete() -> None:
    cutter = Cutter()
    assert cutter.feed(b"one\ntw") == ["one"]
    assert cutter.drawn == ""
    assert cutter.feed(b"o\n\nthree") == ["two", ""]
    assert cutter.end() == ["three"]
    assert cutter.end() == []


def test_a_line_that_is_drawn_anew_is_as_it_looks_now() -> None:
    """As tqdm does it: at the beginning of each; or at its end."""
    cutter = Cutter()
    assert cutter.feed(b"\r  1%|") == []
    assert cutter.drawn == "  1%|"
    assert cutter.feed(b"\r 50%|#") == []
    assert cutter.drawn == " 50%|#"
    assert cutter.feed(b"\r100%|##\nnext") == ["100%|##"]
    assert cutter.drawn == ""
    assert cutter.feed(b"\n a\r b\r") == ["next"]
    assert cutter.drawn == " b"
    assert lines("done\r\n") == ["done"]


def test_what_pipeworker_says_there_is_not_the_jobs(capfd: pytest.CaptureFixture[str]) -> None:
    note("the job ended: x\n  at y")
    said = capfd.readouterr().err
    assert said == f"{OURS}the job ended: x\n{OURS}  at y\n"
    assert lines("one\n", said, "two\n") == ["one", "two"]
    assert lines(said, ours=True) == ["pipeworker: the job ended: x", "pipeworker:   at y"]
    assert lines("no end yet ", said) == ["no end yet "]
    assert lines("\r 10%|#", said, "\n") == [" 10%|#", ""]


def test_a_job_does_not_move_the_cursor() -> None:
    """Colours, titles, bells, a bar above a bar: only the words are shown."""
    assert lines("\x1b[1;31mred\x1b[0m \x1b]0;title\x07\x07bell\x1b[A\x9b\b\n") == ["red bell"]
    assert lines("a\tb é 漢 \N{SNOWMAN}\n") == ["a\tb é 漢 \N{SNOWMAN}"]
    marks = "\u202e\u2066\u2069\u200f\u061c\u2028"  # an order that is not the text's
    assert lines(f"abc{marks}def\n") == ["abcdef"]
    cutter = Cutter()
    assert cutter.feed(b"\xff\n") == ["\N{REPLACEMENT CHARACTER}"]


def test_no_line_is_endless() -> None:
    cutter = Cutter()
    found = [line for _ in range(100) for line in cutter.feed(b"x" * 1000)]
    assert {len(line) for line in found} == {4096}
    assert sum(map(len, [*found, *cutter.end()])) == 100_000
    for number in range(10_000):
        assert cutter.feed(b"\r %d" % number) == []
    assert cutter.drawn == " 9999"
    assert len(cutter._rest) < 5000


@given(st.lists(st.text("ab\n\r", max_size=6), max_size=8))
def test_how_it_arrives_makes_no_difference(parts: list[str]) -> None:
    assert lines(*parts) == lines("".join(parts))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    (tmp_path / "stage-0.log").write_text("before\n")
    return Log(tmp_path / "stage-0.log", "[stage 0]")


def write(log: Log, text: str) -> None:
    with log.path.open("a") as file:
        file.write(text)


def test_a_log_is_followed_from_where_it_is(log: Log) -> None:
    """Who went on with the run has not printed what is there already."""
    assert [*log.more()] == []
    write(log, "one\ntwo\nthr")
    assert [*log.more()] == whole("one", "two")
    write(log, "ee\n\r 1%")
    assert [*log.more()] == [*whole("three"), Said("[stage 0]", " 1%", whole=False)]
    assert [*log.more()] == []
    assert [*log.end()] == whole(" 1%")
    assert [*log.end()] == []


def test_what_is_taken_back_at_once_was_not_shown(log: Log) -> None:
    """By a job that ends itself as soon as it is run: they are its last words."""
    write(log, "one\n")
    assert [*log.more(early=True)] == []
    write(log, "two\n")
    assert [*log.more(early=True)] == whole("one")
    log.path.write_text("before\none\n")
    assert [*log.more(early=True)] == []
    write(log, "2\n")
    assert [*log.more(early=True)] == []
    assert [*log.more()] == whole("2")


def test_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    log = Log(tmp_path / "stage-0.log", "[stage 0]")
    assert [*log.more(), *log.end()] == []
    write(log, "one\n")
    assert [*log.more()] == whole("one")
    log.path.write_text("")  # somebody has emptied it
    assert [*log.more()] == []
    write(log, "two\n")
    assert [*log.more()] == whole("two")
    log.path.unlink()
    assert [*log.more(), *log.end()] == []


def test_whoever_takes_its_place_begins_a_line(log: Log) -> None:
    """The last words of a worker that was killed have no end."""
    write(log, "before the en")
    assert [*log.more()] == []
    assert [*log.end()] == whole("before the en")
    write(log, "anew\n")
    assert [*log.more()] == whole("anew")


def test_what_comes_too_quickly_is_in_the_log(log: Log) -> None:
    write(log, "".join(f"line {number}\n" for number in range(20_000)))  # 230 KB
    skipped, *some = [said.text for said in log.more()]
    assert skipped == f"... 196 KB that came at once are in {log.path}"
    assert 500 < len(some) < 900
    assert some == [f"line {number}" for number in range(20_000 - len(some), 20_000)]
    assert [*log.more()] == []


def test_what_comes_quickly_for_a_moment_is_shown(log: Log) -> None:
    """As a large model that is printed: a part at each look."""
    written = [f"layer {number}" for number in range(4_000)]  # 44 KB
    write(log, "".join(f"{line}\n" for line in written))
    looks = [[*log.more()] for _ in range(3)]
    assert max(map(len, looks)) < 1000
    assert [said for look in looks for said in look] + [*log.end()] == whole(*written)


def test_whose_output_is_shown(tmp_path: Path) -> None:
    def shown(shows: str, stages: int, replicas: int = 1) -> list[str]:
        run_dir = RunDir(tmp_path)
        (tmp_path / "logs").mkdir(exist_ok=True)
        output = Output(run_dir, shows, stages, replicas)
        for replica in range(replicas):
            for stage in range(stages):
                path = run_dir.worker_log(stage, replica if replicas > 1 else None)
                with path.open("a") as file:
                    file.write("x\n")
        return [said.mark for said in output.more()]

    assert shown("stage", 3) == ["[stage 0]", "[stage 2]"]
    assert shown("stage", 1) == ["[stage 0]"]
    assert shown("stage", 2, 2) == ["[stage 0]", "[stage 1]"]  # of the first replica
    assert shown("all", 3) == ["[stage 0]", "[stage 1]", "[stage 2]"]
    assert shown("all", 1, 2) == ["[replica 0 stage 0]", "[replica 1 stage 0]"]
    assert shown("none", 3) == []


def test_a_job_with_fewer_stages_has_another_last_one(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    output = Output(RunDir(tmp_path), "stage", 3)
    (tmp_path / "logs" / "stage-1.log").write_text("as one between others\n")
    output.of(2)
    with (tmp_path / "logs" / "stage-1.log").open("a") as file:
        file.write("as the last\n")
    assert [*output.more()] == whole("as the last", mark="[stage 1]")
