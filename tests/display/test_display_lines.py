"""The lines of a job and their times, by a clock that the test sets; and the display's thread."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from pipeworker.display import lines
from pipeworker.display.lines import LineDisplay
from pipeworker.display.output import Printed, WorkerOutput
from pipeworker.display.style import Style
from pipeworker.display.thread import DisplayThread
from pipeworker.facts.speed import Speed
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.job.options import Options
from pipeworker.plan.placement import Placement
from pipeworker.record.metrics.rows import Rows
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Activity, Planned, Restart, Verdict, Warned
from support.real_jobs.jobs import until

NOWHERE = RunDir(Path("/nowhere"))
PLANNED = Planned("gpipe", 8, (2, 1), ((0,), (1,)), 0.125)
DONE = Verdict("done", 0, 4, 1.0, (1, 1), 0.5, None)


def step(number: int) -> StepResult:
    return StepResult(number, 0.5, 10, 0.1, 100.0, 1.0, 0.1, 0.25, 0)


class Shown:
    """A display whose clock the test sets."""

    def __init__(self, steps: int | None = None, **style: Any) -> None:
        self.out, self.error = StringIO(), StringIO()
        self.now = 100.0
        done, epochs = style.pop("done", 0), style.pop("epochs", None)
        options = Options("job.py", 2, 8, steps=steps, epochs=epochs, resume_step=done)
        self.display = LineDisplay(
            options, NOWHERE, Style(**style), self.out, self.error, now=lambda: self.now
        )

    def at(self, now: float, *events: Any) -> list[str]:
        """Return the lines that these events cause."""
        self.now = now
        before = self.out.tell()
        for event in events:
            self.display.show(event)
        self.display.tick()
        return self.out.getvalue()[before:].splitlines()

    def steps(self, now: float, *numbers: int) -> list[str]:
        return [line.partition("  ")[0] for line in self.at(now, *map(step, numbers))]


def test_step_lines_come_at_most_once_a_second() -> None:
    shown = Shown()
    assert shown.steps(0.0, 1) == ["step 1"]
    assert shown.steps(0.5, 2, 3) == []
    assert shown.steps(0.9, 4) == []
    assert shown.steps(1.0) == ["step 4"]  # without another event
    assert shown.steps(1.9, 5) == []
    assert shown.steps(7.0, 6, 7) == ["step 6"]
    assert shown.at(7.1, DONE)[0].startswith("step 7  ")  # the last


def test_a_job_says_at_once_that_it_starts() -> None:
    for stages, text in ((1, "starting 1 worker\n"), (4, "starting 4 workers\n")):
        out = StringIO()
        LineDisplay(Options("job.py", stages, 8), NOWHERE, Style(), out, StringIO()).begin()
        assert out.getvalue() == text


def test_lines_have_the_memory_if_they_are_verbose() -> None:
    activity = Activity((5 << 20, 6 << 20))
    assert "  memory 5, 6 MB" in Shown(verbose=True).at(0.0, activity, step(1))[0]
    assert "memory" not in Shown().at(0.0, activity, step(1))[0]


def test_the_first_and_the_last_step_are_shown() -> None:
    shown = Shown(6, done=3)
    assert shown.steps(0.0, 4) == ["step 4/6"]
    assert shown.steps(0.1, 5) == []
    assert shown.steps(0.2, 6) == ["step 6/6"]
    assert shown.at(0.3, DONE)[0].startswith("done: ")


def test_log_every() -> None:
    shown = Shown(log_every=3)
    assert shown.steps(0.0, *range(1, 8)) == ["step 1", "step 3", "step 6"]
    assert shown.steps(9.0, 8) == []
    assert shown.at(9.0, DONE)[0].startswith("step 8")


def test_a_line_has_the_time_that_is_left_for_the_steps_of_the_job() -> None:
    shown = Shown(9)
    shown.at(0.0, step(1))
    assert shown.at(2.0, step(2))[0].endswith("  0:14 left")
    assert "left" not in shown.at(16.0, step(9))[0]


def test_an_evaluation_follows_the_line_of_its_step() -> None:
    shown = Shown()
    shown.steps(0.0, 1)
    lines = shown.at(0.1, step(2), Evaluation(2, 0.25))
    assert [line.partition("  ")[0] for line in lines] == ["step 2", "evaluation after step 2"]
    every = Shown(log_every=10)
    every.steps(0.0, 1)
    assert every.at(0.1, step(2), Evaluation(2, 0.25)) == ["evaluation after step 2  loss 0.2500"]


def test_the_banner_shows_defaults() -> None:
    assert Shown(60).at(0.0, replace(PLANNED, steps=60)) == [
        "2 stages (2,1 layers), 8 micro-batches, gpipe; run directory /nowhere",
        "seed 0, 60 steps, 1 thread per worker, cpu, fp32",
    ]
    assert Shown(1).at(0.0, replace(PLANNED, steps=1))[1].startswith("seed 0, 1 step, ")
    few = replace(PLANNED, microbatches=5, device="cuda")
    fewer, defaults = Shown().at(0.0, few)
    assert "5 micro-batches (not 8: a mini-batch has no more samples), gpipe" in fewer
    first = "seed 0, one pass over the data, until data() ends, "
    assert defaults == f"{first}1 thread per worker, cuda, fp32"


def test_the_banner_shows_the_sources_of_options_that_were_not_typed() -> None:
    origins = {"steps": "PIPEWORKER_STEPS", "keep": "a.toml", "balance": "a.toml"}
    *_, one, other = Shown(6, origins=origins).at(0.0, PLANNED)
    assert one == "from PIPEWORKER_STEPS: --steps 6"
    assert other == "from a.toml: --keep 2 --balance (by default)"


def test_the_length_of_the_data_gives_the_total() -> None:
    """The length of `data()` is known from the plan on."""
    one, three = Shown(), Shown(epochs=3)
    assert one.at(0.0, replace(PLANNED, steps=50))[1].startswith(
        "seed 0, one pass over the data (50 steps), "
    )
    assert one.steps(0.0, 1) == ["step 1/50"]
    assert one.steps(0.0, 50) == ["step 50/50"]
    assert three.at(0.0, PLANNED)[1].startswith("seed 0, 3 epochs, ")
    assert three.steps(0.0, 1) == ["step 1"]


def test_the_banner_is_repeated_when_the_stages_change() -> None:
    shown = Shown()
    assert len(shown.at(0.0, PLANNED)) == 2
    assert shown.at(1.0, PLANNED) == []
    (banner, _) = shown.at(2.0, Planned("gpipe", 8, (3,), ((0,),), 0.0))
    assert banner.startswith("1 stage (3 layers)")


def test_the_plan_says_what_it_predicts_and_why() -> None:
    short, recompute = "balance 2,1: it is short", "recompute on stage 0"
    for seconds, why, line in (
        (0.0859, (short, recompute), f"plan: 85.9 ms a step; {short}; {recompute}"),
        (0.0, (short,), f"plan: {short}"),
        (0.0, (), ""),
    ):
        lines = Shown().at(0.0, replace(PLANNED, step_seconds=seconds, why=why))
        assert [one for one in lines if one.startswith("plan: ")] == [line] * bool(line)


def test_a_warning_is_shown_once() -> None:
    shown = Shown()
    shown.at(0.0, Warned("a"), Warned("b"), Warned("a"))
    assert shown.error.getvalue() == "warning: a\nwarning: b\n"


def test_a_quiet_display_shows_warnings_and_no_notes() -> None:
    shown = Shown(quiet=True)
    shown.at(0.0, Warned("a", note=True), Warned("b"))
    assert shown.error.getvalue() == "warning: b\n"


def test_errors_cannot_move_the_cursor() -> None:
    shown = Shown()
    failed = replace(DONE, status="failed", error="it raised \x1b[2Jx\u202e\n\tat y\r", steps=0)
    shown.at(0.0, Warned("of \x1b[31m\x07z"), failed)
    assert shown.error.getvalue() == "warning: of z\nerror: it raised x\n\tat y\n"


def test_the_error_is_shown_if_the_run_directory_cannot_be_read() -> None:
    out = StringIO()
    options = Options("job.py", 2, 4)
    lines = LineDisplay(options, RunDir(Path("/", "long" * 100)), Style(), out, out)
    lines.show(Verdict("failed", 1, 0, 0.0, (), 0.0, "no room"))
    assert "error: no room" in out.getvalue()


def test_quiet_shows_only_warnings_and_errors() -> None:
    shown = Shown(quiet=True)
    failed = Verdict("failed", 1, 4, 1.0, (), 0.5, "why")
    events = (PLANNED, step(1), Evaluation(1, 0.5), Warned("careful"), failed)
    assert shown.at(0.0, *events) == []
    assert shown.error.getvalue() == "warning: careful\nerror: why\n"
    for quiet, text in ((True, "interrupted\n"), (False, "")):  # which the summary begins with
        shown = Shown(quiet=quiet)
        shown.at(0.0, replace(DONE, status="interrupted"))
        assert shown.error.getvalue() == text


@pytest.mark.parametrize("status", [0, 2])
def test_the_message_of_a_job_file_is_no_error_if_its_status_is_0(status: int) -> None:
    shown = Shown(quiet=True)
    shown.at(0.0, Verdict("failed", status, 0, 1.0, (), 0.5, "usage: job.py", job_exited=True))
    written, other = (shown.error, shown.out) if status else (shown.out, shown.error)
    assert (written.getvalue(), other.getvalue()) == ("usage: job.py\n", "")


def test_the_plan_names_replicas_and_workers_that_hold_several_stages() -> None:
    looped = replace(PLANNED, balance=(1, 1, 1, 1), held=((0, 2), (1, 3)), replicas=2)
    first, *_ = Shown().at(0.0, looped)
    assert first.startswith("2 replicas of 4 stages (1,1,1,1 layers) on 2 workers, 8 micro-batches")


def test_verbose_shows_more_figures() -> None:
    (line,) = Shown(verbose=True).at(0.0, step(1))
    assert "gradient norm 1.0000  epoch 0" in line


def test_output_is_marked_and_redrawn_lines_are_limited() -> None:
    shown = Shown()
    shown.display.show_output([Printed("[stage 0]", "hello"), Printed("[stage 0]", "there")])
    for percent in range(0, 60, 20):  # redrawn within a second
        shown.display.show_output([Printed("[stage 1]", f"{percent}%", whole=False)])
    shown.now += 1.0
    shown.display.show_output(
        [Printed("[stage 1]", "80%", whole=False), Printed("[stage 1]", "100%")]
    )
    shown.now += 1.0
    shown.display.show_output([Printed("[stage 1]", "", whole=False)])  # it is complete
    assert shown.out.getvalue().splitlines() == [
        "[stage 0] hello",
        "[stage 0] there",
        "[stage 1] 0%",
        "[stage 1] 80%",
        "[stage 1] 100%",
    ]


class Broken(StringIO):
    """A file that rejects all writes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, _: str) -> int:
        raise OSError(self._number, "nothing doing")


def test_a_full_disk_is_reported_once_and_ends_nothing() -> None:
    error = StringIO()
    display = LineDisplay(Options("job.py", 2, 8), NOWHERE, Style(), Broken(errno.ENOSPC), error)
    for number in (1, 2, 3):
        display.show(step(number))
    display.show(DONE)
    assert display.lost is None
    assert error.getvalue() == "warning: standard output: cannot be written: nothing doing\n"


def test_the_job_continues_when_its_reader_is_gone() -> None:
    error = StringIO()
    display = LineDisplay(Options("job.py", 2, 8), NOWHERE, Style(), Broken(errno.EPIPE), error)
    for event in (PLANNED, step(1), Warned("careful"), DONE):
        display.show(event)
    assert display.lost is None
    assert error.getvalue().splitlines() == [
        "warning: standard output: its reader is gone; the job continues without it",
        "warning: careful",
    ]


def test_standard_error_gets_the_rest_when_the_terminal_is_gone() -> None:
    error = StringIO()
    display = LineDisplay(Options("job.py", 2, 8), NOWHERE, Style(), Broken(errno.EIO), error)
    display.show(PLANNED)
    assert display.lost is not None
    display.show(DONE)
    lines = error.getvalue().splitlines()
    assert lines[0] == "warning: standard output: its terminal is gone"
    assert "done: 4 steps in 1.0 s" in lines


def test_nothing_is_written_when_both_streams_are_gone() -> None:
    gone = Broken(errno.EIO)
    display = LineDisplay(Options("job.py", 2, 8), NOWHERE, Style(), gone, gone)
    for event in (PLANNED, step(1), Warned("careful"), DONE):
        display.show(event)
    assert isinstance(display.lost, OSError)


# The display in its thread.


class Stuck(StringIO):
    """A reader that blocks until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        assert self.released.wait(60)
        return super().write(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def display_on(folder: Path, out: StringIO, **style: Any) -> DisplayThread:
    options = Options("job.py", 2, 8)
    lines = LineDisplay(options, RunDir(folder), Style(**style), out, out)
    return DisplayThread(lines, WorkerOutput(RunDir(folder), "stage", Placement.identity(2)))


def test_a_blocked_reader_delays_no_event(folder: Path) -> None:
    out = Stuck()
    display = display_on(folder, out, log_every=1)
    for number in range(1, 5000):
        display.show(step(number))
    display.show(Warned("the last"))
    out.released.set()
    display.show(DONE)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1 ")
    assert 1000 < sum(line.startswith("step") for line in lines) < 1100  # the rest is left out
    assert "warning: the last" in lines


@pytest.mark.parametrize("recorded", [3, 4])
def test_a_last_step_that_was_not_received_has_its_loss_from_the_record(
    folder: Path, recorded: int
) -> None:
    rows = Rows(RunDir(folder).metrics)
    rows.add({"step": recorded, "loss": 0.25})
    rows.close()
    out = StringIO()
    display = display_on(folder, out)
    display.show(step(2))
    display.show(DONE)
    assert [line for line in out.getvalue().splitlines() if line.startswith("loss:")] == (
        ["loss: 0.2500"] if recorded == DONE.steps else []
    )


def test_the_last_output_of_workers_comes_before_the_report_of_their_end(folder: Path) -> None:
    out = StringIO()
    display = display_on(folder, out)
    log = folder / "logs" / "worker-1.log"
    log.write_text("help")
    display.show(Restart(2, "it was killed", 2))
    display.show(Warned("stage 1 was killed"))
    until(lambda: "killed" in out.getvalue())
    with log.open("a") as end:
        end.write("hello again\nfare")
    display.show(DONE)
    assert out.getvalue().splitlines()[:4] == [
        "[stage 1] help",
        "warning: stage 1 was killed",
        "[stage 1] hello again",
        "[stage 1] fare",
    ]


def test_a_job_file_that_ends_the_job_has_its_message_shown_once(folder: Path) -> None:
    """Other workers may have printed the same: it is still in their logs."""
    out = StringIO()
    display = display_on(folder, out)
    (folder / "logs" / "worker-1.log").write_text("usage: job.py\n")
    display.show(replace(DONE, status="failed", error="usage: job.py", job_exited=True, steps=0))
    assert out.getvalue().count("usage: job.py") == 1


def test_output_is_shown_between_events(folder: Path) -> None:
    out = StringIO()
    display = display_on(folder, out)
    (folder / "logs" / "worker-0.log").write_text("still reading\n")
    until(lambda: out.getvalue() == "[stage 0] still reading\n")
    display.close()
    display.close()
    assert not any(thread.name == "display" for thread in threading.enumerate())


def test_output_comes_before_the_next_event_and_a_delayed_step_after_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_SECONDS", 0.01)
    out = StringIO()
    display = display_on(folder, out)
    display.show(PLANNED)
    until(lambda: "seed" in out.getvalue())
    for number in range(10):
        with (folder / "logs" / "worker-0.log").open("a") as log:
            log.write(f"reads {number}\n")
        display.show(Warned(f"warning {number}"))
        until(lambda: f"warning {number}" in out.getvalue())  # noqa: B023
    found = [line for line in out.getvalue().splitlines() if line[-1].isdigit()]
    assert [line for line in found if "reads" in line or "warning" in line][-4:] == [
        *("[stage 0] reads 8", "warning: warning 8", "[stage 0] reads 9", "warning: warning 9")
    ]
    display.show(step(1))
    display.show(step(2))
    until(lambda: "step 2 " in out.getvalue())
    display.close()


def test_the_loss_of_a_terminal_is_raised_once(folder: Path) -> None:
    display = display_on(folder, Broken(errno.EIO))

    def raised() -> Iterator[bool]:
        for number in range(1, 1000):
            try:
                display.show(step(number))
                yield False
            except OSError:
                yield True

    until(lambda: True in raised())
    display.show(Warned("more"))
    display.show(DONE)


@pytest.mark.parametrize(("accumulate", "milliseconds"), [(1, "0.5 ms"), (4, "0.1 ms")])
def test_the_micro_batches_of_a_step_are_those_of_all_its_mini_batches(
    accumulate: int, milliseconds: str
) -> None:
    out = StringIO()
    options = Options("job.py", 2, 8, accumulate=accumulate, threads=1)
    display = LineDisplay(options, NOWHERE, Style(), out, StringIO(), now=lambda: 9.0)
    display.show(replace(PLANNED, device="cuda"))
    speed = Speed(0.02, 1.0, 0.0, (0.016, 0.016), 0.0)
    for number in range(4):
        display.show(replace(step(number + 1), seconds=0.02))
    display.show(replace(DONE, bubble=0.9, busy=(0.2, 0.2), speed=speed))
    assert f"a worker computes {milliseconds} for a micro-batch" in out.getvalue()


@pytest.mark.parametrize(
    ("device", "hosts", "shares"), [("cpu", 1, True), ("cuda", 1, False), ("cpu", 2, False)]
)
def test_only_workers_on_the_processor_of_one_host_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, device: str, hosts: int, shares: bool
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    out = StringIO()
    display = LineDisplay(Options("job.py", 2, 8), NOWHERE, Style(), out, StringIO())
    display.show(replace(PLANNED, device=device, hosts=hosts))
    display.show(step(4))
    display.show(replace(DONE, bubble=0.9, busy=(0.2, 0.2)))
    assert ("2 workers share 1 core" in out.getvalue()) == shares
