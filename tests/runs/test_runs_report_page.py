"""The page of a run of 100,000 steps, in a real browser where there is one."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.plan.simulate import Costs
from pipeworker.record import run_record
from pipeworker.record.rundir import RunDir
from pipeworker.runs.report_page import write_page
from pipeworker.runs.trace import write_trace
from pipeworker.wire.lines import Verdict
from support.browser import BROWSER, Browser
from support.pure.orders import build
from support.pure.timelines import lives_of, write_lives
from support.slow import slow

STEPS = 100_000
WORKERS, MICROBATCHES = 8, 32


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return a run of 100,000 steps, of whose last two the actions are recorded."""
    run_dir = RunDir(tmp_path_factory.mktemp("runs") / "long")
    run_dir.path.mkdir()
    (run_dir.path / "job.py").write_text("")
    options = Options(str(run_dir.path / "job.py"), WORKERS, MICROBATCHES, recompute="never")
    run_record.write(run_dir, asdict(options), {"host": "here", "pid": 1, "started": "2026-11-26"})
    rest = '"samples": 64, "seconds": 0.5, "samples_per_second": 128.0, "lr": 0.001, '
    rest += '"bubble": 0.2, "epoch": 1'
    with run_dir.metrics.open("w") as file:
        for step in range(1, STEPS + 1):
            loss = 3 * math.exp(-step / 30_000) + 0.1 * math.sin(step)
            norm = "null" if step % 7 == 0 else 1 / step
            file.write(f'{{"step": {step}, "loss": {loss}, "grad_norm": {norm}, {rest}}}\n')
    run_dir.plan.write_text(
        json.dumps({"stages": [{"stage": s, "layers": [s, s + 1]} for s in range(WORKERS)]})
    )
    schedule = build("gpipe", WORKERS, MICROBATCHES, "never")
    write_lives(run_dir, schedule, lives_of(schedule, Costs.even(WORKERS, 0.05, 0.1), steps=3))
    return run_dir


@pytest.fixture(scope="module")
def written(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(run.path, path)
    return path


@slow
def test_a_long_run_has_a_small_page(written: Path) -> None:
    assert written.stat().st_size < 1 << 20


def test_a_run_without_recorded_steps_has_a_page(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "short")
    run_dir.path.mkdir()
    options = Options(str(run_dir.path / "job.py"), 2, 4)
    run_record.write(run_dir, asdict(options), {"host": "here", "pid": 1, "started": "2026-11-26"})
    verdict = Verdict("failed", 1, 0, 1.5, (0, 0), 0.0, "stage 1: no <layer>", ("stage 0 is lost",))
    run_record.write_summary(run_dir, verdict, 2)
    write_page(run_dir.path, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "no recorded steps" in text
    assert "failed: stage 1: no &lt;layer&gt;, after 0 steps" in text
    assert "lost: stage 0 is lost" in text
    assert "<canvas" not in text


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    with Browser(tmp_path / "browser") as found:
        yield found


def test_it_loads_within_two_seconds_without_a_request_or_an_error(
    browser: Browser, written: Path
) -> None:
    browser.show(1200, 900)
    began = time.monotonic()
    browser.open(written)
    assert time.monotonic() - began < 2
    assert not browser.problems
    shown = browser.run("document.querySelector('#measured figcaption').textContent")
    assert shown.startswith("step ")
    colours = browser.run(
        "(() => { const c = document.querySelector('#measured canvas'), d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data, found = new Set();"
        "for (let k = 0; k < d.length; k += 4) found.add(d[k] + ',' + d[k+1] + ',' + d[k+2]);"
        "return [...found]; })()"
    )
    assert {"0,114,178", "230,159,0"} <= set(colours)  # forwards and backwards are drawn


def test_it_is_used_by_keys_alone(browser: Browser, written: Path) -> None:
    browser.open(written)
    browser.run("document.querySelector('#measured canvas').focus()")
    browser.press("n")
    first = browser.run("document.getElementById('what').textContent")
    assert first.startswith("worker 0: stage 0: ")
    browser.press("n")
    browser.press("n")
    assert browser.run("document.getElementById('what').textContent") != first
    before = browser.run("document.querySelector('#measured canvas').toDataURL()")
    for key in ("+", "+", "ArrowRight"):
        browser.press(key)
    zoomed = browser.run(
        "new Promise(d => requestAnimationFrame(() => requestAnimationFrame(() =>"
        " d(document.querySelector('#measured canvas').toDataURL()))))"
    )
    assert zoomed != before
    browser.run("document.querySelector('.curve svg').focus()")
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('.curve figcaption').textContent").startswith(
        "step "
    )
    assert not browser.problems


@slow
@pytest.mark.parametrize(
    ("width", "media", "dark"),
    [(390, "screen", False), (1200, "screen", True), (800, "print", False)],
    ids=["phone", "dark", "print"],
)
def test_it_fits(browser: Browser, written: Path, width: int, media: str, *, dark: bool) -> None:
    browser.show(width, 900, media=media, dark=dark)
    browser.open(written)
    assert browser.run("document.documentElement.scrollWidth") <= width
    ink, paper = (
        sum(map(int, browser.run(f"getComputedStyle(document.body).{name}")[4:-1].split(",")))
        for name in ("color", "backgroundColor")
    )
    assert (ink > paper) is dark
    assert not browser.problems


def damaged(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("plan.json", "[0, 1]", "[0, 2]", "the layers of its stages do not follow each other"),
        (
            "plan.json",
            '"stages"',
            '"facts": {"layers": [{"kind": "a", "forward": -1}]}, "stages"',
            "a number that no layer",
        ),
        ("timeline/worker-3.jsonl", '"worker": 3', '"worker": 4', "is not what a worker records"),
        (
            "timeline/worker-3.jsonl",
            '"spans": [["update", ',
            '"spans": [["update", 1, -5], ["update", ',
            "is not what a worker records",
        ),
        ("run.json", '"microbatches": 32', '"microbatches": 0', "run.json"),
    ],
)
def test_what_no_run_has_is_one_message(
    run: RunDir, tmp_path: Path, file: str, old: str, new: str, message: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy, ignore=lambda *_: ["metrics.jsonl"])
    damaged(copy / file, old, new)
    with pytest.raises(UsageError, match=message):
        write_page(copy, tmp_path / "report.html")


def test_a_loss_at_a_time_that_no_calendar_has(run: RunDir, tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(run.path, copy.path, ignore=lambda *_: ["metrics.jsonl"])
    for path in copy.timeline.iterdir():
        damaged(path, '"generation": 1', '"generation": 2')
        damaged(path, '"time": 1000000000.0', '"time": 1e14')
    verdict = Verdict("failed", 1, 2, 1.5, (0,) * WORKERS, 0.0, "all", ("stage 0 is lost",))
    run_record.write_summary(copy, verdict, WORKERS)
    write_page(copy.path, tmp_path / "report.html")
    assert "<time></time>lost: stage 0 is lost" in (tmp_path / "report.html").read_text()


def test_a_file_that_is_no_page_is_not_replaced(run: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write_page(run.path, path)
    assert path.read_text() == "mine"


def test_an_output_that_cannot_be_written_is_a_mistake_of_the_command(
    run: RunDir, tmp_path: Path
) -> None:
    copy, path = tmp_path / "copy", tmp_path / "none" / "out"
    shutil.copytree(run.path, copy, ignore=lambda *_: ["metrics.jsonl"])
    reason = r"none/out: cannot be written: .*; choose another file"
    with pytest.raises(UsageError, match=reason):
        write_page(copy, path)
    with pytest.raises(UsageError, match=reason):
        write_trace(copy, None, path)
