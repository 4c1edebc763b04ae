"""What is said of a job and when, by a clock of the tests' own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from pipeworker.job.options import Options
from pipeworker.record.metrics.rows import Rows
from pipeworker.record.rundir import RunDir
from pipeworker.session.show.output import Output, Said
from pipeworker.session.show.plain import Show
from pipeworker.session.show.screen import Screen
from pipeworker.session.show.view import View
from pipeworker.wire.lines import Again, Planned, Verdict, Warned
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.step import StepResult
from support.jobs import until

PLANNED = Planned("gpipe", 8, (2, 1), 0.125)
DONE = Verdict("done", 0, 4, 1.0, (1, 1), 0.5, None)


def step(number: int) -> StepResult:
    return StepResult(number, 0.5, 10, 0.1, 100.0, 1.0, 0.1, 0.25, 0)


class Shown:
    """Lines, at times that a test chooses."""

    def __init__(self, steps: int | None = None, **view: Any) -> None:
        self.out, self.error = StringIO(), StringIO()
        self.now = 100.0
        done, epochs = view.pop("done", 0), view.pop("epochs", None)
        options = Options("job.py", 2, 8, steps=steps, epochs=epochs, resume_step=done)
        self.show = Show(
            options, "/nowhere", View(**view), self.out, self.error, now=lambda: self.now
        )

    def at(self, now: float, *events: Any) -> list[str]:
        """What is said when these are heard."""
        self.now = now
        before = self.out.tell()
        for event in events:
            self.show.hear(event)
        self.show.look()
        return self.out.getvalue()[before:].splitlines()

    def steps(self, now: float, *numbers: int) -> list[str]:
        return [line.partition("  ")[0] for line in self.at(now, *map(step, numbers))]


def test_lines_come_at_a_readable_pace() -> None:
    shown = Shown()
    assert shown.steps(0.0, 1) == ["step 1"]
    assert shown.steps(0.5, 2, 3) == []
    assert shown.steps(0.9, 4) == []
    assert shown.steps(1.0) == ["step 4"]  # though nothing comes
    assert shown.steps(1.9, 5) == []
    assert shown.steps(7.0, 6, 7) == ["step 6"]
    assert shown.at(7.1, DONE)[0].startswith("step 7  ")  # the last


def test_the_first_and_the_last_step_are_shown() -> None:
    shown = Shown(6, done=3)
    assert shown.steps(0.0, 4) == ["step 4/6"]
    assert shown.steps(0.1, 5) == []
    assert shown.steps(0.2, 6) == ["step 6/6"]
    assert shown.at(0.3, DONE)[0].startswith("done: ")


def test_lines_every_so_many_steps() -> None:
    shown = Shown(log_every=3)
    assert shown.steps(0.0, *range(1, 8)) == ["step 1", "step 3", "step 6"]
    assert shown.steps(9.0, 8) == []
    assert shown.at(9.0, DONE)[0].startswith("step 8")


def test_an_evaluation_stands_behind_its_step() -> None:
    shown = Shown()
    shown.steps(0.0, 1)
    said = shown.at(0.1, step(2), Evaluation(2, 0.25))
    assert [line.partition("  ")[0] for line in said] == ["step 2", "evaluation after step 2"]
    every = Shown(log_every=10)
    every.steps(0.0, 1)
    assert every.at(0.1, step(2), Evaluation(2, 0.25)) == ["evaluation after step 2  loss 0.2500"]


def test_the_banner_says_what_was_not_said() -> None:
    assert Shown(60).at(0.0, replace(PLANNED, steps=60)) == [
        "2 stages (2,1 layers), 8 micro-batches, gpipe; run directory /nowhere",
        "seed 0, 60 steps, 1 thread a worker, cpu, fp32",
    ]
    few = replace(PLANNED, microbatches=5, device="cuda")
    fewer, defaults = Shown().at(0.0, few)
    assert "5 micro-batches (not 8: a mini-batch has no more samples), gpipe" in fewer
    assert defaults == "seed 0, one pass over the data, 1 thread a worker, cuda, fp32"


def test_the_banner_says_where_options_are_from_that_nobody_typed() -> None:
    origins = {"steps": "PIPEWORKER_STEPS", "keep": "a.toml", "balance": "a.toml"}
    *_, one, other = Shown(6, origins=origins).at(0.0, PLANNED)
    assert one == "from PIPEWORKER_STEPS: --steps 6"
    assert other == "from a.toml: --keep 2 --balance (by default)"


def test_what_is_known_of_the_data_is_a_total() -> None:
    """Not before the plan: that says how long `data()` is."""
    one, three = Shown(), Shown(epochs=3)
    assert one.at(0.0, replace(PLANNED, steps=50))[1].startswith(
        "seed 0, one pass over the data (50 steps), "
    )
    assert one.steps(0.0, 1) == ["step 1/50"]
    assert one.steps(0.0, 50) == ["step 50/50"]
    assert three.at(0.0, PLANNED)[1].startswith("seed 0, 3 epochs, ")
    assert three.steps(0.0, 1) == ["step 1"]


def test_the_banner_is_said_again_where_the_stages_are_others() -> None:
    shown = Shown()
    assert len(shown.at(0.0, PLANNED)) == 2
    assert shown.at(1.0, PLANNED) == []
    (banner, _) = shown.at(2.0, Planned("gpipe", 8, (3,), 0.0))
    assert banner.startswith("1 stage (3 layers)")


def test_a_warning_is_said_once() -> None:
    shown = Shown()
    shown.at(0.0, Warned("a"), Warned("b"), Warned("a"))
    assert shown.error.getvalue() == "warning: a\nwarning: b\n"


def test_what_an_error_quotes_does_not_move_the_cursor() -> None:
    shown = Shown()
    failed = replace(DONE, status="failed", error="it raised \x1b[2Jx\u202e\n\tat y\r", steps=0)
    shown.at(0.0, Warned("of \x1b[31m\x07z"), failed)
    assert shown.error.getvalue() == "warning: of z\nerror: it raised x\n\tat y\n"


def test_quiet_says_warnings_and_errors_alone() -> None:
    shown = Shown(quiet=True)
    failed = Verdict("failed", 1, 4, 1.0, (), 0.5, "why")
    events = (PLANNED, step(1), Evaluation(1, 0.5), Warned("careful"), failed)
    assert shown.at(0.0, *events) == []
    assert shown.error.getvalue() == "warning: careful\nerror: why\n"


def test_verbose_says_more_of_a_step() -> None:
    (line,) = Shown(verbose=True).at(0.0, step(1))
    assert "gradient norm 1.0000  epoch 0" in line


def test_what_the_job_prints_is_marked_and_not_torn() -> None:
    shown = Shown()
    shown.show.printed([Said("[stage 0]", "hello"), Said("[stage 0]", "there")])
    for percent in range(0, 60, 20):  # drawn anew, within a second
        shown.show.printed([Said("[stage 1]", f"{percent}%", whole=False)])
    shown.now += 1.0
    shown.show.printed([Said("[stage 1]", "80%", whole=False), Said("[stage 1]", "100%")])
    assert shown.out.getvalue().splitlines() == [
        "[stage 0] hello",
        "[stage 0] there",
        "[stage 1] 0%",
        "[stage 1] 80%",
        "[stage 1] 100%",
    ]


class Broken(StringIO):
    """A file that takes nothing."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, _: str) -> int:
        raise OSError(self._number, "nothing doing")


def test_a_full_file_is_said_once_and_ends_nothing() -> None:
    error = StringIO()
    show = Show(Options("job.py", 2, 8), "/nowhere", View(), Broken(errno.ENOSPC), error)
    for number in (1, 2, 3):
        show.hear(step(number))
    show.hear(DONE)
    assert show.gone is None
    assert error.getvalue() == "warning: cannot write standard output: nothing doing\n"


def test_where_nobody_reads_the_job_goes_on() -> None:
    error = StringIO()
    show = Show(Options("job.py", 2, 8), "/nowhere", View(), Broken(errno.EPIPE), error)
    for event in (PLANNED, step(1), Warned("careful"), DONE):
        show.hear(event)
    assert show.gone is None
    assert error.getvalue().splitlines() == [
        "warning: nobody reads standard output any more: the job goes on without it",
        "warning: careful",
    ]


def test_where_a_terminal_is_gone_standard_error_has_the_rest() -> None:
    error = StringIO()
    show = Show(Options("job.py", 2, 8), "/nowhere", View(), Broken(errno.EIO), error)
    show.hear(PLANNED)
    assert show.gone is not None
    show.hear(DONE)
    said = error.getvalue().splitlines()
    assert said[0] == "warning: nobody reads standard output any more"
    assert "done: 4 steps in 1.0 s" in said


def test_where_nobody_reads_anything_nothing_is_said() -> None:
    gone = Broken(errno.EIO)
    show = Show(Options("job.py", 2, 8), "/nowhere", View(), gone, gone)
    for event in (PLANNED, step(1), Warned("careful"), DONE):
        show.hear(event)
    assert isinstance(show.gone, OSError)


# In a thread of its own.


class Stuck(StringIO):
    """A reader that stands still until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        assert self.go.wait(60)
        return super().write(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def screen_on(folder: Path, out: StringIO, **view: Any) -> Screen:
    options = Options("job.py", 2, 8)
    show = Show(options, str(folder), View(**view), out, out)
    return Screen(show, Output(RunDir(folder), "stage", 2))


def test_a_reader_that_stands_still_holds_up_nobody(folder: Path) -> None:
    out = Stuck()
    screen = screen_on(folder, out, log_every=1)
    for number in range(1, 5000):
        screen.hear(step(number))
    screen.hear(Warned("the last"))
    out.go.set()
    screen.hear(DONE)
    said = out.getvalue().splitlines()
    assert said[0].startswith("step 1 ")
    assert 1000 < sum(line.startswith("step") for line in said) < 1100  # no more wait for it
    assert "warning: the last" in said


@pytest.mark.parametrize("recorded", [3, 4])
def test_the_loss_at_the_end_is_that_of_the_last_step_though_it_was_not_heard_of(
    folder: Path, recorded: int
) -> None:
    rows = Rows(RunDir(folder).metrics)
    rows.add({"step": recorded, "loss": 0.25})
    rows.close()
    out = StringIO()
    screen = screen_on(folder, out)
    screen.hear(step(2))
    screen.hear(DONE)
    assert [line for line in out.getvalue().splitlines() if line.startswith("loss:")] == (
        ["loss: 0.2500"] if recorded == DONE.steps else []
    )


def test_last_words_come_before_what_is_said_of_the_end(folder: Path) -> None:
    out = StringIO()
    screen = screen_on(folder, out)
    log = folder / "logs" / "stage-1.log"
    log.write_text("help")
    screen.hear(Again(2, "it was killed", 2))
    screen.hear(Warned("stage 1 was killed"))
    until(lambda: "killed" in out.getvalue())
    log.write_text("helphello again\nfare")
    screen.hear(DONE)
    assert out.getvalue().splitlines()[:4] == [
        "[stage 1] help",
        "warning: stage 1 was killed",
        "[stage 1] hello again",
        "[stage 1] fare",
    ]


def test_a_job_that_ended_itself_says_so_once(folder: Path) -> None:
    """Its other workers may have been about to: what they printed is still in their logs."""
    out = StringIO()
    screen = screen_on(folder, out)
    (folder / "logs" / "stage-1.log").write_text("usage: job.py\n")
    screen.hear(replace(DONE, status="failed", error="usage: job.py", own=True, steps=0))
    assert out.getvalue().count("usage: job.py") == 1


def test_what_is_printed_is_shown_while_nothing_happens(folder: Path) -> None:
    out = StringIO()
    screen = screen_on(folder, out)
    (folder / "logs" / "stage-0.log").write_text("still reading\n")
    until(lambda: out.getvalue() == "[stage 0] still reading\n")
    screen.close()
    screen.close()
    assert not any(thread.name == "screen" for thread in threading.enumerate())


def test_a_terminal_that_is_gone_is_told_once(folder: Path) -> None:
    screen = screen_on(folder, Broken(errno.EIO))

    def heard() -> Iterator[bool]:
        for number in range(1, 1000):
            try:
                screen.hear(step(number))
                yield False
            except OSError:
                yield True

    until(lambda: True in heard())
    screen.hear(Warned("more"))
    screen.hear(DONE)
