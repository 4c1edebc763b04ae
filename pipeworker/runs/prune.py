"""``pipeworker prune``: free the disk of checkpoints that nobody needs any more."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from pipeworker.display.text import data_size
from pipeworker.errors import PipeworkerError, RecordError, UnreadableFile, UsageError, reading
from pipeworker.plan.figures import plural
from pipeworker.record.checkpoint.folder import remove_unless_held
from pipeworker.record.checkpoint.manifest import MANIFEST, Manifest
from pipeworker.record.files.bounded_file import ABSENT
from pipeworker.record.lock import RunLock
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir, files_below
from pipeworker.runs.info import RUNNING, Run
from pipeworker.runs.listing import one_line, read_runs

_OURS = re.compile(
    r"(damaged-|left-)?step-\d{8,19}(-\d+)?"
    r"|\.step-\d{8,19}\.(partial|(partial\.[0-9a-f]+\.)?gone)",
    re.ASCII,
)
"""The folders that a job makes among its checkpoints."""


def prune(folder: Path, *, keep_weights: bool, dry_run: bool) -> Iterator[str]:
    """Remove checkpoints of the runs in a folder, or of a run, and yield a line for each run.

    A run that is running is left alone, by its lock, and so are a checkpoint that another job reads
    and everything that is a link. Of a run only folders of checkpoints are removed; its records
    stay.

    Args:
        folder: of the runs, or a run directory.
        keep_weights: keep the newest checkpoint and the one with the best evaluation.
        dry_run: remove nothing, and describe what would be removed.

    Raises:
        UsageError: the folder does not exist, or cannot be read.
        RecordError, UnreadableFile: a checkpoint of a run cannot be removed, or cannot be read.
            The other runs have been pruned then.
    """
    runs, damaged = read_runs(folder)
    for path, why in damaged.items():
        yield one_line(f"{path.name}: left alone: {why}")
    total = count = 0
    failed: PipeworkerError | None = None
    for run in runs:
        name = run.path.resolve().name
        try:
            freed, reason = _prune(run, keep_weights=keep_weights, dry_run=dry_run)
        except (RecordError, UnreadableFile) as error:
            if failed is not None:
                yield one_line(f"error: {failed}")
            failed = error
            continue
        if reason:
            yield one_line(f"{name}: left alone: {reason}")
            continue
        sizes = {path: size for path, size in freed.items() if size is not None}
        for path in freed.keys() - sizes.keys():
            yield one_line(f"{name}: left alone: another job reads {path.name}")
        if sizes:
            count, total = count + 1, total + sum(sizes.values())
            listed = ", ".join(f"{path.name} ({data_size(size)})" for path, size in sizes.items())
            yield one_line(f"{name}: {'would remove' if dry_run else 'removed'} {listed}")
    verb = "would free" if dry_run else "freed"
    yield f"{verb} {data_size(total)} in {plural(count, 'run')}"
    if failed is not None:
        raise failed


def _prune(run: Run, *, keep_weights: bool, dry_run: bool) -> tuple[dict[Path, int | None], str]:
    """Remove checkpoints of a run; return what :func:`_remove` returns, or why none is removed.

    Raises:
        UnreadableFile: a checkpoint cannot be read now.
        RecordError: a checkpoint cannot be removed, or the run's lock cannot be opened.
    """
    run_dir = RunDir(run.path)
    with ExitStack() as stack:
        if run.status == RUNNING:
            return {}, "it is running"
        if run.path.is_symlink():
            return {}, "it is a link"
        if not dry_run:
            try:
                stack.enter_context(RunLock(run_dir.lock, exclusive=True))
            except BlockingIOError:
                return {}, "it is running"
            except OSError as error:
                raise RecordError(run_dir.lock, error) from None
        if run_dir.checkpoints.path.is_symlink():
            return {}, f"{run_dir.checkpoints.path} is a link"
        with reading(run_dir.checkpoints.path):
            found = _removable(run_dir, run.record, keep_weights=keep_weights)
        return _remove(found, dry_run=dry_run), ""


def _removable(run_dir: RunDir, record: RunRecord, *, keep_weights: bool) -> list[Path]:
    """Return the folders of a run's checkpoints that are to be removed.

    Raises:
        OSError: one cannot be read now, which may be one to keep.
    """
    checkpoints = run_dir.checkpoints.path
    entries = [*os.scandir(checkpoints)] if checkpoints.is_dir() else []
    folders = [
        checkpoints / entry.name
        for entry in entries
        if entry.is_dir(follow_symlinks=False) and _OURS.fullmatch(entry.name)
    ]
    kept: set[Path] = set()
    if keep_weights:
        named = [path for path in run_dir.checkpoints.paths() if path in folders]
        whole = {path: row for path in named if (row := _evaluation_of_whole(path)) is not None}
        kept = {*named[-1:], *[*whole][-1:]}
        if len(folders) > len(kept):  # else nothing is removed, whatever is damaged
            for path in reversed([*whole]):
                if _is_intact(path):
                    kept.add(path)
                    break
                del whole[path]
        while best := record.criterion.best_of(whole):
            if best in kept or _is_intact(best):
                kept.add(best)
                break
            del whole[best]
    return sorted(path for path in folders if path not in kept)


def _evaluation_of_whole(checkpoint: Path) -> dict[str, float] | None:
    """Return the evaluation after a checkpoint, or {}; None if a file is missing or cut off.

    Raises:
        OSError: it cannot be read now.
    """
    with suppress(UsageError, *ABSENT):
        manifest = Manifest.read(checkpoint / MANIFEST)
        for file in manifest.files:
            manifest.locate(checkpoint, file)
        return manifest.evaluation or {}
    return None


def _is_intact(checkpoint: Path) -> bool:
    """Return whether the files of a checkpoint have their checksums, which reads all of them.

    Raises:
        OSError: it cannot be read now.
    """
    with suppress(UsageError, *ABSENT):
        Manifest.read(checkpoint / MANIFEST).check_files(checkpoint)
        return True
    return False


def _remove(folders: list[Path], *, dry_run: bool) -> dict[Path, int | None]:
    """Remove folders of checkpoints; return the bytes that each frees, None if a process reads it.

    Checkpoints share files by hard links: the last one that is removed frees them.
    """
    sizes: dict[Path, int | None] = {}
    removed = Counter[tuple[int, int]]()  # links that a dry run leaves
    for path in folders:
        files = files_below(path)
        sizes[path] = sum(f.st_size for key, f in files.items() if f.st_nlink - removed[key] == 1)
        try:
            if dry_run:
                removed.update(files.keys())
            elif not remove_unless_held(path):
                sizes[path] = None
        except OSError as error:
            raise RecordError(path, error) from None
    return sizes
