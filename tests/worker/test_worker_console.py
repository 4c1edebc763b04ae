"""A worker has no terminal: requests for input are rejected, and an exit message is shown."""

from __future__ import annotations

import io
import os
import pdb
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipeworker.errors import UsageError
from pipeworker.worker.blame import JobExit, user_code
from pipeworker.worker.console import NoTerminal, capture_exit_message, detach_terminal


@pytest.fixture(autouse=True)
def _detached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    detach_terminal()


HERE = Path(__file__).name
NO_TERMINAL = rf"^{HERE}, line \d+: a worker has no terminal for input\(\) .* --stages 1 --debug"


def test_a_request_for_input_is_rejected_with_the_way_to_a_terminal() -> None:
    for ask in (lambda: input("width? "), lambda: sys.stdin.read(), lambda: list(sys.stdin)):
        with pytest.raises(UsageError, match=NO_TERMINAL):
            ask()


def test_a_breakpoint_is_rejected_at_its_own_line() -> None:
    with pytest.raises(UsageError, match=NO_TERMINAL) as caught:
        breakpoint()
    line = caught.tb.tb_lineno
    assert str(caught.value).startswith(f"{HERE}, line {line}: ")


def test_a_debugger_that_is_started_by_hand_is_rejected() -> None:
    debugger = pdb.Pdb(stdout=io.StringIO(), nosigint=True, readrc=False)
    with pytest.raises(UsageError, match=NO_TERMINAL.replace(HERE, "job.py")):
        debugger.run(compile("x = 1", "job.py", "exec"), {"__name__": "job"})
    sys.settrace(None)


def test_disabled_breakpoints_stay_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    detach_terminal()
    breakpoint()


def test_a_library_may_inspect_standard_input() -> None:
    assert isinstance(sys.stdin, NoTerminal)
    assert (sys.stdin.fileno(), sys.stdin.isatty()) == (0, False)


@contextmanager
def redirected(log: Path) -> Iterator[None]:
    """Have standard output go to a log inside the context, as in a worker."""
    sys.stdout.flush()
    before, handle = os.dup(1), os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(handle)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(2, "usage: job.py"), ("no data", "usage: job.py\nno data"), (0, "usage:")],
)
def test_the_output_of_a_job_that_exits_is_shown_and_not_logged(
    tmp_path: Path, code: object, expected: str
) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text("before\n")

    def leave() -> None:
        os.write(1, b"usage: job.py\n")
        raise SystemExit(code)

    with (
        pytest.raises(JobExit) as caught,
        redirected(log),
        capture_exit_message(to_log=True),
        user_code("the job file", early=True),
    ):
        leave()
    assert caught.value.text().startswith(expected)
    assert log.read_text() == "before\n"


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_other_output_of_a_job_is_logged(tmp_path: Path, error: Exception | None) -> None:
    log = tmp_path / "worker-0.log"
    with suppress(ValueError), redirected(log), capture_exit_message(to_log=True):
        os.write(1, b"hello\n")
        if error:
            raise error
    assert log.read_text() == "hello\n"
