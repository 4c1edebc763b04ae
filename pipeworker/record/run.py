"""``run.json``: what a run was asked for, when and by whom, and ``job.py``, a copy of its job file.

What was written at the beginning stays. Each time the run goes on, an entry is added to `resumed`,
with what has changed; a job file that has changed is copied beside the others, as ``job-2.py`` the
second time the run goes on. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.record.rundir import JOB, RunDir, write_json, write_whole

VERSION = 1


def write(run_dir: RunDir, options: Mapping[str, Any], process: Mapping[str, Any]) -> None:
    """Record the beginning of a run.

    Args:
        options: all of them, as JSON has them.
        process: what there is to know of the one that runs it.

    Raises:
        OSError: a file cannot be written.
    """
    job = _job(options)
    content = {
        "version": VERSION,
        **process,
        "job": _copy(run_dir, job, JOB),
        "job_sha256": _sum(job),
        "arguments": options["arguments"],
        "seed": options["seed"],
        "options": dict(options),
        "resumed": [],
    }
    write_json(run_dir.run, content)


@dataclass(frozen=True, slots=True)
class Record:
    """What ``run.json`` says, which anybody may have changed.

    Attributes:
        options: those in force when the run was last begun or gone on with.
    """

    run_dir: RunDir
    content: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def read(cls, run_dir: RunDir) -> Record:
        """What is needed of it checked.

        Raises:
            UsageError: there is none, or it cannot be read.
        """
        path = run_dir.run
        try:
            found: Any = json.loads(path.read_bytes().decode())
        except FileNotFoundError:
            where = run_dir.path
            raise UsageError(
                f"{where} is not the directory of a run: no run.json is there"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            found = None
        version = found.get("version") if isinstance(found, dict) else VERSION
        if type(version) is not int or version != VERSION:
            shown = f"version {reprlib.repr(version)}, this pipeworker reads version {VERSION}"
            raise UsageError(f"cannot read {path}: it is of {shown}")
        try:
            options: dict[str, Any] = {}
            for entry in (found, *found["resumed"]):
                options |= _object(entry["options"])
        except (KeyError, TypeError):
            raise UsageError(f"cannot read {path}: it is not the record of a run") from None
        return cls(run_dir, found, options)

    @property
    def last(self) -> dict[str, Any]:
        """What was recorded when the run was last begun or gone on with."""
        resumed = self.content["resumed"]
        found: dict[str, Any] = resumed[-1] if resumed else self.content
        return found

    def go_on(self, options: Mapping[str, Any], process: Mapping[str, Any], step: int) -> str:
        """Record that the run goes on from a step.

        Returns:
            The name of a new copy of the job file; nothing where it has not changed.

        Raises:
            OSError: a file cannot be written.
        """
        resumed = self.content["resumed"]
        job, name = _job(options), self.last.get("job")
        new = _sum(job) != self.last.get("job_sha256")
        if new:
            name = _copy(self.run_dir, job, f"job-{len(resumed) + 1}.py")
        entry = {
            "step": step,
            **process,
            "job": name,
            "job_sha256": _sum(job),
            "options": {n: v for n, v in options.items() if self.options.get(n) != v},
        }
        write_json(self.run_dir.run, {**self.content, "resumed": [*resumed, entry]})
        return name or "" if new else ""


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(type(value))
    return value


def _job(options: Mapping[str, Any]) -> bytes | None:
    """What is in the job file; None of a script that is no file."""
    path = Path(options["job_file"])
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _sum(job: bytes | None) -> str | None:
    return None if job is None else hashlib.sha256(job).hexdigest()


def _copy(run_dir: RunDir, job: bytes | None, name: str) -> str | None:
    if job is None:
        return None
    write_whole(run_dir.path / name, job)
    return name
