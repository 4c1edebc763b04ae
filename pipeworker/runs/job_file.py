"""The job file of a recorded run, for a resume that names none. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeworker.errors import UsageError
from pipeworker.record.bounded_file import open_bounded
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir

_MOST_BYTES = 64 << 20
_COPY = re.compile(r"job(-\d{1,9})?\.py", re.ASCII)


@dataclass(frozen=True, slots=True)
class RecordedJobFile:
    """The job file with which a run was last started.

    Attributes:
        path: where it is: its original path, or that of the copy in the run directory.
        missed: why the copy takes the place of the original; empty if it does not.
    """

    path: Path
    missed: str = ""


def find_job_file(run: Path) -> RecordedJobFile:
    """Return the job file for a resume that names none.

    Raises:
        UsageError: there is no run, a script began it, or no file has the recorded content.
    """
    record = RunRecord.read(RunDir(run))
    if record.is_of_script:
        script = record.options.get("job_file")
        raise UsageError(
            f"--resume {run}: the script {script} began this run; resume it there, with resume=True"
        )
    return recorded_job_file(record, f"--resume {run}", f"name the job file: --resume {run} job.py")


def recorded_job_file(record: RunRecord, where: str, remedy: str) -> RecordedJobFile:
    """Return the original job file of a run if it has the recorded content, else the run's copy.

    Args:
        record: the run, which no script began.
        where: the beginning of an error message.
        remedy: its end.

    Raises:
        UsageError: neither file has the recorded content.
    """
    original, digest = Path(str(record.options.get("job_file"))), record.last.get("job_sha256")
    found = _digest(original)
    if digest and found == digest:
        return RecordedJobFile(original)
    name = str(record.last.get("job"))
    copy = record.run_dir.path / name
    if not digest or not _COPY.fullmatch(name) or _digest(copy) != digest:
        raise UsageError(
            f"{where}: neither {original} nor a copy in the run has the recorded content; {remedy}"
        )
    return RecordedJobFile(copy, f"{original} {'has changed since' if found else 'is gone'}")


def _digest(path: Path) -> str:
    """Return the SHA-256 of a regular file, or "" if it cannot be read."""
    with suppress(OSError, ValueError, UsageError), open_bounded(path, _MOST_BYTES) as file:
        return hashlib.sha256(file.read()).hexdigest()
    return ""
