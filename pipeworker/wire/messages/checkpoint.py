"""Messages about the training state: snapshots in memory, checkpoints, and restoring."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.limits import LONGEST_TEXT, check


@dataclass(frozen=True, slots=True)
class Saved:
    """A worker's part of the checkpoint of `step` is on disk, or cannot be written (`error`).

    Attributes:
        beside: whether a :class:`Copy` requested it, to be written beside the steps.
    """

    rank: int
    step: int
    files: tuple[CheckpointFile, ...] = ()
    error: str = ""
    beside: bool = False

    def __post_init__(self) -> None:
        check(len(self.error) <= LONGEST_TEXT, f"a reason of {len(self.error)} characters")


@dataclass(frozen=True, slots=True)
class Restore:
    """The state after `step`, with which a generation begins.

    Attributes:
        path: of a checkpoint; empty for a snapshot.
        slot: the number of the memory that holds the snapshot.
        ranks: the number of workers of the earlier generation whose memories, one after the other,
            hold the whole state.
    """

    step: int
    path: str = ""
    slot: int = 0
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """A request to copy the state after `step` into the memory `slot` while the next step runs.

    With `save` the copy is also written to disk, as the worker's part of a checkpoint.
    """

    step: int
    slot: int
    save: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """A command: write this worker's part of the checkpoint of `step`, using the memory `slot`."""

    step: int
    slot: int = 0
