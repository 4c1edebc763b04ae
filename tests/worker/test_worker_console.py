"""A worker has no terminal: who asks is told so, and the job's last words reach the user."""

from __future__ import annotations

import io
import os
import pdb
import sys
from pathlib import Path

import pytest

from pipeworker.errors import UsageError
from pipeworker.worker.blame import Left, users
from pipeworker.worker.console import NobodyAnswers, detach, last_words


@pytest.fixture(autouse=True)
def _detached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    detach()


HERE = Path(__file__).name
SAID = rf"^{HERE}, line \d+: a worker has no terminal for input\(\) .* --stages 1 --debug"


def test_who_asks_for_a_line_is_told_where_there_is_a_terminal() -> None:
    for ask in (lambda: input("width? "), lambda: sys.stdin.read(), lambda: list(sys.stdin)):
        with pytest.raises(UsageError, match=SAID):
            ask()


def test_a_breakpoint_is_told_at_its_own_line() -> None:
    with pytest.raises(UsageError, match=SAID) as caught:
        breakpoint()
    line = caught.tb.tb_lineno
    assert str(caught.value).startswith(f"{HERE}, line {line}: ")


def test_so_is_a_debugger_that_is_started_by_hand() -> None:
    debugger = pdb.Pdb(stdout=io.StringIO(), nosigint=True, readrc=False)
    with pytest.raises(UsageError, match=SAID.replace(HERE, "job.py")):
        debugger.run(compile("x = 1", "job.py", "exec"), {"__name__": "job"})
    sys.settrace(None)


def test_breakpoints_that_are_turned_off_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    detach()
    breakpoint()


def test_a_library_may_look_at_standard_input() -> None:
    assert isinstance(sys.stdin, NobodyAnswers)
    assert (sys.stdin.fileno(), sys.stdin.isatty()) == (0, False)


@pytest.mark.parametrize(
    ("code", "said"), [(2, "usage: job.py"), ("no data", "usage: job.py\nno data"), (0, "usage:")]
)
def test_what_a_job_printed_last_is_said_and_not_logged(
    tmp_path: Path, code: object, said: str
) -> None:
    log = tmp_path / "stage-0.log"
    log.write_text("before\n")

    def leave() -> None:
        with log.open("a") as file:
            file.write("usage: job.py\n")
        raise SystemExit(code)

    with pytest.raises(Left) as caught, last_words(log), users("the job file", early=True):
        leave()
    assert caught.value.words().startswith(said)
    assert log.read_text() == "before\n"


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_what_a_job_prints_is_logged_otherwise(tmp_path: Path, error: Exception | None) -> None:
    log = tmp_path / "stage-0.log"
    log.touch()
    try:
        with last_words(log):
            os.write(file := os.open(log, os.O_WRONLY), b"hello\n")
            os.close(file)
            if error:
                raise error
    except ValueError:
        pass
    assert log.read_text() == "hello\n"
