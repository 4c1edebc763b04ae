"""``pipeworker.launch``: the command from Python, in a script or a notebook.

The command runs as a process of its own. So the job is the very job of the command line: its
processes end with it, signals reach it as they do there, and this process imports no launcher. It
reports what happens as lines of JSON (``launch --json``).
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeworker.display.figures import evaluation_line
from pipeworker.display.progress import JobProgress
from pipeworker.display.style import Style
from pipeworker.errors import PipeworkerError, UsageError, a_type, of_status
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.job.options import Options
from pipeworker.job.renamed import written
from pipeworker.record.run_record import read_summary
from pipeworker.record.rundir import RunDir
from pipeworker.session.options import option_names, reject_unknown
from pipeworker.session.process import notebook_shell

_INTERRUPTED = 130
_LINES = 10
"""Number of the last lines of a cluster's own command that an error shows."""
_OPTIONS = {
    *option_names(("job_file", "arguments")),
    *("hosts", "hosts_file", "sync", "launcher_address", "on", "nodes", "set", "dry_run"),
    *("config", "profile"),
    *("run_dir", "resume", "auto_resume", "allow_change"),
    *("debug", "json", "log_every", "output", "quiet", "verbose"),
}
"""The options of the command, by name."""
_SWITCHES = {f.name for f in dataclasses.fields(Options) if f.type == "bool"} - {"no_profile"}
"""Options that have a form with ``--no-``."""
_FLAGS = _SWITCHES | {"no_profile", "sync", "resume", "auto_resume", "quiet", "verbose"}
"""Options without a value."""
_OF_THE_COMMAND = {
    "debug": "it needs a terminal",
    "dry_run": "it prints what would be submitted",
    "json": "this call reads the events itself",
}
"""By name, why an option of the command is no argument here."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The result of a job that is done.

    Attributes:
        run_dir: its run directory.
        steps: the number of steps done, earlier starts of the run included.
        loss: of the last step; None if it is not finite.
        best_evaluation: the row of the best evaluation pass; None without one.
        seconds: from the start of the job to its end.
        checkpoint: the newest checkpoint.
        summary: the content of ``summary.json``.
    """

    run_dir: Path
    steps: int
    loss: float | None
    best_evaluation: dict[str, Any] | None
    seconds: float
    checkpoint: Path | None
    summary: dict[str, Any] = field(repr=False)


def launch(
    job_file: str | Path | None = None,
    *,
    arguments: Sequence[str | float] = (),
    quiet: bool = False,
    **options: Any,
) -> LaunchResult:
    """Train a job file as ``pipeworker launch`` does, and return when the job is done.

    A progress bar is shown in a notebook and on a terminal; elsewhere, a line a second. An
    interrupt saves a checkpoint at the end of the step and ends the job, a second one ends it at
    once; then ``KeyboardInterrupt`` is raised.

    Args:
        job_file: its path; without one, `resume` names the run that recorded it: ``resume="RUN"``.
        arguments: words and numbers that the job file gets as ``sys.argv[1:]``.
        quiet: show only warnings.
        **options: those of ``pipeworker launch``, with underscores: ``stages=4``, ``resume=True``,
            ``balance=[3, 5]``, ``set={"image": "i"}``. None is an option that is not given.

    Raises:
        UsageError: the command or the job file is wrong; nothing was trained.
        PipeworkerError: the job failed; the message is that of the command. Or the command has only
            submitted the job, as ``on="kubernetes"`` does: the job runs.
    """
    words = command_words(job_file, arguments, options)
    style = Style(
        quiet=quiet, verbose=bool(options.get("verbose")), log_every=options.get("log_every")
    )
    progress = JobProgress(style, notebook=notebook_shell() is not None)
    job = _Job([sys.executable, "-m", "pipeworker", *words], progress)
    interrupted = False
    try:
        status = job.wait()
    except KeyboardInterrupt:
        interrupted = True
        status = job.end()
    except BaseException:
        job.end()
        raise
    finally:
        progress.close()
    end = job.ended
    if interrupted and status == _INTERRUPTED:
        if end.get("checkpoint"):
            step, path = end["checkpoint_step"], end["checkpoint"]
            progress.line(f"interrupted: step {step} is saved in {path}; resume=True continues")
        raise KeyboardInterrupt
    if status:
        text = end.get("error") or job.errors or f"the job ended with status {status}"
        raise of_status(status)(text)
    if not end:  # Kubernetes has accepted the job, and the command does not follow it
        raise PipeworkerError(
            "pipeworker.launch(): the job was submitted, and its end is not reported to this call; "
            + "\n".join(["follow it with the cluster's own commands:", *job.lines])
        )
    run_dir = Path(end["run_dir"])
    saved, summary = end["checkpoint"], read_summary(RunDir(run_dir))
    return LaunchResult(
        run_dir,
        end["steps"],
        end["loss"],
        summary.get("best_evaluation"),
        end["seconds"],
        Path(saved) if saved else None,
        summary,
    )


def command_words(
    job_file: str | Path | None, arguments: Sequence[str | float], options: Mapping[str, Any]
) -> list[str]:
    """Return the words of the command.

    Raises:
        UsageError: an argument has a wrong type, or an option is unknown or not available here.
    """
    words, where = ["launch", "--json"], "pipeworker.launch()"
    resumed = options.get("run_dir" if options.get("resume") is True else "resume")
    if job_file is None and not resumed:
        raise UsageError(f"{where}: job_file: missing; give its path, or resume=RUN")
    if not isinstance(job_file, (str, Path, type(None))):
        raise UsageError(
            f"{where}: job_file: is {a_type(job_file)}; give the path of a job file, or call "
            "pipeworker.train, which takes functions"
        )
    if isinstance(arguments, str):
        raise UsageError(f"{where}: arguments: is a string; give a list: {arguments.split()}")
    if not isinstance(arguments, Sequence) or isinstance(arguments, bytes):
        raise UsageError(f"{where}: arguments: is {a_type(arguments)}; give a list of words")
    for word in (*map(str, arguments), str(job_file)):
        if "\0" in word:
            raise UsageError(f"{where}: {word!r} has a null character, and no command can have one")
    for name, value in options.items():
        if name in _OF_THE_COMMAND:
            raise UsageError(f"{where}: {name}: {_OF_THE_COMMAND[name]}; leave it out")
        option = written(name)
        if name not in _OPTIONS and value is not None:
            typed = [option] if value is True else [option, str(value)]
            advice = f"is it for the job file? Write: arguments={typed}"
            reject_unknown(name, _OPTIONS, where, advice)
        match value:
            case None:
                pass
            case bool() if name not in _FLAGS:
                raise UsageError(f"{where}: {name}: is {value}; give its value")
            case True:
                words.append(option)
            case False:
                words += [f"--no-{option[2:]}"] if name in _SWITCHES else []
            case Mapping():
                words += [f"{option}={key}={each}" for key, each in value.items()]
            case list() | tuple() if name == "allow_change":
                words += [f"{option}={each}" for each in value]
            case list() | tuple():
                words.append(f"{option}={','.join(map(str, value))}")
            case _:
                words.append(f"{option}={value}")
    if job_file is not None:
        words.append(str(job_file))
    return [*words, *(["--", *map(str, arguments)] if arguments else [])]


class _Job:
    """The process of the command, and what it has reported.

    Attributes:
        ended: the event of the job's end; empty until then.
        errors: the error that the command has written to standard error, else all it wrote there.
        lines: the last lines that are no events: a cluster's own command has written them.
    """

    def __init__(self, command: Sequence[str], progress: JobProgress) -> None:
        self.ended: dict[str, Any] = {}
        self.errors = ""
        self.lines: deque[str] = deque(maxlen=_LINES)
        self._progress = progress
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt of this process is passed on, once
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def wait(self) -> int:
        """Show events until the process ends; return its exit status."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._show(line)
        status = self._process.wait()
        self._reader.join()
        return status

    def end(self) -> int:
        """End the job as Ctrl-C does, and at once if there is another interrupt."""
        while True:
            self._process.send_signal(signal.SIGINT)
            try:
                return self.wait()
            except KeyboardInterrupt:
                continue

    def _show(self, line: str) -> None:
        try:
            event = json.loads(line)
            kind = event.pop("event")
        except (ValueError, AttributeError, KeyError, TypeError):  # of a cluster's own command
            self.lines.append(line.rstrip("\n"))
            self._progress.line(self.lines[-1])
            return
        match kind:
            case "plan":
                self._progress.plan(event["steps"], event["first_step"], event.get("log_every"))
            case "step":
                self._progress.step(StepResult(**_finite(event)))
            case "evaluation":
                self._progress.line(evaluation_line(Evaluation.of(_finite(event))))
            case "output":
                self._progress.line(f"{event['worker']} {event['text']}")
            case "note" if self._progress.quiet:
                return
            case "note" | "warning":
                self._progress.line(f"{kind}: {event['text']}", error=True)
            case "end":
                self.ended = event

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        text = self._process.stderr.read().strip()
        _, _, error = f"\n{text}".partition("\nerror: ")  # notes come before it
        self.errors = error or text


def _finite(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's figures; null, for one that is not finite, becomes NaN.

    A loss scale of null is none.
    """
    return {
        name: float("nan") if value is None and name != "loss_scale" else value
        for name, value in event.items()
    }
