"""What a message may hold at most, and how it is refused."""

from __future__ import annotations

from pipeworker.errors import ProtocolError

MOST_TYPES = 1 << 14
LONGEST_NAME = 512
LONGEST_TEXT = 1 << 20
LONGEST_VALUE = 1 << 13
MOST_KEYS = 1 << 6
MOST_VERSIONS = 1 << 4
MOST_MICROBATCHES = 1 << 20
MOST_SAMPLES = 1 << 40
MOST_STATUSES = 1 << 8
MOST_NOTES = 1 << 4
"""What a message may hold. Each checks its own ranges where it is made, and so where it is read;
what depends on the job, the coordinator checks."""


def check(holds: bool, what: str) -> None:
    """Raise ProtocolError with `what` when it does not."""
    if not holds:
        raise ProtocolError(what)


def check_names(names: tuple[str, ...], what: str, most: int = MOST_TYPES) -> None:
    """Raise ProtocolError when there are more than `most`, or longer ones than a name may be."""
    if len(names) > most or max(map(len, names), default=0) > LONGEST_NAME:
        raise ProtocolError(f"too many {what}, or too long ones")
