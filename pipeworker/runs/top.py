"""``pipeworker top``: what the workers of a running job do, live."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeworker.display.text import data_size, duration, figure_text, sanitize, strict
from pipeworker.errors import RecordError, UsageError, reading
from pipeworker.plan.figures import rate_text, seconds_text
from pipeworker.record import lock, present
from pipeworker.record.metrics import rows
from pipeworker.record.present import Present
from pipeworker.record.rundir import Request, RunDir, running
from pipeworker.runs.info import positive

_EVERY = 1.0
_PATIENCE = 10.0
"""Seconds in which a job that runs answers."""
_RECENT = 20
_STALE = 3.0
"""Seconds of silence that are shown."""


def watch(path: Path) -> None:
    """Show what the workers of a job do until it ends; the job is left alone.

    Raises:
        UsageError: no job runs in the directory.
    """
    console = Console()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for moment in _moments(path):
            live.update(_shown(moment), refresh=True)
            time.sleep(_EVERY)
    console.print(f"{path}: the job has ended", highlight=False)


def show_once(path: Path) -> None:
    """Show what :func:`watch` shows now, and raise as it does.

    Raises:
        RecordError: standard output cannot be written.
    """
    shown = _shown(_moment(path))
    try:
        Console().print(shown)
    except BrokenPipeError:  # its reader wants no more
        raise
    except OSError as error:
        raise RecordError("standard output", error) from None


class _Moment(NamedTuple):
    """The figures of the last steps that have ended, and what the workers do at present."""

    last: dict[str, Any]
    now: Present


def _shown(moment: _Moment) -> Group:
    return Group(_head(moment), _table(moment.now))


def _moment(path: Path) -> _Moment:
    """Return what is to be shown once.

    Raises:
        UsageError: no job runs in the directory, or it has ended meanwhile.
    """
    for moment in _moments(path):
        return moment
    raise UsageError(f"{path}: the job has ended; pipeworker show has its results")


def _moments(path: Path) -> Iterator[_Moment]:
    """Yield what is to be shown, as often as it is asked for, while the job runs."""
    began = time.monotonic()
    run_dir = running(path)
    while lock.is_locked(run_dir.lock):
        try:
            run_dir.request(Request.WATCH)
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
        yield _Moment(_recent(run_dir), now)


def _recent(run_dir: RunDir) -> dict[str, Any]:
    """Return the last step that has ended, and the rate of the last few; empty before the first."""
    with reading(run_dir.metrics):
        recent = list(itertools.islice(rows.reversed_rows(run_dir.metrics), _RECENT))
    if not recent:
        return {}
    medians = {
        name: statistics.median(positive(row.get(name)) for row in recent)
        for name in ("samples_per_second", "seconds")
    }
    return {"step": recent[0].get("step"), "loss": recent[0].get("loss"), **medians}


def _head(moment: _Moment) -> RenderableType:
    last, now = moment.last, moment.now
    parts: list[str] = []
    if last:
        parts = [
            f"step {last['step']} done",
            f"loss {figure_text(math.nan if last['loss'] is None else last['loss'])}",
            f"{rate_text(last['samples_per_second'])} samples/s",
            f"{seconds_text(last['seconds'])} a step",
        ]
    losses = f"losses of workers: {now.restarts}"
    return Text(sanitize("  ".join([*parts, now.doing, losses])))


_COLUMNS = "worker", "replica", "stages", "does", "step", "micro-batch", "layer", "held", "memory"
_RIGHT = ("step", "micro-batch", "held", "memory")


def _table(now: Present) -> Table:
    several = any(one.replica for one in now.workers)
    table = Table.grid(padding=(0, 2, 0, 0))
    names = [name for name in (*_COLUMNS, "host", "") if several or name != "replica"]
    for name in names:
        table.add_column(justify="right" if name in _RIGHT else "left")
    table.add_row(*names, style="bold")
    for one in now.workers:
        layer = f"{one.layer} {one.kind}".strip() if one.layer >= 0 else ""
        silent = one.silent_seconds > _STALE
        cells = (
            str(one.worker),
            *([str(one.replica)] if several else []),
            ", ".join(map(str, one.stages)),
            "waits" if one.waits else one.phase,
            *(str(number) if number >= 0 else "" for number in (one.step, one.microbatch)),
            layer,
            str(one.held),
            data_size(one.memory_bytes) if one.memory_bytes else "",
            one.host,
            f"silent for {duration(one.silent_seconds)}" if silent else "",
        )
        table.add_row(*(Text(sanitize(cell)) for cell in cells))
    return table


def snapshot(path: Path) -> dict[str, Any]:
    """Return what the workers of a running job do at present, as strict JSON has it.

    Raises:
        UsageError: no job runs in the directory, or it has ended meanwhile.
    """
    moment = _moment(path)
    now: dict[str, Any] = msgspec.to_builtins(moment.now)
    return dict(strict({**now, "last": moment.last}))
