"""Options that had another name before, and what each is called now.

Every place where an option is named reads this one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


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


def renamed_error(
    old: str,
    known: Callable[[str], bool],
    spell: Callable[[str], str],
    assign: Callable[[str, bool], str] | None = None,
    *,
    elsewhere: bool = False,
) -> str:
    """Return the message for an option given by its former name, or "" if `old` is none.

    Args:
        old: the name as it was given, with hyphens or underscores.
        known: whether the place that it was given to has an option of this (present) name.
        spell: a name as it is written there.
        assign: a name and its value as they are written there, if values are.
        elsewhere: also return a message for an option that only the command line has.
    """
    found = RENAMED.get(old.replace("-", "_"))
    if found is None:
        return ""
    if known(found.new):
        use = f"{spell(found.new)}{found.note}"
        if assign and True in found.values:
            use = f"{assign(found.new, found.values[True])} for {assign(old, True)}"
        return f"{spell(old)}: this option was renamed; use {use}"
    option = f"--{found.new.replace('_', '-')}"
    only = f"{spell(old)}: this option was renamed, and is only for the command line; use {option}"
    return only if elsewhere else ""


def migrated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded options, with values as JSON has them, under their present names."""
    found = {}
    for name, value in options.items():
        if renamed := RENAMED.get(name):
            if isinstance(value, (str, bool)):  # others have no hash, or equal a bool
                value = renamed.values.get(value, value)
            name = renamed.new
        found[name] = value
    return found
