"""Reads a job's own schedule from its file."""

from __future__ import annotations

from pathlib import Path

from pipeworker.errors import ScheduleError, UsageError
from pipeworker.plan import text
from pipeworker.plan.check import check
from pipeworker.plan.orders import AUTO, ORDERS, resolve
from pipeworker.record.files.bounded_file import open_bounded

_MAX_SCHEDULE = 8 << 20
"""The bound of a schedule file: a message carries its text, among all options."""


def read_schedule(schedule: str | Path) -> str:
    """Return the name of an order, or the text of a schedule's compute actions, which is proven.

    Args:
        schedule: a name, the path of a schedule file, or the text of one.

    Raises:
        UsageError: there is no such order or file, or it cannot be read.
        ScheduleError: the schedule is malformed or cannot run.
    """
    given = str(schedule)
    if given in (*ORDERS, AUTO):
        return given
    content = given
    name = shown = text.name_of(given)
    if not given:  # as of a variable that is not set: its path would be the current folder
        raise UsageError("--schedule: is empty; give a name or the path of a schedule file")
    if not text.is_text(given):
        path = Path(given)
        if path.is_dir():
            raise UsageError(f"--schedule {given}: is a directory; give the path of a file")
        name, shown = "-".join(path.name.split()), given
        try:
            with open_bounded(path, _MAX_SCHEDULE) as file:
                content = file.read().decode()
        except (FileNotFoundError, NotADirectoryError):
            names = ", ".join((*ORDERS, AUTO))
            raise UsageError(
                f"--schedule {given}: no such schedule or file; use one of {names}, or "
                "the path of a schedule file"
            ) from None
        except UnicodeDecodeError:
            raise UsageError(f"--schedule {given}: not a text file; give a schedule file") from None
    try:
        order = text.format_compute(text.parse(content), name)
        source = resolve(order)
        placement = source.place(order.count("\n") - 1)
        modes = ("never",) * placement.stages
        check(source.build(placement, source.microbatches or 0, modes))
    except ScheduleError as error:
        raise ScheduleError(f"--schedule {shown}: {error}") from None
    return order
