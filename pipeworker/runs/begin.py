"""Begins a run: in a new run directory, or in that of the run to resume."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeworker.environment import facts, git, timings
from pipeworker.errors import InUse, RecordError, UnreadableFile, UsageError
from pipeworker.facts.criterion import Criterion
from pipeworker.host.signals import ENDS, deferred_interrupt
from pipeworker.job import resume_options
from pipeworker.job.option_parsing import make_options, workers_per_replica
from pipeworker.job.options import LOGGERS, Options, override
from pipeworker.job.renamed import written
from pipeworker.plan.figures import plural
from pipeworker.record import run_record, rundir
from pipeworker.record.checkpoint.folder import held
from pipeworker.record.checkpoint.manifest import ANOTHER
from pipeworker.record.files import atomic_file
from pipeworker.record.files.bounded_file import open_bounded
from pipeworker.record.lock import RunLock, is_locked
from pipeworker.record.metrics import formats, rows
from pipeworker.record.rundir import Request, RunDir
from pipeworker.record.weights import weight_files
from pipeworker.runs import resume
from pipeworker.runs.schedule_file import read_schedule
from pipeworker.wire.lines import Verdict

_MAX_CONTENT = 256 << 20
_OF_ONE_START = ("resume", "resume_step")
"""Options that belong to one start of a run, not to the run."""

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run whose directory is ready and locked by this process, until :meth:`close`.

    Attributes:
        undo: removes a new run, or restores the records of a resumed one, and releases the lock.
        recorded_bytes: the size of the rows that existed at its start.
        was_done: whether it is a resumed run that had done all its steps.
        origins: the sources of options, as :class:`RunRequest` has them, at its first start.
    """

    options: Options
    run_dir: RunDir
    lock: RunLock
    undo: ExitStack
    warnings: tuple[str, ...] = ()
    recorded_bytes: int = 0
    was_done: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)

    def close(self, verdict: Verdict | None = None, *, began: bool = True) -> None:
        """Release the directory, as the end of the process would. Idempotent.

        If a mistake of the user's ended the job before its first step, nothing remains of a new
        run, and a resumed run gets its previous records back: it is what it was, and the options
        that were the mistake would prevent every later resume. So does a run that was done and had
        no further step to do, because its records have the figures of its steps. The same holds for
        a job that never `began`, because a host or its torch cannot be used.
        """
        with self.lock:  # its end releases it
            undo = self.undo.pop_all()  # once: afterwards the directory may be another process's
            # A coordinator that was lost may have done steps before its successor met the mistake.
            if (
                verdict is not None
                and (
                    verdict.is_usage_error
                    or (self.was_done and verdict.status == "done")
                    or not began
                )
                and verdict.steps <= self.options.resume_step
                and _row_bytes(self.run_dir) == self.recorded_bytes
            ):
                undo.close()


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request to begin or resume a run, from a command or a script.

    Attributes:
        job_file: an absolute path.
        stages: None for those of the run to resume, or if `ranks` determines them.
        options: the other options that were given, by name; None is an option not given.
        run_dir: None for a new directory.
        auto_resume: resume the run in `run_dir` if there is one; else begin one there.
        allow_change: options that may differ from those of the run to resume.
        defaults: options from the environment and files, for a new run alone.
        origins: the source of each of the defaults.
        ranks: the number of processes, where these exist already.
    """

    job_file: str
    stages: int | None
    options: Mapping[str, Any]
    run_dir: str | Path | None = None
    resume: bool = False
    auto_resume: bool = False
    allow_change: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None

    def validate(self, *, local: bool = True) -> None:
        """Check everything that needs no run directory; every rank does this.

        Files of the job are examined if they are on this host (`local`).

        Raises:
            UsageError: something is wrong with the request.
        """
        if self.resume and self.auto_resume:
            raise UsageError("--resume and --auto-resume: they exclude each other; choose one")
        if self.auto_resume and not self.run_dir:
            raise UsageError("--auto-resume: no directory is given; add --run-dir")
        if self.resume and not self.run_dir:
            raise UsageError("--resume: no run is given; add --run-dir, or write --resume RUN")
        if self.allow_change and not (self.resume or self.auto_resume):
            raise UsageError(
                "--allow-change: a new run may have any options; add --resume, or remove it"
            )
        if not self.is_resume:
            options = self.new_options()
            if local and options.init_from is not None:
                weight_files.find_weight_files(Path(options.init_from))
        resume_options.parse_allowed(self.allow_change)

    def check_directory(self) -> None:
        """Check that the run directory can have this job, which begins later; nothing is changed.

        Raises:
            UsageError: a job runs there, it holds no run to resume, one with other options or, for
                a new run, anything at all.
        """
        if not self.run_dir:
            return
        run_dir = RunDir(Path(self.run_dir))
        if self.is_resume:
            self.merged_options()
        elif os.path.lexists(self.run_dir):
            if is_locked(run_dir.lock):
                raise self._in_use(run_dir)
            if not run_dir.is_unused():
                raise rundir.already_exists(self.run_dir)

    def merged_options(self) -> Options:
        """Return the options of the run to resume, with those that are given now.

        Raises:
            UsageError: there is no such run, or options differ that may not.
        """
        return self._merged_options(run_record.RunRecord.read(RunDir(Path(self.run_dir or ""))))

    def prepare(self) -> PreparedRun:
        """Create the run directory, or roll that of the run to resume back to its checkpoint.

        Raises:
            UsageError: something is wrong with the request, or with the run to resume, or it is not
                allowed to write there.
            RecordError: a file cannot be written.
        """
        self.validate()
        try:
            return self._prepare_resume() if self.is_resume else self._prepare_new()
        except OSError as error:
            refused = RecordError(error.filename or self.run_dir, error)
            if error.errno in _NOT_ALLOWED:
                raise UsageError(f"{refused}; use a directory that you may write to") from None
            raise refused from None

    @property
    def is_resume(self) -> bool:
        """Whether an earlier run is resumed."""
        exists = self.auto_resume and self.run_dir and RunDir(Path(self.run_dir)).run.exists()
        return self.resume or bool(exists)

    def new_options(self) -> Options:
        """Return the options of a new run.

        Raises:
            UsageError: a value is of the wrong type or out of range.
        """
        chosen = override(self.defaults, self._given(self.defaults.get("replicas", 1)))
        if "stages" not in chosen:
            raise UsageError("--stages: missing; give the number of stages of a new run")
        return make_options(self.job_file, chosen.pop("stages"), chosen)

    def _given(self, replicas: Any) -> dict[str, Any]:
        """Return the options that were given now; `replicas` is used if they have none."""
        given, stages = override({}, self.options), self.stages
        if isinstance(given.get("schedule"), (str, Path)):
            given["schedule"] = read_schedule(given["schedule"])
        if self.ranks is not None:
            replicas = given.get("replicas", replicas)
            # Another type is rejected later, with the other options.
            stages = workers_per_replica(self.ranks, replicas if type(replicas) is int else 1)
        return given if stages is None else {**given, "stages": stages}

    def _prepare_new(self) -> PreparedRun:
        options = self.new_options()
        _check_packages(options)  # before anything is created
        weights = None
        if options.init_from is not None:
            found = weight_files.find_weight_files(Path(options.init_from))
            found.check()
            if (weights := found.checkpoint) is not None:  # its run may write a newer one
                options = replace(options, init_from=str(weights))
        given = self._given(options.replicas)
        effective = override(self.defaults, given).keys() - given.keys()
        origins = {name: self.origins[name] for name in sorted(self.origins.keys() & effective)}
        process = {**_process(options), "origins": origins}
        self.check_directory()
        with ExitStack() as undo:
            if weights is not None:
                undo.enter_context(held(weights))
            with deferred_interrupt(ENDS):
                run_dir, created = rundir.create(self.run_dir, Path(self.job_file))
                lock = undo.enter_context(self._locked(run_dir, 0.0))
                if run_dir.run.exists():  # another process has begun a run, and ended
                    raise rundir.already_exists(run_dir.path)
                undo.callback(_remove, run_dir, created)
                run_record.write(run_dir, _recorded(options), process)
                lock.share()
            opened = RunDir.open(run_dir.path)
            return PreparedRun(options, opened, lock, undo.pop_all(), origins=origins)

    def _locked(self, run_dir: RunDir, timeout: float) -> RunLock:
        """Return the lock of a run directory, held by this process alone."""
        try:
            return RunLock(run_dir.lock, exclusive=True, timeout=timeout)
        except BlockingIOError:
            raise self._in_use(run_dir) from None

    def _in_use(self, run_dir: RunDir) -> InUse:
        owner = "another process"
        if run_dir.run.exists():
            last = run_record.RunRecord.read(run_dir).last
            owner = f"process {last.get('pid')} on {last.get('host')}"
        return InUse(f"run directory {self.run_dir}: is in use: {owner} runs it; wait for its end")

    def _prepare_resume(self) -> PreparedRun:
        assert self.run_dir
        run_dir = RunDir(Path(self.run_dir).resolve())
        # Before the lock is made: a directory that is no run directory stays as it is.
        run_record.RunRecord.read(run_dir)
        run_dir.check_links()
        with ExitStack() as undo:
            lock = undo.enter_context(self._locked(run_dir, timings().exit))
            record = run_record.RunRecord.read(run_dir)  # as the process that had the lock left it
            options = self._merged_options(record)
            _check_packages(options)
            point = resume.find_resume_point(run_dir)
            if not point.path and options.init_from is not None:
                weights = weight_files.find_weight_files(Path(options.init_from)).checkpoint
                undo.enter_context(held(weights) if weights is not None else nullcontext())
            run = f"the run in {self.run_dir}"
            if options.steps is not None and options.steps < point.step:
                raise UsageError(
                    f"--steps {options.steps}: {run} is at step {point.step} already; give more "
                    "steps"
                )
            epoch = 1 + resume.epoch_of(run_dir.metrics, point.step)
            if options.epochs is not None and options.epochs < epoch:
                raise UsageError(
                    f"--epochs {options.epochs}: {run} is in epoch {epoch} already; give more "
                    "epochs"
                )
            warnings = [
                f"{path.name} is damaged and set aside, as damaged-{path.name}: "
                + why.removesuffix(f"; {ANOTHER}")
                for path, why in point.damaged.items()
            ]
            options = replace(options, resume=str(point.path or ""), resume_step=point.step)
            hosts = [] if record.is_of_script else run_record.hosts_words(record.command)
            if hosts and not run_record.hosts_words(sys.argv):
                warnings.append(
                    f"{run} was last started with {shlex.join(hosts)}, which is not recorded as an "
                    "option: give it again to use these hosts"
                )
            if not point.path:
                warnings.append(f"{run}: no complete checkpoint yet; it starts again from step 1")
            if options.steps is not None and options.steps == point.step:
                warnings.append(
                    f"{run} has already done its {point.step} steps: give more --steps to train "
                    "further"
                )
            before = {path: _content(path) for path in (run_dir.run, run_dir.summary, run_dir.plan)}
            was_done = _was_done(run_dir)
            undo.callback(_restore, before)
            warnings += resume.roll_back(run_dir, point)
            run_dir.logs.mkdir(exist_ok=True)  # a user may have removed them
            run_dir.withdraw(Request.CANCEL)
            since = Criterion.parse(options.best).since_best(rows.read(run_dir.evaluation))
            if options.patience is not None and since >= options.patience:
                warnings.append(
                    f"{run}: --patience {options.patience} is used up, by "
                    f"{plural(since, 'evaluation')} without a better one; give a larger one to "
                    "train further"
                )
            if copy := record.add_resume(_recorded(options), _process(options), point.step):
                before[run_dir.path / copy] = None
                warnings.append(
                    f"{self.job_file} has changed since the run was last started. The settings of "
                    "optimizer and scheduler, such as the learning rate, are those of the "
                    "checkpoint"
                )
            lock.share()
            recorded, opened = _row_bytes(run_dir), RunDir.open(run_dir.path)
            return PreparedRun(
                options, opened, lock, undo.pop_all(), tuple(warnings), recorded, was_done
            )

    def _merged_options(self, record: run_record.RunRecord) -> Options:
        try:
            before = Options.of(record.options)
        except UsageError as error:
            raise UnreadableFile(record.run_dir.run, error, "give another --run-dir") from None
        allow = resume_options.parse_allowed(self.allow_change)
        fields = resume_options.merge(before, self._given(before.replicas), allow)
        options = make_options(self.job_file, fields.pop("stages"), fields)
        began = before.init_from
        if options.init_from is not None and began is not None:
            given_again = RunDir(Path(options.init_from)).checkpoints.path == Path(began).parent
            options = replace(options, init_from=began) if given_again else options
        resume_options.check_unchanged(before, options, allow, f"the run in {self.run_dir}")
        return options


def _check_packages(options: Options) -> None:
    """Check that the packages are installed that pass rows on."""
    if options.tensorboard:
        formats.check_tensorboard()
    for name in options.loggers:
        if find_spec(LOGGERS[name]) is None:
            raise UsageError(
                f"{written(name)}: the package {LOGGERS[name]} is missing; "
                f"pip install {LOGGERS[name]}"
            )


def _remove(run_dir: RunDir, created: Sequence[Path]) -> None:
    """Remove a new run, unless it has checkpoints, as a user's own loop may write."""
    if not any(run_dir.checkpoints.path.glob("*")):
        run_dir.remove_run(created)


def _was_done(run_dir: RunDir) -> bool:
    with suppress(UsageError, OSError):  # a damaged summary is replaced
        return run_record.read_summary(run_dir).get("status") == "done"
    return False


def _content(path: Path) -> bytes | None:
    try:
        with open_bounded(path, _MAX_CONTENT) as file:
            return file.read()
    except FileNotFoundError:
        return None


def _restore(before: Mapping[Path, bytes | None]) -> None:
    """Give files the content that they had; None for a file that did not exist."""
    for path, content in before.items():
        with suppress(OSError):  # the error is reported, not this one
            if content is None:
                path.unlink(missing_ok=True)
            elif content != _content(path):
                atomic_file.write_bytes(path, content)


def _row_bytes(run_dir: RunDir) -> int:
    paths = (run_dir.metrics, run_dir.evaluation)
    return sum(path.stat().st_size for path in paths if path.exists())


def _recorded(options: Options) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(options.to_json())
    return {name: value for name, value in fields.items() if name not in _OF_ONE_START}


def _process(options: Options) -> dict[str, Any]:
    found = git(Path(options.job_file))
    return {**facts(), **({"git": found} if found else {})}
