"""The records of a run: ``run.json``; ``job.py``, a copy of its job file; and ``summary.json``.

``run.json`` holds the options the run was begun with, and the process that began it; these fields
never change. Each resume adds an entry to `resumed` with the options that changed. If the job file
changed, resume copies it beside the others: as ``job-2.py`` on the second resume. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pipeworker.errors import RecordError, UnreadableFile, UsageError
from pipeworker.facts.criterion import Criterion
from pipeworker.job.options import BEST, check_types
from pipeworker.job.renamed import migrated
from pipeworker.record.checkpoint.manifest import MANIFEST
from pipeworker.record.files.atomic_file import remove_partial_files, write_bytes, write_json
from pipeworker.record.files.bounded_file import read_json
from pipeworker.record.files.located import located
from pipeworker.record.metrics import rows
from pipeworker.record.metrics.rows import Row
from pipeworker.record.rundir import JOB, RunDir, listed
from pipeworker.wire.lines import Verdict

VERSION = 2
"""Since version 2 options have the names of :mod:`pipeworker.job.renamed`; 1 is read as well."""
_READABLE = (1, VERSION)
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

_WHERE = ("--hosts", "--hosts-file", "--launcher-address", "--on", "--nodes", "--set")
"""Options with a value that say where a job runs."""
_SYNC = "--sync"
_WHAT, _REMEDY = "it is not the record of a run", "give another run"


class _Git(msgspec.Struct):
    commit: str
    dirty: bool | None = None


class _Entry(msgspec.Struct):
    """A start of a job; only its options are always there."""

    options: dict[str, Any]
    started: str | None = None
    command: list[str] = []
    versions: dict[str, str | None] = {}
    host: str | None = None
    platform: str | None = None
    pid: int | None = None
    torchrun: str | None = None
    git: _Git | None = None
    job: str | None = None
    job_sha256: str | None = None
    step: int | None = None


class _Content(_Entry, kw_only=True):
    resumed: list[_Entry]
    origins: dict[str, str] = {}


def write(run_dir: RunDir, options: Mapping[str, Any], process: Mapping[str, Any]) -> None:
    """Write the record of a run that begins: its options, and the host, pid and versions.

    The copy of the job file follows: a directory without a record has no file that looks like one
    of the user's. A resume copies the job file if there is no copy.
    """
    job = _read_job(options)
    content = {
        "version": VERSION,
        **process,
        **_job_fields(options, job, JOB),
        "arguments": options["arguments"],
        "seed": options["seed"],
        "options": dict(options),
        "resumed": [],
    }
    write_json(run_dir.run, content)
    if job is not None:
        write_bytes(run_dir.root / content["job"], job)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of ``run.json``, a file that anybody may have changed.

    The `options` are those of the run's last begin or resume, under their present names.
    """

    run_dir: RunDir
    content: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def read(cls, run_dir: RunDir) -> RunRecord:
        """Read ``run.json``, and check what resume needs of it.

        Raises:
            UsageError: the file does not exist, or is not the record of a run.
        """
        path = run_dir.run
        try:
            content = read_json(path, _Content, _WHAT, _REMEDY, _READABLE)
        except (FileNotFoundError, NotADirectoryError):
            advice = listed(run_dir.path) or "give one that has a run.json"
            raise UsageError(f"{run_dir.path}: not the directory of a run; {advice}") from None
        except OSError as error:
            raise UnreadableFile(path, error) from None
        options: dict[str, Any] = {}
        for entry in (content, *content["resumed"]):
            options |= migrated(entry["options"])
        try:
            check_types(options)
        except UsageError as error:
            raise UnreadableFile(path, error, _REMEDY) from None
        return cls(run_dir, content, options)

    @property
    def is_of_script(self) -> bool:
        """Whether a script of the user's, rather than a command of pipeworker's, is the job."""
        job_file, program = str(self.options.get("job_file")), [*self.command, ""][0]
        return bool(self.options.get("own_loop")) or _real_path(program) == _real_path(job_file)

    @property
    def command(self) -> list[str]:
        """The words of the command that last began or resumed the run."""
        found: list[str] = self.last.get("command") or []
        return found

    @property
    def criterion(self) -> Criterion:
        """The figure by which the best evaluation of the run is chosen."""
        return Criterion.parse(self.options.get("best") or BEST)

    @property
    def last(self) -> dict[str, Any]:
        """The entry of the last begin or resume."""
        resumed = self.content["resumed"]
        found: dict[str, Any] = resumed[-1] if resumed else self.content
        return found

    def add_resume(self, options: Mapping[str, Any], process: Mapping[str, Any], step: int) -> str:
        """Record that the run resumes after `step`; see :func:`write`.

        Returns:
            The name of a new copy of the job file; "" if the job file has not changed.
        """
        resumed, last = self.content["resumed"], self.last
        job = _read_job(options)
        copied = _job_fields(options, job, f"job-{len(resumed) + 1}.py")
        changed = copied["job_sha256"] != last.get("job_sha256")
        if not changed and (job is None or (self.run_dir.root / str(last.get("job"))).exists()):
            copied["job"] = last.get("job")
        elif job is not None:
            write_bytes(self.run_dir.root / copied["job"], job)
        differing = {n: v for n, v in options.items() if self.options.get(n) != v}
        if Path(options["job_file"]).is_relative_to(self.run_dir.path):
            differing.pop("job_file", None)  # a copy: the original may have its content again
        entry = {"step": step, **process, **copied, "options": differing}
        content = {**self.content, "version": VERSION, "resumed": [*resumed, entry]}
        write_json(self.run_dir.run, content)
        return copied["job"] or "" if changed else ""


def _read_job(options: Mapping[str, Any]) -> bytes | None:
    """Return the content of the job file; None for a script, which may not be a file."""
    path = Path(options["job_file"])
    with suppress(OSError):
        return path.read_bytes() if path.is_file() else None
    return None


def _job_fields(options: Mapping[str, Any], job: bytes | None, name: str) -> dict[str, Any]:
    """Return the fields of an entry for a job file of this content, and a copy with this name."""
    if job is None:
        return {"job": None, "job_sha256": None}
    if Path(options["job_file"]).suffix == ".ipynb":
        name = str(Path(name).with_suffix(".ipynb"))
    return {"job": name, "job_sha256": hashlib.sha256(job).hexdigest()}


class _Summary(msgspec.Struct):
    """The fields that readers of ``summary.json`` rely on, and their types."""

    status: Literal["done", "failed", "interrupted", "lost"]
    steps: _Count
    restarts: _Count
    causes: list[str]
    seconds: float
    peak_memory_bytes: list[_Count]
    bubble: float
    error: str | None


def write_summary(run_dir: RunDir, verdict: Verdict, stages: int, by: str = BEST) -> None:
    """Write ``summary.json`` of a run that ended with this many stages, as its last writer.

    ``peak_memory_bytes`` has a figure for each worker: for each stage, unless workers hold several.
    ``best`` has the evaluation that is the best by the figure of the option ``--best``, `by`.

    Raises:
        OSError: the file cannot be written, or no descriptor is free to read the rows.
        UnreadableFile: the rows cannot be read.
    """
    last, criterion = rows.last(run_dir.metrics) or {}, Criterion.parse(by)
    row, best = criterion.best(rows.read(run_dir.evaluation)), {}
    if row:
        best = {"best_evaluation": row, "best": best_entry(run_dir, criterion, row)}
    remove_partial_files(run_dir.root)
    write_json(
        run_dir.summary,
        {
            "status": verdict.status,
            "steps": verdict.steps,
            "stages": stages,
            "restarts": len(verdict.causes),
            "causes": list(verdict.causes),
            "seconds": verdict.seconds,
            "loss": last.get("loss"),
            **best,
            "peak_memory_bytes": list(verdict.peak_memory),
            "bubble": verdict.bubble,
            **(verdict.speed.fields() if verdict.speed else {}),
            "stopped_early": verdict.stopped_early or None,
            "error": verdict.error,
        },
    )


def summary_problem(run_dir: RunDir, verdict: Verdict, stages: int, by: str) -> str:
    """Write the summary in place of a lost coordinator; return why that failed, or ""."""
    try:
        write_summary(run_dir, verdict, stages, by)
    except (OSError, UnreadableFile) as error:
        return located(RecordError(run_dir.summary, error))
    return ""


def hosts_words(command: Sequence[str]) -> list[str]:
    """Return the words of a command that select hosts, which are recorded nowhere else."""
    found: list[str] = []
    words = [*takewhile("--".__ne__, command)][1:]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word in _WHERE:
            found += (word, following)
        elif word == _SYNC or word.partition("=")[0] in _WHERE:
            found.append(word)
    return found


def _real_path(path: str) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:  # no file can have this name
        return path


def find_best_checkpoint(source: Path) -> Path:
    """Return the checkpoint with the best evaluation of a run directory.

    Raises:
        UsageError: there is no run, or it has no such checkpoint.
    """
    if (source / MANIFEST).is_file():
        raise UsageError(f"--best: {source} is a checkpoint; give the directory of its run")
    record = RunRecord.read(RunDir(source))
    found = record.run_dir.checkpoints.best(record.criterion)
    if found is None:
        raise UsageError(
            f"--best: {source} has no checkpoint with an evaluation; leave the option out, and "
            "train with --evaluate-every"
        )
    return found


def best_entry(run_dir: RunDir, criterion: Criterion, row: Row) -> dict[str, Any]:
    """Describe the best evaluation: its step, the figure, and the checkpoint if it has one."""
    found = run_dir.checkpoints.at(row["step"])
    path = str(found.relative_to(run_dir.root)) if found.is_dir() else None
    value = criterion.value(row)
    return {"step": row["step"], "name": criterion.name, "value": value, "path": path}


def read_summary(run_dir: RunDir) -> dict[str, Any]:
    """Return the content of ``summary.json``, or {} if the run has not ended.

    Raises:
        UsageError: the file is not the summary of a run.
    """
    try:
        return read_json(run_dir.summary, _Summary, "it is not the summary of a run")
    except FileNotFoundError:
        return {}
