"""A replica whose state is gone, with the memory of its host, takes that of a living one.

What passes is what a stage would write to disk: three files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pipeworker.errors import PipeworkerError
from pipeworker.record.checkpoint import Album, Part
from pipeworker.record.manifest import Shard
from pipeworker.record.memory import Memory
from pipeworker.worker.step.reduction import Reduction

Files = list[torch.Tensor]
"""As bytes."""


def files_of(part: Part, step: int, position: Mapping[str, Any] | None) -> Files:
    """What a stage would write of its state after `step`; also of tied weights, whoever does."""
    memory = Memory()
    try:
        Album(memory).fill(step, [part], (), position)
        read = [bytearray(path.read_bytes()) for path in memory.paths]
        return [torch.frombuffer(data, dtype=torch.uint8) for data in read]
    finally:
        memory.close()


@contextmanager
def shard_of(files: Sequence[torch.Tensor]) -> Iterator[Shard]:
    """The files, to be read as those of a checkpoint are."""
    memory = Memory()
    try:
        for number, data in enumerate(files):
            memory.put(number, data.cpu().numpy().tobytes())
        yield Shard(*memory.paths)
    finally:
        memory.close()


def exchange(
    reductions: Mapping[int, Reduction], mine: Callable[[int], Files] | None
) -> dict[int, Files]:
    """Tell the other replicas who has the state, and give it to those who have not.

    Args:
        reductions: the channels of this worker's stages.
        mine: gives a stage's files, if somebody lacks them; None where this one does.

    Returns:
        What this worker was given, by stage; nothing where it has its own.

    Raises:
        PipeworkerError: nobody has it.
    """
    given = {}
    for stage, reduction in reductions.items():
        heirs = reduction.tell(has=mine is not None)
        if mine is None:
            found = reduction.inherit()
            if found is None:
                text = f"no replica has the state of stage {stage} in memory: go on from disk"
                raise PipeworkerError(f"{text}, by --resume")
            given[stage] = found
        elif heirs:
            reduction.give(heirs, mine(stage))
    return given
