"""Limits of the values in messages, and the checks of them."""

from __future__ import annotations

from pipeworker.errors import ProtocolError

MOST_TYPES = 1 << 14
LONGEST_NAME = 512
LONGEST_PREFIX = 1 << 15
LONGEST_TEXT = 1 << 20
LONGEST_VALUE = 1 << 13
MOST_KEYS = 1 << 6
MOST_VERSIONS = 1 << 4
MOST_MICROBATCHES = 1 << 20
MOST_SAMPLES = 1 << 40
MOST_STATUSES = 1 << 8
MOST_NOTES = 1 << 4
"""Upper limits of numbers, and of the lengths of names, texts and values."""


def check(holds: bool, what: str) -> None:
    """Raise ProtocolError with the message `what` unless `holds`."""
    if not holds:
        raise ProtocolError(what)


def check_names(names: tuple[str, ...], what: str, most: int = MOST_TYPES) -> None:
    """Raise ProtocolError if there are more than `most` names, or one exceeds LONGEST_NAME."""
    possible = len(names) <= most and max(map(len, names), default=0) <= LONGEST_NAME
    check(possible, f"too many {what}, or too long ones")
