"""The process of the hooks, as its parent starts and ends it; here it is another program."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pipeworker.errors import UsageError
from pipeworker.host import hook_process
from pipeworker.host.hook_process import HookProcess
from pipeworker.host.line_process import LineProcess
from pipeworker.job.options import Options
from pipeworker.record.run_feed import Place, PlaceFile
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import FromHooks, HookSetup, JobOver, ToHooks, Verdict, Warned
from support.real_jobs.jobs import until

MISTAKE = Verdict("failed", UsageError.exit_status, 0, 0.0, (), 0.0, "wrong")


def started(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> HookProcess:
    """Return the process of a program in place of the hooks' own."""

    def start() -> LineProcess[ToHooks, FromHooks]:
        return LineProcess("hooks", words, FromHooks)

    monkeypatch.setattr(hook_process, "start_hooks", start)
    made = HookProcess(Options("job.py", 1, 1), RunDir(folder))
    made.start(("on_step",))
    made.start(("on_step",))  # of a further generation
    return made


def test_the_place_of_hooks_is_kept_before_their_process_has_imported_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks = started(monkeypatch, tmp_path, "sleep", "1000")
    hooks.kill()
    places = PlaceFile(tmp_path / "hooks.json", ("on_step",), before=5)
    assert places.places == {"on_step": Place(0)}
    places.close()
    hooks.finish(refuse, MISTAKE)


class Interrupted(threading.Event):
    """An event whose setter goes on only when the process has a line, or a moment later."""

    line = threading.Event()

    def set(self) -> None:
        super().set()
        self.line.wait(0.3)


def test_the_setup_comes_first_if_the_job_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job may have no step to do, and end together with its plan."""
    sent: list[ToHooks] = []

    class Recorded(LineProcess[ToHooks, FromHooks]):
        def send(self, event: ToHooks) -> None:
            sent.append(event)
            Interrupted.line.set()

    monkeypatch.setattr(hook_process, "start_hooks", lambda: Recorded("h", ["cat"], FromHooks))
    hooks = HookProcess(Options("job.py", 1, 1), RunDir(tmp_path))
    monkeypatch.setattr(hooks, "_started", Interrupted())
    hooks.start(("on_step",))
    hooks.finish(lambda _: None, None, lambda: True)
    assert [type(line) for line in sent] == [HookSetup, JobOver]


def refuse(warned: Warned) -> None:
    raise AssertionError(warned.text)


def test_an_interrupt_ends_the_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[Warned] = []
    hooks = started(monkeypatch, tmp_path, "sleep", "1000")
    hooks.finish(shown.append, None, lambda: True)
    (warned,) = shown
    assert warned.text.startswith("hooks: an interrupt has ended them; --resume continues")
    hooks.finish(shown.append, None)
    assert len(shown) == 1


def test_there_is_no_wait_after_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started(monkeypatch, tmp_path, "sleep", "1000").finish(refuse, MISTAKE)


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (("sh", "-c", "kill -9 $$"), "was killed by SIGKILL"),
        (("true",), "exited with status 0"),
        (("sh", "-c", 'echo "[\\"Warned\\", [\\"no\\", false]]"; exit 1'), "no"),
    ],
)
def test_the_end_of_the_process_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...], how: str
) -> None:
    hooks = started(monkeypatch, tmp_path, *words)
    found = until(hooks.warnings, 10)
    text = how if how == "no" else f"hooks: their process {how}; none is called any more"
    assert found == [Warned(text)]
    hooks.finish(refuse, None)
    monkeypatch.setattr(hook_process, "kill_group", pytest.fail)  # its pid may be another's now
    hooks.kill()


def test_without_hooks_there_is_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hook_process, "start_hooks", pytest.fail)
    hooks = HookProcess(Options("job.py", 1, 1), RunDir(tmp_path))
    hooks.start(())
    hooks.finish(refuse, None)
