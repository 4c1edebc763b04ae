"""The files of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.facts.limits import check, check_names


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """The name of a file in a checkpoint's folder, its size, and the checksum of its content."""

    name: str
    bytes: int
    crc32: int

    def __post_init__(self) -> None:
        check_names((self.name,), "names of files")
        check("/" not in self.name, "a file in another folder")
        possible = self.bytes >= 0 and 0 <= self.crc32 < 1 << 32
        check(possible, "an impossible size or checksum")
