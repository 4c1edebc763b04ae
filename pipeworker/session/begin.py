"""How a run begins: in a directory of its own, or in that of the run it goes on with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeworker.environment import facts, git, timings
from pipeworker.errors import InUse, ProtocolError, RecordError, UsageError
from pipeworker.job import recorded
from pipeworker.job.given import complete, over, stages_of
from pipeworker.job.options import Options
from pipeworker.record import resume, run, rundir, source
from pipeworker.record.lock import Lock
from pipeworker.record.metrics import tensorboard
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Verdict

_OF_ONE_START = ("resume", "resume_step")
"""Options that a run does not have, but what was begun with it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A run whose directory is ready, and this process's.

    Attributes:
        warnings: for the user.
        made: the folders that were made for it, the deepest first; none for one that goes on.
        before: ``run.json`` of one that goes on, as it was.
        recorded: bytes of rows that were there when it began.
        origins: as :class:`Asked` has them, of the options that it was begun with.
    """

    options: Options
    run_dir: RunDir
    lock: Lock
    warnings: tuple[str, ...] = ()
    made: tuple[Path, ...] = ()
    before: bytes = b""
    recorded: int = 0
    origins: Mapping[str, str] = field(default_factory=dict)

    def close(self, verdict: Verdict | None = None) -> None:
        """Leave the directory to others; so does the end of the process. Idempotent.

        Of a run that never began because of a mistake nothing is left, and one that goes on has the
        options from before: with those that were the mistake it could not go on again.
        """
        try:
            if verdict is not None and verdict.mistake and self.lock.held:
                if self.made and not self._has_records:
                    self.run_dir.remove(self.made)
                elif self.before and _rows(self.run_dir) == self.recorded:
                    with suppress(OSError):  # what was wrong is what is to be said
                        rundir.write_whole(self.run_dir.run, self.before)
        finally:
            self.lock.close()

    @property
    def _has_records(self) -> bool:
        """Of a loop without a step, or of steps that a coordinator did before another's mistake."""
        return bool(_rows(self.run_dir)) or any(self.run_dir.checkpoints.glob("*"))


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command or a script asks for.

    Attributes:
        job_file: absolute path.
        stages: None for those of the run that goes on, or where `ranks` says it.
        said: the other options that were said, by name; None is what was not.
        run_dir: None for a new one.
        resume: the run in `run_dir` goes on.
        go_on: it does if there is one; else it begins there.
        allow: options that may be others than those it was begun with.
        defaults: what the environment and files say, for a run that begins; one that goes on has
            options already.
        origins: which of these says each.
        ranks: the processes that there are, where they are given: a stage of a replica in each.
    """

    job_file: str
    stages: int | None
    said: Mapping[str, Any]
    run_dir: str | Path | None = None
    resume: bool = False
    go_on: bool = False
    allow: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None

    def check(self, *, here: bool = True) -> None:
        """Look at what can be wrong without a run directory, as every rank does.

        Args:
            here: the job runs where its files are those of this host.

        Raises:
            UsageError: something is.
        """
        if self.go_on and not self.run_dir:
            raise UsageError("--go-on needs --run-dir: where the run is, or begins")
        if self.resume and not self.run_dir:
            raise UsageError("--resume needs --run-dir: the directory of the run that goes on")
        if self.allow and not self.resume:
            raise UsageError("--allow is of --resume: a new run may have any options")
        if not self.goes_on:
            options = self.anew()
            if here and options.init_from is not None:
                source.look(Path(options.init_from))
        recorded.allowed(self.allow)

    def begin(self) -> Begun:
        """Make the run directory, or put in order that of the run that goes on.

        Raises:
            UsageError: something is wrong with what is asked for, or with what is there.
            RecordError: a file cannot be written.
        """
        self.check()
        try:
            return self._resumed() if self.goes_on else self._new()
        except OSError as error:
            raise RecordError(error.filename or self.run_dir, error) from None

    @property
    def goes_on(self) -> bool:
        """Whether it is a run that was begun before."""
        there = self.go_on and self.run_dir and RunDir(Path(self.run_dir)).run.exists()
        return self.resume or bool(there)

    def anew(self) -> Options:
        """Those of a run that begins.

        Raises:
            UsageError: a value is of the wrong type or out of range.
        """
        given = over(self.defaults, self.said)
        default = given.pop("stages", None)
        stages = self._stages(given)
        stages = default if stages is None else stages
        if stages is None:
            raise UsageError("a run that begins needs --stages")
        return complete(self.job_file, stages, given)

    def _stages(self, said: Mapping[str, Any], replicas: int = 1) -> int | None:
        """Of the job; None where it was not said."""
        if self.ranks is None:
            return self.stages
        if said.get("replicas") is not None:
            replicas = said["replicas"]
        if type(replicas) is not int:
            replicas = 1  # which is said to be wrong with the other options
        return stages_of(self.ranks, replicas)

    def _new(self) -> Begun:
        options = self.anew()
        _check_packages(options)
        origins = self._origins()
        run_dir, made = rundir.create(self.run_dir, Path(self.job_file))
        lock = Lock(run_dir.lock, alone=False)
        try:
            run.write(run_dir, _plain(options), {**_process(options), "origins": origins})
        except BaseException:
            run_dir.remove(made)
            lock.close()
            raise
        return Begun(options, run_dir, lock, made=made, origins=origins)

    def _origins(self) -> dict[str, str]:
        """Of the options that count though they were not said."""
        said = {name for name, value in self.said.items() if value is not None}
        if self.stages is not None or self.ranks is not None:
            said.add("stages")
        counts = over(self.defaults, self.said).keys() - said
        return {name: self.origins[name] for name in sorted(self.origins.keys() & counts)}

    def _resumed(self) -> Begun:
        assert self.run_dir
        run_dir = RunDir(Path(self.run_dir).resolve())
        record = run.Record.read(run_dir)  # what is no run directory is left as it is
        try:
            lock = Lock(run_dir.lock, alone=True, seconds=timings().leave)
        except BlockingIOError:
            last = record.last
            who = f"process {last.get('pid')} on {last.get('host')}"
            raise InUse(f"run directory {self.run_dir} is in use: {who} runs it") from None
        try:
            return self._goes_on(run_dir, lock)
        except BaseException:
            lock.close()
            raise

    def _goes_on(self, run_dir: RunDir, lock: Lock) -> Begun:
        """With the directory to ourselves."""
        record = run.Record.read(run_dir)
        options = self._merged(record)
        _check_packages(options)
        found = resume.newest(run_dir)
        if options.steps is not None and options.steps < found.step:
            text = f"--steps {options.steps}: the run in {self.run_dir} is at step {found.step}"
            raise UsageError(f"{text} already")
        epoch = 1 + resume.epoch(run_dir.metrics, found.step)
        if options.epochs is not None and options.epochs < epoch:
            text = f"--epochs {options.epochs}: the run in {self.run_dir} is in epoch {epoch}"
            raise UsageError(f"{text} already")
        warnings = [f"a damaged checkpoint is set aside: {why}" for why in found.damaged.values()]
        if found.path:
            path, step = str(found.path), found.step
            options = dataclasses.replace(options, resume=path, resume_step=step)
        else:
            warnings.append(f"{self.run_dir} has no complete checkpoint yet: it begins anew")
        if options.steps is not None and options.steps == found.step:
            text = f"the run in {self.run_dir} has done its {found.step} steps: --steps says to how"
            warnings.append(f"{text} many it goes on")
        resume.prepare(run_dir, found)
        before, rows = run_dir.run.read_bytes(), _rows(run_dir)
        if copy := record.go_on(_plain(options), _process(options), found.step):
            warnings.append(
                f"{self.job_file} has changed since it last ran here: see {copy}. What an "
                "optimizer and a scheduler were made with, as the learning rate, is as it was in "
                "the checkpoint"
            )
        lock.share()
        return Begun(options, run_dir, lock, tuple(warnings), before=before, recorded=rows)

    def _merged(self, record: run.Record) -> Options:
        """What the run had, and what is said now."""
        try:
            before = Options.of(record.options)
        except ProtocolError as error:
            raise UsageError(f"cannot read {record.run_dir.run}: {error}") from None
        allow = recorded.allowed(self.allow)
        said = {name: value for name, value in self.said.items() if value is not None}
        stages = self._stages(said, before.replicas)
        if stages is not None:
            said["stages"] = stages
        fields = recorded.merged(before, said, allow)
        options = complete(self.job_file, fields.pop("stages"), fields)
        recorded.check(before, options, allow, f"the run in {self.run_dir}")
        return options


def _rows(run_dir: RunDir) -> int:
    """Bytes of the rows of all steps and evaluations."""
    paths = (run_dir.metrics, run_dir.evaluation)
    return sum(path.stat().st_size for path in paths if path.exists())


def _plain(options: Options) -> dict[str, Any]:
    """As run.json has them."""
    fields: dict[str, Any] = json.loads(options.to_json())
    return {name: value for name, value in fields.items() if name not in _OF_ONE_START}


def _process(options: Options) -> dict[str, Any]:
    """What run.json has of this process and of what it runs."""
    found = git(Path(options.job_file))
    return {**facts(), **({"git": found} if found else {})}


def _check_packages(options: Options) -> None:
    """That this installation has what the options need, before anything is made."""
    if options.tensorboard:
        tensorboard.check()
