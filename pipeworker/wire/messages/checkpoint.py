"""The state: copied, written, and begun with."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.messages.limits import LONGEST_TEXT, check, check_names


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint, its size and the CRC-32 of what is in it."""

    name: str
    bytes: int
    crc32: int

    def __post_init__(self) -> None:
        check_names((self.name,), "names of files")
        check("/" not in self.name, "a file in another folder")
        check(self.bytes >= 0 and 0 <= self.crc32 < 1 << 32, "a file that cannot be")


@dataclass(frozen=True, slots=True)
class Saved:
    """A worker's part of the checkpoint of `step` is on disk; or it is not, for this reason."""

    rank: int
    step: int
    files: tuple[File, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        check(len(self.error) <= LONGEST_TEXT, f"a reason of {len(self.error)} characters")


@dataclass(frozen=True, slots=True)
class Restore:
    """The state that a generation begins with, which is that after `step`.

    Attributes:
        path: of a checkpoint; or, where that is empty,
        slot: of the memories that workers of an earlier generation left behind: `ranks` of them,
            one after the other, have the whole state.
    """

    step: int
    path: str = ""
    slot: int = 0
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the state after `step` into a memory of this worker's, while the next step runs.

    Attributes:
        slot: the number of the memory.
        save: write the copy to disk as well, as the worker's part of a checkpoint.
    """

    step: int
    slot: int
    save: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """Write this worker's part of the checkpoint of `step`, by way of the memory `slot`."""

    step: int
    slot: int = 0
