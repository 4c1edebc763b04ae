"""The figures of a run as CSV and in TensorBoard's files."""

from __future__ import annotations

import csv
import errno
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeworker.errors import UsageError
from pipeworker.record.files.atomic_file import open_file
from pipeworker.record.metrics import formats
from pipeworker.record.metrics.formats import ExtraFormats
from pipeworker.record.metrics.rows import Row, Rows
from pipeworker.runs.resume import truncate_rows


def row(step: int, **more: Any) -> Row:
    return {"step": step, "loss": 1 / step, **more}


class Job:
    """A run directory whose figures are recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics, self.evaluation = folder / "metrics.jsonl", folder / "evaluation.jsonl"

    def record(
        self, *steps: Row, passes: tuple[Row, ...] = (), withdrawn: int | None = None
    ) -> None:
        """Record rows of steps and evaluations, as one coordinator does; withdraw the last step."""
        metrics, evaluation = Rows(self.metrics), None
        extras = ExtraFormats(
            self.metrics, self.evaluation, csv=True, events=self.folder / "events"
        )
        for step in steps:
            metrics.add(step)
            extras.add(self.metrics, step)
        for found in passes:
            evaluation = evaluation or Rows(self.evaluation)
            evaluation.add(found)
            extras.add(self.evaluation, found)
        if withdrawn is not None:
            metrics.withdraw(withdrawn)
            extras.withdraw(self.metrics, withdrawn)
        extras.close()

    def table(self, name: str = "metrics") -> list[dict[str, Any]]:
        with (self.folder / f"{name}.csv").open(newline="") as file:
            return [
                {name: float(value) for name, value in found.items() if value}
                for found in csv.DictReader(file)
            ]

    def scalars(self, tag: str = "train/loss") -> list[tuple[int, float]]:
        events = EventAccumulator(str(self.folder / "events"))
        events.Reload()
        return [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def expected(*steps: Row) -> list[tuple[int, Any]]:
    return [(step["step"], pytest.approx(step["loss"])) for step in steps]


def test_each_step_and_evaluation_is_recorded_once(job: Job) -> None:
    steps, passes = [row(1), row(2), row(3)], (row(2, accuracy=0.5),)
    job.record(*steps, passes=passes)
    assert job.table() == steps
    assert job.table("evaluation") == [*passes]
    assert job.scalars() == expected(*steps)
    assert job.scalars("evaluation/accuracy") == [(2, 0.5)]
    assert {path.suffix for path in job.folder.iterdir()} == {".jsonl", ".csv", ""}


def test_another_coordinator_appends(job: Job) -> None:
    job.record(row(1), row(2), passes=(row(2),))
    job.record(row(3), passes=(row(3),))
    assert job.table() == [row(1), row(2), row(3)]
    assert job.table("evaluation") == [row(2), row(3)]
    assert job.scalars() == expected(row(1), row(2), row(3))


def test_repeated_steps_appear_once(job: Job) -> None:
    job.record(row(1), row(2), row(3), row(4), passes=(row(2), row(4)))
    for path in (job.metrics, job.evaluation):
        truncate_rows(path, 2)
    job.record(row(3, loss=7.0), passes=(row(4, loss=9.0),))
    assert job.table() == [row(1), row(2), row(3, loss=7.0)]
    assert job.table("evaluation") == [row(2), row(4, loss=9.0)]
    assert job.scalars() == expected(row(1), row(2), row(3, loss=7.0))
    assert job.scalars("evaluation/loss") == expected(row(2), row(4, loss=9.0))


def test_steps_of_a_run_that_starts_again_appear_once(job: Job) -> None:
    job.record(row(1), row(2))
    truncate_rows(job.metrics, 0)
    job.record(row(1, loss=7.0))
    assert job.table() == [row(1, loss=7.0)]
    assert job.scalars() == expected(row(1, loss=7.0))


@pytest.mark.parametrize(
    ("lines", "damaged"), [(["{}\n"], 0), (["{}\n", '{"step": 3}\n'], 1), (["\0\n", "x\n", "y"], 2)]
)
def test_damaged_lines_are_counted_but_for_an_end_cut_off(
    job: Job, lines: list[str], damaged: int
) -> None:
    job.record(row(1), row(2))
    whole = job.metrics.read_text()
    job.metrics.write_text(whole + "".join(lines))
    assert truncate_rows(job.metrics, 2) == damaged
    assert job.metrics.read_text() == whole


def test_a_withdrawn_step_does_not_appear(job: Job) -> None:
    job.record(row(1), row(2), row(3), withdrawn=3)
    assert job.table() == [row(1), row(2)]
    assert job.scalars() == expected(row(1), row(2))
    job.record(row(3, loss=7.0))
    assert job.table() == [row(1), row(2), row(3, loss=7.0)]
    assert job.scalars() == expected(row(1), row(2), row(3, loss=7.0))


def torn(text: str) -> str:
    return text[:-5]


def of_another_run(text: str) -> str:
    return "step,loss\n9,9.0\n"


def empty(text: str) -> str:
    return ""


def no_text(text: str) -> str:
    return "\udcff\udcfe\n" + text


def behind(text: str) -> str:
    return "\n".join(text.splitlines()[:-1]) + "\n"


@pytest.mark.parametrize("change", [torn, of_another_run, empty, no_text, behind])
def test_a_table_that_does_not_match_the_rows_is_rewritten(
    job: Job, change: Callable[[str], str]
) -> None:
    job.record(row(1), row(2))
    path = job.folder / "metrics.csv"
    path.write_text(change(path.read_text()), errors="surrogateescape")
    job.record(row(3))
    assert job.table() == [row(1), row(2), row(3)]


def test_a_new_figure_adds_a_column(job: Job) -> None:
    job.record(row(1), row(2, accuracy=0.5), row(3))
    assert job.table() == [row(1), row(2, accuracy=0.5), row(3)]
    assert (job.folder / "metrics.csv").read_text().startswith("step,loss,accuracy\n1,1.0,\n")


def test_a_table_is_written_anew_although_no_descriptor_was_free_at_first(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator tries again; see :class:`pipeworker.host.descriptors.DescriptorReserve`."""
    rows, left = Rows(job.metrics), [1]

    def refuse(*arguments: Any, **more: Any) -> Any:
        if left:
            raise OSError(errno.EMFILE, f"no descriptor, {left.pop()}")
        return open_file(*arguments, **more)

    rows.add(row(1))
    with closing(ExtraFormats(job.metrics, csv=True, events=None)) as extras:
        monkeypatch.setattr(formats, "open_file", refuse)
        rows.add(row(2, accuracy=0.5))
        with pytest.raises(OSError, match="no descriptor"):
            extras.add(job.metrics, row(2, accuracy=0.5))
        extras.add(job.metrics, row(2, accuracy=0.5))
        rows.add(row(3))
        extras.add(job.metrics, row(3))
    assert job.table() == [row(1), row(2, accuracy=0.5), row(3)]


def test_a_name_that_is_not_utf8_is_escaped(job: Job) -> None:
    for step in (1, 2):
        job.record(row(step), passes=(row(step, **{"\ud800": 0.5}),))
    assert [found["\\ud800"] for found in job.table("evaluation")] == [0.5, 0.5]
    assert job.scalars("evaluation/\\ud800") == [(1, 0.5), (2, 0.5)]


def test_figures_that_are_not_finite_are_recorded(job: Job) -> None:
    job.record({"step": 1, "loss": float("nan")})
    assert str(job.table()) == "[{'step': 1.0, 'loss': nan}]"
    assert str(job.scalars()) == "[(1, nan)]"


def test_formats_that_are_not_requested_are_not_written(job: Job) -> None:
    Rows(job.metrics).add(row(1))
    extras = ExtraFormats(job.metrics, job.evaluation, csv=False, events=None)
    extras.add(job.metrics, row(1))
    extras.close()
    assert [path.name for path in job.folder.iterdir()] == ["metrics.jsonl"]
    assert json.loads(job.metrics.read_text()) == row(1)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("tensorboard", r"its package is missing; pip install tensorboard"),
        ("google.protobuf", "the package cannot be imported: "),
    ],
)
def test_a_missing_package_is_reported(
    monkeypatch: pytest.MonkeyPatch, module: str, expected: str
) -> None:
    formats.check_tensorboard()
    for name in [name for name in sys.modules if name.startswith("tensorboard.compat")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"^--tensorboard:? {expected}"):
        formats.check_tensorboard()
