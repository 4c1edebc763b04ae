"""``pipeworker top``: what the workers of a running job do, live."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeworker.display.text import data_size, duration, number, sanitize
from pipeworker.errors import RecordError, UnreadableFile, UsageError
from pipeworker.plan.figures import rate_text, seconds_text
from pipeworker.record import lock, present
from pipeworker.record.metrics import rows
from pipeworker.record.present import Present
from pipeworker.record.rundir import RunDir, listed

_EVERY = 1.0
_PATIENCE = 10.0
"""Seconds in which a job that runs answers."""
_RECENT = 20
_STALE = 3.0
"""Seconds of silence that are shown."""


def watch(path: Path, *, once: bool) -> None:
    """Show what the workers of a job do until it ends, or once; the job is left alone.

    Raises:
        UsageError: no job runs in the directory.
    """
    run_dir = RunDir(path.resolve())
    console = Console()
    with Live(console=console, auto_refresh=False, transient=not once) as live:
        for shown in _views(path, run_dir):
            live.update(Group(*shown), refresh=True)
            if once:
                return
            time.sleep(_EVERY)
    console.print(f"{path}: the job has ended", highlight=False)


def _views(path: Path, run_dir: RunDir) -> Iterator[list[RenderableType]]:
    """Yield what is to be shown, as often as it is asked for, while the job runs."""
    began = time.monotonic()
    if not lock.is_locked(run_dir.lock):
        advice = listed(path) or "give the directory of a running job"
        raise UsageError(f"{path}: no job is running there; {advice}")
    while lock.is_locked(run_dir.lock):
        try:
            run_dir.request_watch()
            now = present.read(run_dir)
        except FileNotFoundError:
            if time.monotonic() - began > _PATIENCE:
                raise UsageError(
                    f"{path}: the job does not say what it does; it may be starting, or is of an "
                    "earlier version of pipeworker"
                ) from None
            time.sleep(0.1)
            continue
        except OSError as error:
            raise RecordError(error.filename or path, error) from None
        began = time.monotonic()
        yield [*_head(run_dir, now), _table(now)]


def _head(run_dir: RunDir, now: Present) -> Iterator[RenderableType]:
    try:
        recent = list(itertools.islice(rows.reversed_rows(run_dir.metrics), _RECENT))
    except OSError as error:
        raise UnreadableFile(run_dir.metrics, error) from None
    parts: list[str] = []
    if recent:
        rate = statistics.median(float(row.get("samples_per_second") or 0) for row in recent)
        seconds = statistics.median(float(row.get("seconds") or 0) for row in recent)
        parts = [
            f"step {recent[0].get('step')}",
            f"loss {number(float(recent[0].get('loss') or 0))}",
            f"{rate_text(rate)} samples/s",
            f"{seconds_text(seconds)} a step",
        ]
    losses = f"losses of workers: {now.restarts}"
    yield Text(sanitize("  ".join([*parts, now.doing, losses])), no_wrap=True, overflow="ellipsis")


def _table(now: Present) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    names = ("worker", "stages", "does", "step", "micro-batch", "layer", "memory", "host", "")
    for name in names:
        table.add_column(justify="right" if name in ("step", "micro-batch", "memory") else "left")
    table.add_row(*names, style="bold")
    for one in now.workers:
        layer = f"{one.layer} {one.kind}".strip() if one.layer >= 0 else ""
        silent = one.silent_seconds > _STALE
        cells = (
            str(one.worker),
            ", ".join(map(str, one.stages)),
            "waits" if one.waits else one.phase,
            *(str(number) if number >= 0 else "" for number in (one.step, one.microbatch)),
            layer,
            data_size(one.memory_bytes) if one.memory_bytes else "",
            one.host,
            f"silent for {duration(one.silent_seconds)}" if silent else "",
        )
        table.add_row(*(Text(sanitize(cell)) for cell in cells))
    return table


def snapshot(path: Path) -> dict[str, Any]:
    """Return what the workers of a running job do at present; raises as :func:`watch`."""
    run_dir = RunDir(path.resolve())
    next(_views(path, run_dir))
    found: dict[str, Any] = msgspec.to_builtins(present.read(run_dir))
    return found
