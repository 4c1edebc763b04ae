"""The key-value store that torch.distributed meets at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pipeworker.wire.messages.limits import LONGEST_VALUE, MOST_KEYS, check, check_names


class StoreOperation(Enum):
    SET = "set"
    GET = "get"
    ADD = "add"
    CHECK = "check"
    COMPARE_SET = "compare_set"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One operation of torch.distributed's rendezvous store; GET waits until every key is set.

    So few keys, and such short values, that every answer fits a frame many times.
    """

    rank: int
    number: int
    operation: StoreOperation
    keys: tuple[str, ...]
    value: bytes = b""
    expected: bytes = b""

    def __post_init__(self) -> None:
        check_names(self.keys, "keys", MOST_KEYS)
        longest = max(len(self.value), len(self.expected))
        check(longest <= LONGEST_VALUE, f"a value of {longest} bytes")


@dataclass(frozen=True, slots=True)
class StoreReply:
    """Answer to a StoreRequest: `values` for GET, the sum or truth as a number otherwise."""

    number: int
    values: tuple[bytes, ...]
    result: int
