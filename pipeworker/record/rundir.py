"""The run directory: the files that a job leaves behind. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from enum import Enum
from pathlib import Path

from pipeworker.errors import UsageError
from pipeworker.record.checkpoint.folder import CheckpointFolder
from pipeworker.record.checkpoint.manifest import MANIFEST
from pipeworker.record.files.atomic_file import is_partial_file, no_link, remove_partial_files
from pipeworker.record.files.bounded_file import open_bounded
from pipeworker.record.lock import is_locked

_RUNS = Path("runs")
JOB = "job.py"
JOBS = (JOB, "job.ipynb")
_JOB_FOLDER = ".job-"
_ROWS = (".jsonl", ".csv")
_CHECKPOINTS = "give the directory of a finished run, or one of its checkpoints"


class Request(Enum):
    """A request to the job that runs in a directory, by the name of its file there.

    It is a file, because all hosts of a job and its user have this folder in common.
    """

    CHECKPOINT = ".checkpoint"
    """Save at the end of the step."""
    WATCH = ".watch"
    """Write the file `now` for a few seconds."""
    CANCEL = "cancelled"
    """End, and do not start again by itself. The file stays until the run is resumed: a script that
    requeues a job looks for it."""


def file_digest(path: Path, most: int | None = None) -> str:
    """Return the SHA-256 of a regular file of at most `most` bytes, or "" if it cannot be read."""
    with suppress(OSError, ValueError, UsageError), open_bounded(path, most) as file:
        return hashlib.sha256(file.read()).hexdigest()
    return ""


class RunDir:
    """The layout of a run directory.

    The folder `events` has TensorBoard's files; `lock` is that of a
    :class:`pipeworker.record.lock.RunLock`. The paths of all files begin with `root`, which leads
    through a `descriptor` of the directory, if one is given: they stay valid when it is renamed. A
    child process can use them if it inherits the `descriptors`.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self._path = path
        self.descriptors = () if descriptor is None else (descriptor,)
        if descriptor is not None:
            path = Path(f"/proc/self/fd/{descriptor}")
        self.root = path
        self.run = path / "run.json"
        self.lock = path / ".lock"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.evaluation = path / "evaluation.jsonl"
        self.events = path / "tensorboard"
        self.summary = path / "summary.json"
        self.checkpoints = CheckpointFolder(path / "checkpoints")
        self.hooks = path / "hooks.json"
        self.profiles = path / "profile"
        self.timeline = path / "timeline"
        self.logs = path / "logs"
        self.coordinator_log = self.logs / "coordinator.log"
        self.hooks_log = self.logs / "hooks.log"
        self.now = path / ".now.json"

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Return the run directory that is at `path` now, wherever it is moved.

        Without a ``/proc``, its files are looked for at `path`.

        Raises:
            OSError: there is no such directory.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        found = cls(path, descriptor)
        if not found.root.exists():
            os.close(descriptor)
            return cls(path)
        weakref.finalize(found, os.close, descriptor).atexit = False
        return found

    @property
    def path(self) -> Path:
        """The present path of the directory; its last one if it has been removed or unmounted.

        The descriptor of a directory whose file system is unmounted has a path that begins there.
        """
        if self.descriptors:
            with suppress(OSError):
                # Without a Path: a coordinator looks several times a step.
                found = os.readlink(self.root)  # noqa: PTH115
                if found != str(self._path) and Path(found).samefile(self.root):
                    self._path = Path(found)
        return self._path

    def host_log(self, name: str) -> Path:
        """Return the log of the command that starts a host's agent, such as ssh."""
        return self.logs / f"host-{name.replace('/', '-')}.log"

    def job_folder(self, digest: str) -> Path:
        """Return the absolute path of the folder for a copy of the job file with this digest."""
        return self.path.absolute() / f"{_JOB_FOLDER}{digest[:16]}"

    def worker_timeline(self, rank: int) -> Path:
        """Return the file of what the worker of this rank did and when."""
        return self.timeline / f"worker-{rank}.jsonl"

    def memory_snapshot(self, rank: int) -> Path:
        """Return the file of what a device's allocator held when a worker found no memory."""
        return self.logs / f"memory-worker-{rank}.pickle"

    def worker_ring(self, rank: int) -> Path:
        """Return the file of the times of what a worker without an agent does at present."""
        return self.timeline / f"worker-{rank}.ring"

    def worker_rings(self) -> list[Path]:
        """Return all such files."""
        return [*self.timeline.glob("worker-*.ring")]

    def worker_log(self, rank: int) -> Path:
        """Return the file of what the worker of this rank prints."""
        return self.logs / f"worker-{rank}.log"

    def is_unused(self) -> bool:
        """Return whether it has at most what a start leaves that is killed before its record."""
        if not self.root.is_dir() or self.logs.is_symlink() or any(self.logs.glob("*")):
            return False
        others = [path for path in self.root.iterdir() if path != self.logs]
        return all(p.is_file() and (p == self.lock or is_partial_file(p)) for p in others)

    def check_links(self) -> None:
        """Check that no link of a stranger leads the files of a job out of the directory.

        Raises:
            UsageError: a link is in place of a folder, or of a file of rows.
        """
        for path in (
            self.checkpoints.path,
            self.logs,
            self.events,
            self.metrics,
            self.evaluation,
            self.profiles,
            self.timeline,
            self.root / "wandb",  # wandb's own writer follows links
        ):
            if path.is_symlink():
                raise UsageError(f"{path}: is a link; put what it leads to in its place")

    def request(self, kind: Request) -> None:
        """Send a request to the job that runs here."""
        os.close(no_link(self.root / kind.value, os.O_WRONLY | os.O_CREAT))

    def requested(self, kind: Request) -> bool:
        """Return whether there is a request that was not withdrawn.

        A directory that cannot be searched now, as on a network file system, has none.
        """
        with suppress(OSError):
            return (self.root / kind.value).exists()
        return False

    def withdraw(self, kind: Request) -> bool:
        """Withdraw a request; return whether there was one."""
        try:
            (self.root / kind.value).unlink()
        except OSError:
            return False
        return True

    def remove_partial_files(self) -> None:
        """Remove what killed processes left at temporary paths, where none writes now."""
        remove_partial_files(self.root)
        if self.profiles.is_dir():
            remove_partial_files(self.profiles)

    def remove_run(self, made: Sequence[Path]) -> None:
        """Remove our files of a run that never began, and its folders that are empty then.

        `made` are the folders that were made for it, the deepest first.
        """
        rows = [path.with_suffix(end) for path in (self.metrics, self.evaluation) for end in _ROWS]
        files = [
            *(self.root / name for name in JOBS),
            self.plan,
            *rows,
            self.summary,
            self.hooks,
            self.now,
            *(self.root / kind.value for kind in Request),
        ]
        written = [
            *self.logs.glob("*.log"),
            *self.logs.glob("memory-worker-*.pickle"),
            *self.events.glob("events.*"),
            *self.timeline.glob("*.jsonl"),
            *self.timeline.glob("*.ring"),
        ]
        # The record is the last: without it, other files would be the user's.
        for path in (*files, *written, self.run, self.lock):
            with suppress(OSError):
                path.unlink()
        self.remove_partial_files()
        for folder in (self.logs, self.events, self.timeline, self.checkpoints.path, *made):
            with suppress(OSError):
                folder.rmdir()


def running(path: Path) -> RunDir:
    """Return the run directory of a job that runs.

    Raises:
        UsageError: no job runs there.
    """
    run_dir = RunDir(Path(os.path.realpath(path)))  # resolve() raises for a link to itself
    if not is_locked(run_dir.lock):
        advice = listed(path) or "give the directory of a running job"
        raise UsageError(f"{path}: no job is running there; {advice}")
    return run_dir


def disk_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; symbolic links in it are not followed."""
    return sum(found.st_size for found in files_below(folder).values())


def files_below(folder: Path) -> dict[tuple[int, int], os.stat_result]:
    """Return the files below a folder by device and inode, so that hard links are one file."""
    found: dict[tuple[int, int], os.stat_result] = {}
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed since
                status = Path(where, name).lstat()
                found[status.st_dev, status.st_ino] = status
    return found


def find_checkpoint(source: Path) -> Path:
    """Return `source` if it is a checkpoint, else the newest complete one of that run directory.

    Raises:
        UsageError: there is no complete checkpoint.
    """
    if (source / MANIFEST).is_file():
        return source
    complete = [path for path in RunDir(source).checkpoints.paths() if (path / MANIFEST).is_file()]
    if not complete:
        raise UsageError(
            f"{source}: no complete checkpoint is there; {listed(source) or _CHECKPOINTS}"
        )
    return complete[-1]


def listed(path: Path) -> str:
    """Return a question after the run that is meant by a path without a run, else "".

    It is that which ``pipeworker list`` shows under this name, one with a similar name, or that of
    a checkpoint.
    """
    with suppress(OSError, ValueError):
        path = path.relative_to(Path.cwd())
    run = RunDir(_RUNS / path)
    if run.path != path and run.run.is_file():
        return f"did you mean {run.path}?"
    if path.exists():
        run = RunDir(path.parent.parent)
        is_checkpoint = path.parent == run.checkpoints.path and run.run.is_file()
        return f"did you mean its run, {run.path}?" if is_checkpoint else ""
    for folder in (path.parent, _RUNS):
        names = [found.parent.name for found in folder.glob("*/run.json")]
        if meant := get_close_matches(path.name, names, 1):
            return f"did you mean {folder / meant[0]}?"
    return ""


def already_exists(asked: str | Path) -> UsageError:
    """Return the error about a directory that a new run cannot have."""
    if RunDir(Path(asked)).run.exists():
        return UsageError(
            f"run directory {asked}: exists already; choose another --run-dir, or add --resume (in "
            "a script, resume=True) to continue its run"
        )
    what = "exists already and is no run" if Path(asked).is_dir() else "is no folder"
    return UsageError(f"run directory {asked}: {what}; choose another --run-dir")


def stamp() -> str:
    """Return the time, for a name."""
    return time.strftime("%Y%m%d-%H%M%S")


def default_path(job_file: Path) -> Path:
    """Return the directory of a new run that is given none, relative to the current folder."""
    return _RUNS / f"{job_file.stem}-{stamp()}"


def create(asked: str | Path | None, job_file: Path) -> tuple[RunDir, tuple[Path, ...]]:
    """Make the directory of a new run: `asked`, or that of :func:`default_path`.

    Returns:
        The run directory, and the folders that were made for it, the deepest first.

    Raises:
        UsageError: the directory exists already and is not unused, or it cannot be made.
    """
    stem = default_path(job_file)
    path = Path(asked) if asked else stem
    attempt = 1
    while True:
        made: tuple[Path, ...] = ()
        try:
            new = [folder.absolute() for folder in path.parents if not folder.exists()]
            if not (asked and RunDir(path).is_unused()):
                path.mkdir(parents=True, exist_ok=False)
                made = (path.resolve(), *new)
            (path / "logs").mkdir(exist_ok=True)
            return RunDir(path.resolve()), made
        except FileExistsError as error:
            if asked:
                raise already_exists(asked) from None
            if not os.path.lexists(path):
                raise UsageError(
                    f"run directory {path}: cannot be made: {error.filename} is a link that leads "
                    "nowhere; choose another --run-dir"
                ) from None
            attempt += 1
            path = stem.with_name(f"{stem.name}-{attempt}")
        except OSError as error:
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
            raise UsageError(
                f"run directory {path}: cannot be made: {error.strerror}; choose another --run-dir"
            ) from None
