"""The command `plan`: schedules before they run."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner, Result

import cli
from launcher.options import LAUNCH_PARAMETERS
from launcher.plan import plan
from pipeworker.display.plan.schedules import EqualStages, side_by_side
from pipeworker.plan.orders import ORDERS
from pipeworker.runs.schedule_file import read_schedule
from support.pure.orders import build
from support.slow import slow


def run(*words: str, color: bool = False) -> Result:
    return CliRunner().invoke(cli.main, ["plan", *words], prog_name="pipeworker", color=color)


def shown(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 2
    return result.output.removeprefix("error: ").rstrip()


def rows(output: str) -> dict[str, list[str]]:
    """Return the cells of the table of schedules, by their names."""
    _, _, table = output.partition("\nschedule ")
    return {cells[0]: cells[1:] for cells in map(str.split, table.splitlines()[1:])}


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `pipeworker plan … --text | head`."""

    def write(text: str, **_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(click, "echo", write)
    result = run("--stages", "2", "--text")
    assert (result.exit_code, result.output) == (1, "")


def test_schedules_stand_side_by_side() -> None:
    output = shown("--stages", "4", "--microbatches", "8", "--recompute", "never")
    assert output.startswith("4 stages, 8 micro-batches, gpipe, bubble 27.3%\n")
    found = rows(output)
    assert found.keys() == ORDERS.keys()
    assert found["gpipe"] == ["1", "33", f"{3 / 11:.1%}", "8"]
    assert found["1f1b"] == ["1", "33", f"{3 / 11:.1%}", "4"]
    assert found["interleaved-1f1b"] == ["2", "28.5", f"{1.5 / 9.5:.1%}", "5.5"]
    assert [found[name][-1] for name in ("zbv", "v-half", "v-min")] == ["4", "3", "2"]


def test_a_long_step_is_shown_in_full_digits() -> None:
    long = EqualStages.of(build("gpipe", 2, 3400, "never"))
    (found,) = rows("\n" + "\n".join(side_by_side({"gpipe": long}))).values()
    assert (found[1], found[3]) == ("10203", "3400")


@pytest.mark.usefixtures("users_defaults")
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        pytest.param(name, recompute, marks=slow if (number + turn) % 3 else ())
        for number, name in enumerate(sorted(ORDERS))
        for turn, recompute in enumerate(["always", "except_first", "never"])
    ],
)
def test_the_printed_text_is_a_schedule_file(name: str, recompute: str, tmp_path: Path) -> None:
    words = ("--stages", "3", "--microbatches", "5", "--recompute", recompute)
    file = tmp_path / "mine.txt"
    file.write_text(shown("--schedule", name, *words, "--text"))
    assert file.read_text().startswith(f"{name} stages=")
    own = read_schedule(file)
    again = shown("--schedule", str(file), "--text")
    assert again == own
    made = build(name, 3, 5, recompute)
    output = shown("--schedule", str(file))
    stages = made.placement.stages
    on = "" if stages == 3 else " on 3 workers"
    assert output.startswith(f"{stages} stages{on}, 5 micro-batches, mine.txt, bubble ")
    found = rows(output)
    assert found["mine.txt"] == found[name] or recompute == "except_first"


def test_the_number_of_stages_is_that_of_a_file_or_given(tmp_path: Path) -> None:
    assert refused() == "--stages: missing; give the number of stages"
    file = tmp_path / "mine.txt"
    file.write_text(shown("--stages", "2", "--microbatches", "3", "--text"))
    assert "has lines for 2 workers, and the job has 3" in refused(
        "--stages", "3", "--schedule", str(file)
    )


def test_a_replica_runs_its_part_of_the_micro_batches(tmp_path: Path) -> None:
    words = ("--stages", "2", "--replicas", "2", "--microbatches", "5")
    assert shown(*words).startswith("2 stages, 3 micro-batches, gpipe")
    (file := tmp_path / "own.txt").write_text(shown(*words, "--text"))
    again = shown("--replicas", "2", "--schedule", str(file), "--recompute", "auto")
    assert again.startswith("2 stages, 3 micro-batches, own.txt")


def test_variables_give_options_of_a_job_but_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEWORKER_STAGES", "3")
    monkeypatch.setenv("PIPEWORKER_JSON", "1")
    monkeypatch.setenv("PIPEWORKER_AS_JSON", "1")
    assert shown("--microbatches", "4").startswith("3 stages, 4 micro-batches, gpipe, bubble ")


def test_a_schedule_that_cannot_run_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("mine stages=2 microbatches=2\n0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1\n")
    assert refused("--schedule", str(file)) == (
        f"--schedule {file}: schedule mine.txt deadlocks with 4 frames: worker 0 cannot run 0B0: "
        "it waits for 1B0 of worker 1; worker 1 cannot run 1F1: it waits for 0F1 of worker 0"
    )


def test_an_option_of_launch_that_changes_no_plan_is_rejected() -> None:
    taken = {word for one in plan.params for word in (*one.opts, *one.secondary_opts)}
    offered = {word for one in LAUNCH_PARAMETERS for word in (*one.opts, *one.secondary_opts)}
    rejected = sorted(word for word in offered - taken if word.startswith("-"))
    assert {"--run-dir", "--no-csv", "--keep"} < {*rejected}
    for word in (*rejected, "--elastic", "--restarts"):  # former names too
        assert refused("--stages", "2", word) == (
            f"{word}: an option of launch that changes no plan; leave it out"
        )
    assert refused("--lr", "3") == (
        "--lr: no such option; is it for the job file? Write: job.py -- --lr"
    )


def test_a_picture_is_written(tmp_path: Path) -> None:
    file = tmp_path / "step.svg"
    words = ("--stages", "2", "--microbatches", "4", "--recompute", "never")
    assert shown(*words, "--svg", str(file)) == f"{file}: a step of gpipe\n"
    root = ElementTree.parse(file).getroot()
    titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "2 stages, 4 micro-batches, gpipe"
    assert len([title for title in titles if ": backward of micro-batch" in title]) == 8
    for out, reason in ((".", "Is a directory"), ("none/step.svg", "No such file or directory")):
        assert refused(*words, "--svg", out) == (
            f"{out}: cannot be written: {reason}; choose another file"
        )
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert refused(*words, "--svg", str(pipe)) == f"{pipe}: is no regular file; choose another file"
    assert refused(*words, "--svg", str(file), "--text") == "--text and --svg: choose one"


def test_a_job_file_of_another_name_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "job.txt"
    file.write_text("print('never')")
    expected = f"job file {file}: not a Python file; its name must end in .py"
    assert refused("--stages", "2", str(file)) == expected


def test_a_pipe_is_no_job_file(tmp_path: Path) -> None:
    os.mkfifo(file := tmp_path / "job.py")
    expected = f"job file {file}: it is a pipe; give the path of a Python file"
    assert refused("--stages", "2", str(file)) == expected


def test_a_current_folder_that_is_gone_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Math libraries of torch end their process there."""
    (file := tmp_path / "job.py").touch()
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    expected = "the current folder is gone: No such file or directory; change to another one"
    assert refused("--stages", "2", str(file)) == expected


def test_a_timeline_has_the_width_of_the_terminal_and_its_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    words = ("--stages", "2", "--microbatches", "4", "--recompute", "never")
    plain = shown(*words)
    timeline = [line for line in plain.splitlines() if line.startswith("stage ")]
    assert [len(line) for line in timeline] == [50, 50]
    coloured = run(*words, color=True).output
    assert "\x1b[" not in plain
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(*words, color=True).output == plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert run(*words, color=True).output == plain


def test_the_job_file_may_stand_behind_the_hyphens() -> None:
    assert refused("--stages", "2", "--", "none.py").startswith("job file none.py: No such file")


@pytest.mark.parametrize(
    "words",
    [
        *(("--config", "big.toml"), ("--schedule", "auto"), ("--balance", "1,3")),
        *(("--memory", "1GB"), ("--no-profile",), ("--precision", "bf16")),
    ],
)
def test_a_file_of_options_and_a_search_are_for_a_model(words: tuple[str, ...]) -> None:
    refusal = refused("--stages", "2", *words)
    assert refusal.startswith(words[0])
    assert refusal.endswith("no model is given; add JOB_FILE")
