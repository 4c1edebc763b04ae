"""Requests to the key-value store of torch.distributed's rendezvous, and the replies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pipeworker.facts.limits import LONGEST_VALUE, MOST_KEYS, check, check_names


class StoreOperation(Enum):
    """An operation of the store."""

    SET = "set"
    GET = "get"
    CHECK = "check"


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One operation on the store; the reply to GET waits until every key is set.

    Keys are so few, and values so short, that every reply fits into a frame many times.
    """

    rank: int
    number: int
    operation: StoreOperation
    keys: tuple[str, ...]
    value: bytes = b""

    def __post_init__(self) -> None:
        check_names(self.keys, "keys", MOST_KEYS)
        check(len(self.value) <= LONGEST_VALUE, f"a value of {len(self.value)} bytes")


@dataclass(frozen=True, slots=True)
class StoreReply:
    """The reply to the StoreRequest of this number.

    GET has one value per key; `present` is whether all keys of CHECK are set.
    """

    number: int
    values: tuple[bytes, ...] = ()
    present: bool = False
