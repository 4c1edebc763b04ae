"""Snapshots of a worker's state, and the process that writes them to disk."""

from __future__ import annotations

import errno
import json
import os
import queue
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
from torch import nn

from pipeworker.errors import SnapshotLost
from pipeworker.facts.layer_names import LayerNames
from pipeworker.host import cgroups, lifetime
from pipeworker.record.checkpoint.frozen_weights import header_of
from pipeworker.record.checkpoint.snapshot_buffer import SnapshotBuffer, snapshot_files
from pipeworker.record.checkpoint.snapshot_memory import LacksMemory, SnapshotMemory
from pipeworker.record.checkpoint.stage_state import OptimizerState, StageState
from pipeworker.record.checkpoint.tensor_file import TensorFile
from pipeworker.timings import DEFAULT
from pipeworker.wire.messages.checkpoint import Copy, Save, Saved
from pipeworker.worker.state import snapshot_writer, writer_process
from pipeworker.worker.state.snapshot_writer import SnapshotWriter
from support.devices.device import LateDevice


class WriterOfLayer:
    """A snapshot writer with two memories and one layer, and the messages that it sends."""

    def __init__(self, folder: Path) -> None:
        self.sent: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        self.layer = nn.Linear(64, 64)
        self.memories = [SnapshotMemory(), SnapshotMemory()]
        self.folder = folder
        self.writer = SnapshotWriter(
            0, 1, self.memories, lambda step: folder / str(step), (), self.sent.put
        )

    @property
    def parts(self) -> list[StageState]:
        return [StageState(LayerNames(("0",)), [self.layer], [self.layer.state_dict()])]

    def save(self, step: int) -> Saved:
        """Copy the state and write it, as during a step."""
        self.writer.copy(Copy(step, 0, save=True), self.parts, set(), None)
        self.writer.wait_copied()
        return self.sent.get(timeout=60)

    def copy(self, step: int, slot: int) -> None:
        """Copy the state and wait until the copy is complete."""
        self.writer.copy(Copy(step, slot), self.parts, set(), None)
        self.writer.wait_copied()


@pytest.fixture
def layer_writer(tmp_path: Path) -> Iterator[WriterOfLayer]:
    layer_writer = WriterOfLayer(tmp_path)
    yield layer_writer
    layer_writer.writer.close()
    for memory in layer_writer.memories:
        memory.close()


class ActiveDevice(LateDevice):
    """A late device that also queues the operators of other threads, in the streams they use.

    Attributes:
        entered: the names of these threads and streams.
    """

    entered: list[tuple[str, str]]

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        self.entered.append((threading.current_thread().name, stream.name))
        with super().using(stream), self.active():
            yield


def test_weights_are_copied_behind_their_update_and_beside_the_next_step(
    layer_writer: WriterOfLayer,
) -> None:
    """The host waits for no small tensor, as it would for a bias."""
    layer_writer.layer.register_parameter("bias", None)
    device = ActiveDevice()
    device.entered = []
    writer = SnapshotWriter(
        0, 1, layer_writer.memories, lambda _: layer_writer.folder, (), print, accelerator=device
    )
    device.move([layer_writer.layer])
    own, next_step = device.stream("the user's"), list[str]()
    with device.using(own), torch.no_grad():
        writer.copy(Copy(1, 1), layer_writer.parts, set(), None)  # the first is made at once
        writer.wait_copied()
        layer_writer.layer.weight.fill_(2.0)
        writer.copy(Copy(2, 0), layer_writer.parts, set(), None)
        device.submit(own, lambda: next_step.append("computed"))
        writer.wait_copied()
    assert device.entered[1:] == [("copies", "snapshots")]
    assert not next_step
    weights = TensorFile(snapshot_files(layer_writer.memories[0], 2, 1).model)
    assert torch.equal(weights["0.weight"], torch.full((64, 64), 2.0))
    writer.close()


@pytest.fixture
def late_copies(layer_writer: WriterOfLayer, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event for which the copies made beside a step wait, after a first snapshot."""
    layer_writer.copy(1, 1)
    assert layer_writer.writer.complete[0] == 1
    go_on = threading.Event()
    copies = layer_writer.writer._copies
    submit = copies.submit

    def late(task: Callable[[], None]) -> None:
        assert go_on.wait(20)
        task()

    monkeypatch.setattr(copies, "submit", lambda task: submit(lambda: late(task)))
    return go_on


def test_weights_that_a_forward_has_changed_are_copied_at_once(
    layer_writer: WriterOfLayer, late_copies: threading.Event
) -> None:
    layer, writer = layer_writer.layer, layer_writer.writer
    for step in (2, 3):
        before = layer.weight.detach().clone()
        writer.copy(Copy(step, 0), layer_writer.parts, set(), None)
        with torch.no_grad():
            layer.weight.mul_(0.5)  # a forward of the next step
        assert writer.torn == 2
        late_copies.set()
        writer.wait_copied()
        # The first such forward comes too late for the snapshot: it does not count.
        assert writer.complete[0] == (1 if step == 2 else 3)
        late_copies.clear()
    files = snapshot_files(layer_writer.memories[0], 3, 1)
    assert torch.equal(TensorFile(files.model)["0.weight"], before)


def test_weights_that_forwards_mask_without_a_trace_are_copied_at_once(
    layer_writer: WriterOfLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, writer = layer_writer.layer, layer_writer.writer
    monkeypatch.setattr(writer._copies, "submit", lambda task: pytest.fail("it is copied later"))
    for step in (1, 2):
        before = layer.weight.detach().clone()
        writer.copy(Copy(step, 0), layer_writer.parts, set(), None)
        layer.weight.data.mul_(0.5)  # a forward of the next step
        writer.wait_copied()
        assert writer.complete[0] == step
        files = snapshot_files(layer_writer.memories[0], step, 1)
        assert torch.equal(TensorFile(files.model)["0.weight"], before)


def test_a_snapshot_that_is_not_mirrored_is_given_up_for_the_next_one(
    layer_writer: WriterOfLayer,
) -> None:
    """The coordinator would wait for it, and request no other."""

    class Mirror:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def mirror(self, slot: int, memory: SnapshotMemory, step: int) -> bool:
            """Fail once, as where the connection is reset."""
            self.steps.append(step)
            return len(self.steps) > 1

        def close(self) -> None:
            pass

    mirror: Any = Mirror()
    writer = SnapshotWriter(
        0, 1, layer_writer.memories, lambda _: layer_writer.folder, (), print, mirror=lambda: mirror
    )
    found = []
    for step in (1, 2):
        writer.copy(Copy(step, 0), layer_writer.parts, set(), None)
        writer.wait_copied()
        writer._mirrors.finish()
        found.append((writer.complete[0], writer.torn))
    writer.close()
    assert mirror.steps == [1, 2]
    assert found == [(-1, 1), (2, 1)]


def test_a_checkpoint_whose_weights_a_forward_has_changed_is_none(
    layer_writer: WriterOfLayer, late_copies: threading.Event
) -> None:
    layer_writer.writer.copy(Copy(2, 0, save=True), layer_writer.parts, set(), None)
    with torch.no_grad():
        layer_writer.layer.weight.mul_(0.5)
    late_copies.set()
    saved = layer_writer.sent.get(timeout=60)
    assert (saved.step, saved.files) == (2, ())
    assert "weights in place while they were copied" in saved.error
    layer_writer.writer.wait_copied()
    assert not layer_writer.save(3).error


def test_a_writer_process_that_died_is_replaced_for_the_next_checkpoint(
    layer_writer: WriterOfLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [
        [sys.executable, "-S", "-c", "import sys; sys.stdin.readline()"],
        [sys.executable, "-S", "-c", "print('[[', end='')"],
        lifetime.command("pipeworker.record.checkpoint.snapshot_memory"),
    ]
    monkeypatch.setattr(writer_process, "command", lambda module: commands.pop(0))
    for step in (1, 2):
        saved = layer_writer.save(step)
        assert saved == Saved(
            0, step, error="the process that writes checkpoints is gone", beside=True
        )
    saved = layer_writer.save(3)
    assert (saved.step, saved.error, len(saved.files)) == (3, "", 3)
    written = TensorFile(layer_writer.folder / "3" / saved.files[0].name)
    assert torch.equal(written["0.weight"], layer_writer.layer.weight)
    layer_writer.save(4)
    assert not commands


def test_a_writer_process_that_is_killed_while_it_is_idle_costs_no_checkpoint(
    layer_writer: WriterOfLayer,
) -> None:
    before = {*psutil.Process().children()}
    for step in (1, 2, 3):
        saved = layer_writer.save(step)
        assert (saved.error, len(saved.files)) == ("", 3)
        (process,) = {*psutil.Process().children()} - before
        process.kill()
        process.wait(timeout=60)


def test_a_writer_process_that_stays_stopped_is_killed(
    layer_writer: WriterOfLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    answers = "import json, sys; print(json.dumps([[], str()]), flush=True); sys.stdin.readline()"
    commands = [[sys.executable, "-S", "-c", source] for source in (stops, f"{answers}; {stops}")]
    monkeypatch.setattr(writer_process, "command", lambda module: commands.pop(0))
    monkeypatch.setattr(writer_process, "timings", lambda: DEFAULT.scaled(0.01))
    saved = layer_writer.save(1)
    assert saved == Saved(0, 1, error="the process that writes checkpoints is gone", beside=True)
    layer_writer.save(2)
    layer_writer.writer.close()  # while it is stopped
    assert not commands


def test_a_refused_system_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> NoReturn:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", refuse)
    text = "memfd_create: Function not implemented; allow this system call in the sandbox's filter"
    with pytest.raises(OSError, match=text):
        SnapshotMemory()


BLOCKED = """
import threading
from pipeworker.record.checkpoint import snapshot_memory
snapshot_memory.write_files = lambda *_: threading.Event().wait()
snapshot_memory.main()
"""


@pytest.mark.parametrize(
    "command",
    [
        lifetime.command("pipeworker.record.checkpoint.snapshot_memory"),
        [sys.executable, "-c", BLOCKED],
    ],
    ids=["between files", "in the middle of a file"],
)
def test_a_writer_process_ends_silently_with_its_worker(tmp_path: Path, command: list[str]) -> None:
    memory = SnapshotMemory()
    memory.write(0, header_of({}))
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=memory.handles,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(tmp_path), memory.handles, ["model"] * 3]).encode())
        process.stdin.write(b"\n")
        process.stdin.close()
        process.stdout.close()  # as the system closes it when the worker is killed
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        memory.close()


def test_a_checkpoint_fails_if_its_writer_cannot_be_started(
    layer_writer: WriterOfLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may grant no more processes at that moment."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as refused:
        refused.setattr(subprocess, "Popen", refuse)
        saved = layer_writer.save(1)
    reason = "cannot be started: Resource temporarily unavailable"
    assert saved == Saved(0, 1, error=f"the process that writes checkpoints {reason}", beside=True)
    assert not layer_writer.save(2).error


def test_a_snapshot_in_memory_is_that_of_its_step_or_rejected(
    layer_writer: WriterOfLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_writer.copy(1, 0)
    layer_writer.copy(2, 1)
    shard = snapshot_files(layer_writer.memories[0], 1, 1)
    assert torch.equal(TensorFile(shard.model)["0.weight"], layer_writer.layer.weight)
    with pytest.raises(SnapshotLost, match="the snapshot of step 1 in memory is lost"):
        snapshot_files(layer_writer.memories[1], 1, 1)
    monkeypatch.setattr(
        SnapshotBuffer, "commit", lambda self, step: None
    )  # the worker dies before that
    layer_writer.copy(3, 0)
    with pytest.raises(SnapshotLost, match="the snapshot of step 1 in memory is lost"):
        snapshot_files(layer_writer.memories[0], 1, 1)
    snapshot_files(layer_writer.memories[1], 2, 1)


def test_a_snapshot_that_a_killed_worker_left_unfinished_is_lost(
    layer_writer: WriterOfLayer,
) -> None:
    layer_writer.copy(1, 0)
    memory = layer_writer.memories[0]
    state = memory.paths[2].read_bytes()
    for left in (bytes(len(state)), state[:-1], state[: len(state) // 2] + bytes(9), b"\xff"):
        memory.write(2, left)
        with pytest.raises(SnapshotLost, match="the snapshot of step 1 in memory is lost"):
            snapshot_files(memory, 1, 1)
    memory.write(2, state)
    snapshot_files(memory, 1, 1)


def test_a_part_of_a_generation_with_other_workers_is_rejected(layer_writer: WriterOfLayer) -> None:
    """After a shrink a host may keep the part of a rank that is elsewhere now, of the same step.

    Its layers are others than those of the rank's present part.
    """
    layer_writer.copy(4, 0)
    with pytest.raises(SnapshotLost, match="the snapshot of step 4 in memory is lost"):
        snapshot_files(layer_writer.memories[0], 4, 2)
    snapshot_files(layer_writer.memories[0], 4, 1)


def test_a_slow_disk_delays_neither_copies_nor_steps(
    layer_writer: WriterOfLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]  # until its input is closed
    monkeypatch.setattr(writer_process, "command", lambda module: slow)
    layer_writer.writer.copy(Copy(1, 0, save=True), layer_writer.parts, set(), None)
    layer_writer.writer.wait_copied()
    layer_writer.copy(2, 1)
    assert layer_writer.writer.complete[0] == 2
    assert layer_writer.sent.empty()
    layer_writer.writer.close()  # a slow disk does not delay this either
    assert layer_writer.sent.get().error


def test_snapshots_in_all_slots_take_half_of_the_memory_or_there_are_none(
    layer_writer: WriterOfLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(parameter.nbytes for parameter in layer_writer.layer.parameters())
    available = 4 * size - 1
    monkeypatch.setattr(cgroups, "available_memory", lambda: available)
    monkeypatch.setattr(snapshot_writer, "peak_resident", int)
    layer_writer.copy(1, 0)
    assert (layer_writer.writer.complete[0], layer_writer.writer.lacked_memory) == (-1, True)
    assert not any(memory.size for memory in layer_writer.memories)
    available = 4 * size
    layer_writer.copy(2, 0)
    available -= layer_writer.memories[0].size
    layer_writer.copy(3, 1)
    assert layer_writer.writer.complete[0] == 3


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of this process's files, in memory and on disk, as ``ulimit -f`` does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files_leaves_out_snapshots(
    layer_writer: WriterOfLayer, capfd: pytest.CaptureFixture[str]
) -> None:
    writer, reason = layer_writer.writer, "too little memory is available: File too large\n"
    with files_of_at_most(1000):
        layer_writer.copy(1, 0)
        assert (writer.complete[0], writer.lacked_memory) == (-1, True)
        assert capfd.readouterr()[1] == f"[pipeworker] no snapshot of step 1: {reason}"
        saved = writer.save(Save(1, 0), layer_writer.parts, set(), None)
        assert saved.error.endswith(": cannot be written: File too large")
        assert capfd.readouterr()[1].endswith(f"is written before the next step: {reason}")
    layer_writer.copy(2, 0)
    assert writer.complete[0] == 2
    with files_of_at_most(0):  # there is room for the tensors, but none to complete it
        layer_writer.copy(3, 0)
        assert layer_writer.save(4).error == reason.strip()
    assert writer.complete[0] == 2
    assert not layer_writer.save(5).error


@pytest.mark.parametrize("beside_steps", [True, False])
def test_a_checkpoint_is_written_without_a_copy_where_memory_is_short(
    layer_writer: WriterOfLayer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    beside_steps: bool,
) -> None:
    """The files are the same, byte for byte."""
    writer, folder = layer_writer.writer, layer_writer.folder
    optimizer = torch.optim.Adam(layer_writer.layer.parameters())
    for parameter in layer_writer.layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parts = [replace(part, updates=[OptimizerState(optimizer)]) for part in layer_writer.parts]
    parts[0].layers[0].register_buffer("rows", torch.ones(3, 2).T, persistent=False)
    monkeypatch.setattr(cgroups, "available_memory", lambda: 0)
    if beside_steps:
        writer.copy(Copy(1, 0, save=True), parts, set(), {"at": 3})
        writer.wait_copied()
        saved = layer_writer.sent.get_nowait()
    else:
        saved = writer.save(Save(1, 0), parts, set(), {"at": 3})
    assert (
        "checkpoint of step 1 is written before the next step: too little" in capfd.readouterr()[1]
    )
    assert not any(memory.size for memory in layer_writer.memories)
    direct = {file.name: (folder / "1" / file.name).read_bytes() for file in saved.files}
    monkeypatch.undo()
    again = writer.save(Save(1, 0), parts, set(), {"at": 3})
    assert saved == replace(again, beside=beside_steps)
    assert layer_writer.memories[0].size
    for name, content in direct.items():
        assert (folder / "1" / name).read_bytes() == content, name


def test_memory_that_the_next_step_takes_again_is_not_available(
    layer_writer: WriterOfLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(snapshot_writer, "peak_resident", lambda: 1 << 50)
    layer_writer.copy(1, 0)
    assert layer_writer.writer.lacked_memory


def test_memory_that_the_mirroring_host_lacks_is_reported_as_lacking(tmp_path: Path) -> None:
    """Otherwise nobody would learn that the job has no snapshots."""

    class Mirror:
        def mirror(self, *_: object) -> NoReturn:
            raise LacksMemory

        def close(self) -> None:
            return

    mirror: Any = Mirror()
    with closing(SnapshotMemory()) as memory:
        layer = nn.Linear(2, 2)
        parts = [StageState(LayerNames(("0",)), [layer], [layer.state_dict()])]
        writer = SnapshotWriter(0, 1, [memory], lambda _: tmp_path, (), print, 1, lambda: mirror)
        writer.copy(Copy(1, 0), parts, set(), None)
        writer.wait_copied()
        writer.close()  # the thread that mirrors has ended
        assert (writer.complete[0], writer.lacked_memory) == (-1, True)
