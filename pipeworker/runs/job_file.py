"""The job file of a recorded run, for a resume that names none. Imports no torch."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeworker.errors import RecordError, UsageError
from pipeworker.record.files.atomic_file import temporary_path, write_bytes
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir, file_digest

_MOST_BYTES = 64 << 20
_COPY = re.compile(r"job(-\d{1,9})?\.py", re.ASCII)


@dataclass(frozen=True, slots=True)
class RecordedJobFile:
    """The job file with which a run was last started.

    Attributes:
        path: where it is: its original path, or that of the copy in the run directory.
        original: its original path.
        missed: why the copy takes the place of the original; empty if it does not.
    """

    path: Path
    original: Path
    missed: str = ""


def find_job_file(run: Path) -> RecordedJobFile:
    """Return the job file for a resume that names none.

    A copy is placed in a folder of the run, if the original has neighbours that it may need.

    Raises:
        UsageError: there is no run, a script began it, or no file has the recorded content.
        RecordError: the copy cannot be placed.
    """
    record = RunRecord.read(RunDir(run))
    if record.is_of_script:
        script = record.options.get("job_file")
        raise UsageError(
            f"--resume {run}: the script {script} began this run; resume it there, with resume=True"
        )
    remedy = f"name the job file: --resume {run} job.py"
    found = recorded_job_file(record, f"--resume {run}", remedy)
    folder = record.run_dir.job_folder(file_digest(found.path, _MOST_BYTES))
    if not found.missed or not _neighbours(found.original, folder):
        return found
    try:
        return replace(found, path=place_copy(found, folder))
    except OSError as error:
        raise RecordError(error.filename or folder, error) from None


def recorded_job_file(record: RunRecord, where: str, remedy: str) -> RecordedJobFile:
    """Return the original job file of a run if it has the recorded content, else the run's copy.

    No script began the run. An error message begins with `where` and ends with `remedy`.

    Raises:
        UsageError: neither file has the recorded content.
    """
    original, digest = Path(str(record.options.get("job_file"))), record.last.get("job_sha256")
    found = file_digest(original, _MOST_BYTES)
    if digest and found == digest:
        return RecordedJobFile(original, original)
    name = str(record.last.get("job"))
    copy = record.run_dir.path / name
    if not digest or not _COPY.fullmatch(name) or file_digest(copy, _MOST_BYTES) != digest:
        raise UsageError(
            f"{where}: neither {original} nor a copy in the run has the recorded content; {remedy}"
        )
    missed = f"{original} {'has changed since' if found else 'is gone'}"
    return RecordedJobFile(copy, original, missed)


def place_copy(found: RecordedJobFile, folder: Path) -> Path:
    """Place the copy of a job file in a folder that links to what is beside the original.

    The file may import modules and read files there. Links of an earlier call that lead nowhere
    are removed. Several processes may do the same at once.

    Returns:
        The path of the copy, which has the name of the original.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(exist_ok=True)
    for link in folder.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    for beside in _neighbours(found.original, folder):
        link = folder / beside.name
        if not link.is_symlink() or link.readlink() != beside:
            with temporary_path(link) as temporary:
                temporary.symlink_to(beside)
                temporary.replace(link)
    placed, content = folder / found.original.name, found.path.read_bytes()
    if not placed.is_file() or placed.is_symlink() or placed.read_bytes() != content:
        write_bytes(placed, content)
    return placed


def _neighbours(original: Path, folder: Path) -> list[Path]:
    """Return what is beside a job file, but not what has the folder in it."""
    with suppress(OSError, UnicodeEncodeError):  # of a name that the locale's encoding lacks
        found = sorted(original.parent.iterdir())
        return [path for path in found if path != original and path not in folder.parents]
    return []
