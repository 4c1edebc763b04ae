"""How names of options are written, and names that are none: former ones, and what a job file has.

Every place where an option is named reads the one table of former names. One option had no default
before: where an older run recorded None, it has its present default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeworker.errors import UsageError


@dataclass(frozen=True, slots=True)
class Renamed:
    """The present name of an option.

    Attributes:
        values: values that are written differently too; all others stay as they are.
        note: what a message adds about those values.
    """

    new: str
    values: Mapping[Any, Any] = field(default_factory=dict)
    note: str = ""


RENAMED: Mapping[str, Renamed] = {
    "restarts": Renamed("max_restarts"),
    "elastic": Renamed("min_stages"),
    "go_on": Renamed("auto_resume"),
    "allow": Renamed("allow_change"),
    "read_data": Renamed("data_reader", {"once": "first"}, ", where once is now called first"),
    "init_partial": Renamed("init_strict", {True: False, False: True}),
    "no_init_partial": Renamed("init_strict"),
}
"""By the former name. ``--init-partial`` alone is still accepted, as ``--no-init-strict``."""
_WITHOUT_DEFAULT = "checkpoint_every"
_BATCH_SIZE = re.compile(r"(.*_)?(batch_?size|bsz?)")


def hyphened(name: str) -> str:
    """Return an option's name as messages and tables have it."""
    return name.replace("_", "-")


def written(name: str) -> str:
    """Return an option's name as the command line writes it."""
    return f"--{hyphened(name)}"


def reject_renamed(
    old: str,
    known: Container[str],
    spell: Callable[[str], str],
    assign: Callable[[str, bool], str] | None = None,
    where: str = "",
) -> None:
    """Reject an option given by its former name.

    Args:
        old: the name as it was given, with hyphens or underscores.
        known: the (present) names of the options of the place that it was given to.
        spell: a name as it is written there.
        assign: such a name and its value as they are written there; None for the command line.
        where: what the message begins with.

    Raises:
        UsageError: the option was renamed. On the command line, only if the place has it: elsewhere
            the message also names an option that only the command line has.
    """
    found = RENAMED.get(old.replace("-", "_"))
    if found is None:
        return
    renamed = f"{where}{spell(old)}: this option was renamed"
    if found.new in known:
        use = f"{spell(found.new)}{found.note}"
        if assign and True in found.values:
            now, before = assign(spell(found.new), found.values[True]), assign(spell(old), True)
            use = f"{now} for {before}"
        raise UsageError(f"{renamed}; use {use}")
    if assign:
        use = written(found.new)
        raise UsageError(f"{renamed}, and is only for the command line; use {use}")


def reject_batch_size(
    name: str, known: Container[str], spell: Callable[[str], str], where: str = ""
) -> None:
    """Reject the size of a batch, which is none of the `known` options but the job file's.

    The other arguments are as of :func:`reject_renamed`.

    Raises:
        UsageError: the name is one for the size of a batch, in a place of a job's options.
    """
    if "microbatches" in known and _BATCH_SIZE.fullmatch(name.replace("-", "_")):
        raise UsageError(
            f"{where}{spell(name)}: no such option; the batch is what data() yields: change it "
            f"there ({spell('microbatches')} only divides it)"
        )


def migrated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded options, with values as JSON has them, under their present names."""
    found = {}
    for name, value in options.items():
        if name == _WITHOUT_DEFAULT and value is None:
            continue
        if renamed := RENAMED.get(name):
            if isinstance(value, (str, bool)):  # others have no hash, or equal a bool
                value = renamed.values.get(value, value)
            name = renamed.new
        found[name] = value
    return found
