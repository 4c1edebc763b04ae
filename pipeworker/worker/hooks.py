"""The hooks of a job: its functions that are called with what the run directory records.

Each is called once a job for each record, in the order of the steps. Those of a job file are called
in a process of their own (:func:`main`), a child of the launcher or, under torchrun, of rank 0. It
reads the files of the run, so the job neither waits for it nor depends on it.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from pipeworker.errors import PipeworkerError
from pipeworker.host import streams
from pipeworker.host.lifetime import die_with_parent
from pipeworker.host.session_watcher import (
    SessionWatcher,
    choose_sockets_folder,
    share_sockets_folder,
)
from pipeworker.job import file as job_file
from pipeworker.job.hooks import called_with_records, hooks_of
from pipeworker.job.options import Options
from pipeworker.record.run_feed import CHECKPOINT, PlaceFile, Record, RunFeed
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir
from pipeworker.wire import lines
from pipeworker.worker import stray_children
from pipeworker.worker.blame import raised, user_traceback
from pipeworker.worker.console import redirect_output
from pipeworker.worker.signals import handle_signals

Warn = Callable[[str, str], None]
"""Receives a warning, and the details that belong to it."""
_POLL_SECONDS = 0.25
_LOGGERS = {
    "wandb": "wandb:Wandb",
    "mlflow": "mlflow:MLflow",
    "metrics_port": "prometheus:Prometheus",
}
"""By option, a module of loggers and its class."""


class Hooks:
    """Calls functions with the records of a run: those of a job, and those of loggers.

    An error of a function is a warning, and the function is called with the next record.

    Args:
        objects: have hooks as methods, and perhaps ``close()``; with their names, "" for a job.
        resume_step: the step that the run is resumed from.
        warn: receives the first error of each function.
        note: receives the further errors, and other remarks.

    Raises:
        OSError, UnreadableFile: the run directory cannot be used.
    """

    def __init__(
        self,
        run_dir: RunDir,
        objects: Sequence[tuple[str, Any]],
        resume_step: int,
        warn: Warn,
        note: Callable[[str], None],
    ) -> None:
        self._called, self._objects = hooks_of(objects), objects
        self._warn, self._note = warn, note
        self._places = PlaceFile(run_dir.hooks, tuple(self._called), resume_step)
        self._feed = RunFeed(run_dir, tuple(self._called), self._places)
        self._failed: set[str] = set()

    def call_new(self, *, final: bool = False) -> bool:
        """Call the functions with what is new; return whether there was something new.

        Nothing more is recorded if this is the `final` reading.
        """
        found = self._feed.new(final=final)
        for record in found:
            self._call(record)
            self._places.advance(record)
        return bool(found)

    def finish(self) -> None:
        """Call the functions with all that is left, and close everything."""
        while self.call_new(final=True):
            pass
        self.close()

    def close(self) -> None:
        """Close callbacks, loggers and the files."""
        for name, one in self._objects:
            if name and hasattr(one, "close"):
                self._attempt(f"{name}.close()", one.close, "at the end", more="")
        self._feed.close()
        self._places.close()

    def _call(self, record: Record) -> None:
        gone = record.kind == CHECKPOINT and not record.value.exists()
        for name, function in self._called[record.kind]:
            if gone:
                self._note(f"{record.value}: was removed (--keep) before {name} was called with it")
            else:
                self._attempt(name, partial(function, record.value), f"after step {record.step}")

    def _attempt(
        self,
        name: str,
        call: Callable[[], Any],
        when: str,
        more: str = "; the job continues, and {} is called again",
    ) -> None:
        try:
            try:
                call()
            finally:
                stray_children.end_stray_child()
        except (Exception, SystemExit) as error:
            text = f"{name}: {raised(error)} {when}"
            details = user_traceback(error)
            if name in self._failed:
                self._note(text)
                return
            self._failed.add(name)
            self._warn(f"{text}{more.format(name)}", details)


class _Parent:
    """The parent of the process of the hooks; the process ends with it, whatever a hook does."""

    def __init__(self) -> None:
        self.job_over = threading.Event()
        self._input: lines.Buffer[lines.ToHooks] = lines.Buffer(lines.ToHooks)
        line = io.FileIO(0, closefd=False).readline()  # unbuffered: more may be behind it
        (setup,) = self._input.feed(line) or (None,)
        assert isinstance(setup, lines.HookSetup)
        self.setup = setup
        self._reads, self._writes = os.dup(0), os.dup(1)
        streams.connect_to_null(0, 1)
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def warn(self, text: str, details: str = "") -> None:
        """Send a warning to the parent, and write it to the log with its details."""
        streams.note(f"{text}\n{details}")
        if details:
            text = f"{text}; {RunDir(Path(self.setup.run_dir)).hooks_log} has the traceback"
        os.write(self._writes, lines.encode(lines.Warned(text)))

    def close(self) -> None:
        """Close the connection; a forked child does so, because the parent waits for its end."""
        os.close(self._reads)
        os.close(self._writes)

    def _listen(self) -> None:
        while data := os.read(self._reads, 1 << 16):
            if self._input.feed(data):
                self.job_over.set()
        os._exit(1)  # the watcher kills what is left


def main() -> int:
    """Call the hooks of the job that standard input describes; return the exit status."""
    parent_pid = os.getppid()
    watcher = SessionWatcher(choose_sockets_folder())  # of what the user's code starts
    share_sockets_folder(watcher.folder)
    die_with_parent(parent_pid)  # only now: the watcher removes the folder
    watcher.add(os.getpid())
    handle_signals()
    stray_children.watch()
    parent = _Parent()
    os.register_at_fork(after_in_child=partial(_become_child, watcher, parent))
    try:
        _call_all(parent)
    except (Exception, SystemExit) as error:  # of the job file, as it is loaded
        known = isinstance(error, (PipeworkerError, OSError))
        text = str(error) if known else f"the job file {raised(error)}"
        parent.warn(f"hooks: {text}; no hook is called", "" if known else user_traceback(error))
        return 1
    return 0


def _call_all(parent: _Parent) -> None:
    """Call the hooks until the job is over, and all records were passed on."""
    options = Options.from_json(parent.setup.options)
    run_dir = RunDir.open(Path(parent.setup.run_dir))
    redirect_output(run_dir.hooks_log)
    torch.set_num_threads(options.threads)
    objects: list[tuple[str, Any]] = []
    record = RunRecord.read(run_dir)
    if not record.is_of_script:  # which calls its own hooks
        job = job_file.load(Path(options.job_file), options.arguments)
        stray_children.end_stray_child()
        objects = called_with_records(job)

    objects += _loggers(options, record, parent)
    hooks = Hooks(run_dir, objects, options.resume_step, parent.warn, streams.note)
    while not parent.job_over.is_set():
        if not hooks.call_new():
            parent.job_over.wait(_POLL_SECONDS)
    hooks.finish()


def _loggers(options: Options, record: RunRecord, parent: _Parent) -> Iterator[tuple[str, Any]]:
    """Yield the loggers of a job, each with the option that asks for it; warn of one that fails."""
    for option in options.loggers:
        name = f"--{option.replace('_', '-')}"
        try:
            made = resolve_name(f"pipeworker.worker.loggers.{_LOGGERS[option]}")
            yield name, made(getattr(options, option), record)
        except (Exception, SystemExit) as error:
            text = f"{name}: {raised(error)} at its start; the job continues without it"
            parent.warn(text, user_traceback(error))


def _become_child(watcher: SessionWatcher, parent: _Parent) -> None:
    """Leave the ends of pipes to the parent: a process that waits for them waits for that one."""
    watcher.close()
    parent.close()
