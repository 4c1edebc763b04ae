"""The checkpoints of a run: a folder each, which is complete or hidden. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipeworker.errors import UsageError
from pipeworker.facts.criterion import Criterion
from pipeworker.record.checkpoint.manifest import (
    MANIFEST,
    WEIGHTS_INDEX,
    Manifest,
    tensor_sizes,
    weights_index,
)
from pipeworker.record.files.atomic_file import (
    named,
    open_file,
    remove,
    sync_folder,
    write_json,
)
from pipeworker.record.files.bounded_file import ABSENT, LACKS_DESCRIPTORS

_GONE = ".*.gone"
_REPLACED = ".replaced"
"""The end of the hidden name of a checkpoint whose step is saved again, until that is complete."""
_STEP = re.compile(r"step-(\d{8,19})", re.ASCII)
_PARTIAL = re.compile(r"\.step-(\d{8,19})\.partial", re.ASCII)


class CheckpointFolder:
    """The folder ``checkpoints`` of a run directory, at `path`; it may not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def at(self, step: int) -> Path:
        """Return the path of the complete checkpoint of a step; it may not exist."""
        return self.path / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Return the path that workers write to before :meth:`commit`."""
        return self.path / f".step-{step:08d}.partial"

    def commit(self, manifest: Manifest) -> None:
        """Complete a checkpoint: write its manifest, then rename its folder.

        The index of its weights is left out if a worker on another host wrote some of them.

        Raises:
            OSError: the checkpoint cannot be completed; it is not there then.
            ValueError: a file of the checkpoint is not one that a worker writes.
        """
        partial = self.partial(manifest.step)
        handle = os.open(self.path, os.O_RDONLY)  # before anything has changed
        try:
            files = [partial / f.name for f in manifest.files if f.name.startswith("model-")]
            if all(file.exists() for file in files):
                index = weights_index({file.name: tensor_sizes(file) for file in files})
                write_json(partial / WEIGHTS_INDEX, index)
            write_json(partial / MANIFEST, manifest.to_json())
            sync_folder(partial)
            complete = self.at(manifest.step)
            replaced = complete.with_name(f".{complete.name}{_REPLACED}")
            if replaces := complete.exists():  # a loop of the user's own may save a step again
                remove(replaced)  # of a process that was killed before it could
                complete.rename(replaced)
            try:
                partial.rename(complete)
            except OSError:
                self.restore_replaced()
                raise
            with named(self.path):
                os.fsync(handle)
        finally:
            os.close(handle)
        if replaces:
            shutil.rmtree(replaced, ignore_errors=True)

    def restore_replaced(self) -> None:
        """Restore checkpoints whose replacement was not completed; remove all others replaced."""
        for path in self.path.glob(f".step-*{_REPLACED}"):
            complete = path.with_name(path.name.removesuffix(_REPLACED)[1:])
            if complete.exists():
                with suppress(OSError):  # a file that a process reads may stay, as on NFS
                    remove(path)
            else:
                path.rename(complete)

    def set_aside(self, step: int) -> Path:
        """Rename the folder of a checkpoint that will not be complete; return its path.

        That takes no time, and workers may then write a checkpoint of this step again. The caller,
        or :meth:`remove_set_aside`, removes the files.

        Raises:
            OSError: there is none, or it cannot be renamed.
        """
        partial = self.partial(step)
        return partial.rename(partial.with_name(f"{partial.name}.{secrets.token_hex(4)}.gone"))

    def remove_set_aside(self) -> None:
        """Remove what was set aside, or left by a process that ended while it removed it."""
        for path in self.path.glob(_GONE):
            remove(path)

    def leave_later(self, step: int) -> list[Path]:
        """Rename the checkpoints of steps after `step`, and return their new paths, oldest first.

        A loop of the user's own has gone back behind them and saved `step`, which is now the newest
        one.

        Raises:
            OSError: one cannot be renamed.
        """
        later = [path for path in self.paths() if step_of(path) > step]
        return [path.rename(unused(path.with_name(f"left-{path.name}"))) for path in later]

    def remove_leftovers(self) -> None:
        """Remove what processes left that ended while they wrote or removed a checkpoint."""
        self.restore_replaced()
        for step in self.unfinished():
            remove(self.partial(step))
        self.remove_set_aside()

    def unfinished(self) -> list[int]:
        """Return the steps of the checkpoints that are being written, or never will be complete."""
        return sorted(self._named(_PARTIAL))

    def paths(self) -> list[Path]:
        """Return the folders named like complete checkpoints, the oldest first."""
        return [path for _, path in sorted(self._named(_STEP).items())]

    def _named(self, pattern: re.Pattern[str]) -> dict[int, Path]:
        """Return the entries whose names have this pattern, by step.

        Raises:
            OSError: the folder is there, but it cannot be read.
        """
        try:
            entries = list(self.path.iterdir())
        except (*ABSENT, ValueError):  # no file has such a name
            return {}
        return {int(m[1]): path for path in entries if (m := pattern.fullmatch(path.name))}

    def last_step(self) -> int:
        """Return the step of the newest checkpoint, or -1 if there is none."""
        return max(self.steps(), default=-1)

    def steps(self) -> list[int]:
        """Return the steps of the folders named like complete checkpoints, in order."""
        return [step_of(path) for path in self.paths()]

    def best(self, criterion: Criterion) -> Path | None:
        """Return the complete checkpoint with the best evaluation; None if none has any.

        Raises:
            OSError: one cannot be read now; it may be the best.
        """
        return criterion.best_of({path: _evaluation(path) for path in self.paths()})

    def prune(
        self, keep: int, criterion: Criterion, newest: int = sys.maxsize, restored: int = -1
    ) -> None:
        """Remove all complete checkpoints but the newest `keep` and the best one.

        One that a process reads (:func:`held`), or of the step `restored`, is removed later.
        Checkpoints of steps after `newest` stay, and do not count.

        Raises:
            OSError: one cannot be read or removed now; a later call may do.
        """
        paths = [path for path in self.paths() if step_of(path) <= newest]
        if len(paths) <= keep:
            return
        best = self.best(criterion)
        for path in paths[:-keep]:
            if path != best and step_of(path) != restored:
                remove_unless_held(path)


def unused(path: Path) -> Path:
    """Return this path, or one with a number behind it, so that it does not exist."""
    names = (path.with_name(f"{path.name}{end}") for end in ("", *(f"-{n}" for n in range(2, 999))))
    return next(name for name in names if not name.exists())


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a complete checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def _evaluation(checkpoint: Path) -> dict[str, float]:
    """Return the row of the evaluation after a checkpoint's step; empty if there is none.

    Raises:
        OSError: it cannot be read now.
    """
    with suppress(UsageError, *ABSENT):
        return Manifest.read(checkpoint / MANIFEST).evaluation or {}
    return {}


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Have the run of a complete checkpoint keep it inside the context.

    On a file system without locks the checkpoint may be removed all the same.

    Raises:
        UsageError: the run has removed it.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(open_file(path / MANIFEST, "rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
        if not path.exists():
            raise UsageError(f"{path}: its run has just removed it; try again")
        yield


def remove_unless_held(path: Path) -> bool:
    """Remove the folder of a checkpoint unless a process reads it; return whether it is removed.

    It never looks complete when it is half removed.

    Raises:
        OSError: it cannot be removed.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_file(path / MANIFEST, "r+b"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # it has none, or the file system has no locks
            if error.errno in LACKS_DESCRIPTORS:
                raise
        hidden = path if path.name[0] == "." else path.rename(path.with_name(f".{path.name}.gone"))
        shutil.rmtree(hidden)
    return True
