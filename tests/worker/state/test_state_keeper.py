"""Copies of a worker's state, and the process that writes them."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeworker.errors import PipeworkerError
from pipeworker.host import spawn
from pipeworker.record.checkpoint import Album, Part, remembered
from pipeworker.record.memory import Memory
from pipeworker.record.tensors import TensorFile
from pipeworker.wire.messages.checkpoint import Copy, Saved
from pipeworker.worker.state import keeper
from pipeworker.worker.state.keeper import Keeper


class Kept:
    """A keeper with two memories, of a layer; what it sends."""

    def __init__(self, folder: Path) -> None:
        self.sent: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        self.layer = nn.Linear(64, 64)
        self.memories = [Memory(), Memory()]
        self.folder = folder
        self.keeper = Keeper(0, 1, self.memories, lambda step: folder / str(step), self.sent.put)

    @property
    def parts(self) -> list[Part]:
        return [Part(["0"], [self.layer], [self.layer.state_dict()])]

    def save(self, step: int) -> Saved:
        """Copy and write, as beside a step."""
        self.keeper.copy(Copy(step, 0, save=True), self.parts, set(), None)
        self.keeper.settle()
        return self.sent.get(timeout=60)

    def copied(self, step: int, slot: int) -> None:
        """Copy, and wait until it is whole."""
        self.keeper.copy(Copy(step, slot), self.parts, set(), None)
        self.keeper.settle()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.keeper.close()
    for memory in made.memories:
        memory.close()


def test_the_next_checkpoint_has_another_writer_than_one_that_is_gone(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [
        [sys.executable, "-S", "-c", "import sys; sys.stdin.readline()"],
        [sys.executable, "-S", "-c", "print('[[', end='')"],
        spawn.command("pipeworker.record.writer"),
    ]
    monkeypatch.setattr(keeper, "command", lambda module: commands.pop(0))
    for step in (1, 2):
        saved = kept.save(step)
        assert saved == Saved(0, step, error="the process that writes checkpoints is gone")
    saved = kept.save(3)
    assert (saved.step, saved.error, len(saved.files)) == (3, "", 3)
    written = TensorFile(kept.folder / "3" / saved.files[0].name)
    assert torch.equal(written["0.weight"], kept.layer.weight)
    kept.save(4)
    assert not commands


def test_a_copy_in_memory_is_that_of_its_step_or_none(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.copied(1, 0)
    kept.copied(2, 1)
    (shard,) = remembered([kept.memories[0]], 1)
    assert torch.equal(TensorFile(shard.model)["0.weight"], kept.layer.weight)
    with pytest.raises(PipeworkerError, match="the copy of step 1 in memory is gone: go on from"):
        remembered(kept.memories, 1)
    monkeypatch.setattr(Album, "seal", lambda self, step: None)  # the worker dies before that
    kept.copied(3, 0)
    with pytest.raises(PipeworkerError, match="the copy of step 1 in memory is gone"):
        remembered([kept.memories[0]], 1)
    remembered([kept.memories[1]], 2)


def test_a_slow_disk_holds_up_neither_copies_nor_steps(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]  # until it is closed
    monkeypatch.setattr(keeper, "command", lambda module: slow)
    kept.keeper.copy(Copy(1, 0, save=True), kept.parts, set(), None)
    kept.keeper.settle()
    kept.copied(2, 1)
    assert kept.keeper.whole[0] == 2
    assert kept.sent.empty()
    kept.keeper.close()  # nor the end
    assert kept.sent.get().error
