"""A worker's end of the process that reads its data, with real processes."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeworker.facts.failure import Cause
from pipeworker.host.data_readers import DataReaders, ReaderLink, ReadingClock
from pipeworker.host.session_watcher import SessionWatcher
from pipeworker.job.options import Options
from pipeworker.worker.data import reader_process, remote_reader
from pipeworker.worker.data.reader_process import ReaderProcess
from pipeworker.worker.data.reader_requests import Setup, place_of
from pipeworker.worker.data.remote_reader import ReadFailed, RemoteReader, end_reading
from support.real_jobs.jobs import until

JOB = """
    import os, signal, time
    from pathlib import Path
    import torch
    from torch import nn

    HERE = Path(__file__).parent
    DRAWN, IDLE = torch.Generator(), torch.Generator()

    def model():
        return nn.Linear(2, 2)

    def loss(output, target):
        return (output - target).square().mean()

    def optimizer(params):
        return torch.optim.SGD(params)

    def data():
        for number in range(6):
            with (HERE / "reads").open("a") as file:
                print(os.getpid(), number, file=file)
            if number == 0 and (HERE / "detach").exists() and not os.fork():
                os.setsid()
                (HERE / "detach").write_text(str(os.getpid()))
                signal.pause()
            while number == 3 and not (HERE / "go").exists():
                time.sleep(0.01)
            torch.rand(1, generator=DRAWN)
            yield torch.rand(4, 2), torch.full((4, 2), float(number))
"""
DRAWN, IDLE = torch.Generator(), torch.Generator()
"""The generators of the job that the worker has."""


class Host:
    """An agent's processes that read, and workers in the test's process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "job.py").write_text(textwrap.dedent(JOB))
        (folder / "run").mkdir()
        self._watcher = SessionWatcher()
        self._readers = DataReaders(self._watcher, reader_process.run)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            if select.select([self._readers.fileno()], [], [], 0.02)[0]:
                self._readers.start_requested()

    def worker(
        self,
        stall_seconds: float = 60.0,
        answer_seconds: float = 60.0,
        *,
        replica: int = 0,
        replicas: int = 1,
    ) -> RemoteReader:
        """Return the reader of the next worker."""
        link = self.link()
        path = str(self.folder / "job.py")
        options = Options(path, 1, 2, epochs=2, worker_timeout=answer_seconds)
        setup = Setup(options.to_json(), str(self.folder / "run"), 0, replica, replicas)

        def data() -> Iterator[Any]:
            yield pytest.fail("the worker reads itself")

        found: dict[str, Any] = {"microbatches": 2, "seed": 0, "epochs": 2}
        found |= {"replica": replica, "replicas": replicas}
        return RemoteReader(data, link, setup, stall_seconds, answer_seconds, **found)

    def link(self) -> ReaderLink:
        """Return the connections of the next worker."""
        link = self._readers.link(0)
        assert link is not None
        return link

    @property
    def reads(self) -> list[int]:
        """The mini-batches that were read, by all processes."""
        return [number for _, number in self._lines]

    @property
    def pids(self) -> list[int]:
        """The processes that have read, in order."""
        return list(dict.fromkeys(pid for pid, _ in self._lines))

    @property
    def _lines(self) -> list[tuple[int, int]]:
        path = self.folder / "reads"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), int(number)) for pid, number in map(str.split, lines)]

    def go(self) -> None:
        (self.folder / "go").touch()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._readers.kill_all()
        if (detached := self.folder / "detach").exists():
            os.kill(int(detached.read_text()), signal.SIGKILL)
        self._readers.close()
        self._watcher.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def read(worker: RemoteReader) -> torch.Tensor | None:
    """Return the next mini-batch: its random numbers, and its number."""
    found = worker.read()
    if found is None:
        return None
    return torch.cat([torch.cat(found.inputs), torch.cat(found.targets)])


def number_of(batch: torch.Tensor | None) -> int:
    assert batch is not None
    return int(batch[-1, -1])


def read_on(host: Host, number: int, processes: int, **options: Any) -> None:
    """Have the next worker read mini-batch `number`, and check how many processes have read."""
    worker = host.worker(**options)
    worker.restore({"epoch": 0, "read": number})
    assert number_of(read(worker)) == number
    assert len(host.pids) == processes


def test_a_new_worker_gets_what_the_last_one_had_and_nothing_is_read_again(host: Host) -> None:
    host.go()
    first = host.worker()
    batches = [read(first) for _ in range(5)]
    second = host.worker()
    second.restore({"epoch": 0, "read": 2})
    found = [read(second) for _ in range(3)]
    assert all(
        a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(found, batches[2:], strict=True)
    )
    assert place_of(second.position(prefetched=False)) == (0, 5)
    assert place_of(second.position(prefetched=True)) == (0, 4)
    assert [number_of(read(second)) for _ in range(2)] == [5, 0]  # and the next epoch
    assert len(host.pids) == 1
    assert host.reads[:7] == [0, 1, 2, 3, 4, 5, 0]


def test_a_worker_of_another_replica_gets_its_own_micro_batches(host: Host) -> None:
    """With fewer stages the worker of a rank may be of another replica than the one before it."""
    host.go()
    first = host.worker(replica=1, replicas=2)
    batches = [first.read() for _ in range(3)]
    second = host.worker(replica=0, replicas=2)
    second.restore({"epoch": 0, "read": 1})
    found = second.read()
    assert found is not None
    assert batches[1] is not None
    (other,), (own,) = batches[1].inputs, found.inputs
    assert len(own) == len(other) == 2
    assert not torch.equal(own, other)
    assert len(host.pids) == 2


def test_a_process_ends_whose_rank_reads_none_any_more(host: Host) -> None:
    host.go()
    read(host.worker())
    (pid,) = host.pids
    end_reading(host.link())
    until(lambda: "State:\tZ" in Path(f"/proc/{pid}/status").read_text())


def test_what_no_recovery_needs_is_not_kept_and_is_read_again(host: Host) -> None:
    host.go()
    first = host.worker()
    for number in range(5):
        read(first)
        first.note_copy({"epoch": 0, "read": number})
    read(first)
    until(lambda: len(host.reads) == 7)  # memory is freed when the next one is read ahead
    read_on(host, 1, 2)


def test_the_last_mini_batch_of_a_job_is_the_last_that_is_read(host: Host) -> None:
    host.go()
    worker = host.worker()
    worker.expect(3)
    assert [number_of(read(worker)) for _ in range(3)] == [0, 1, 2]
    worker.close()  # it waits for the process, which has nothing left to do
    assert host.reads == [0, 1, 2]


def test_one_mini_batch_is_read_ahead(host: Host) -> None:
    host.go()
    worker = host.worker()
    read(worker)
    until(lambda: host.reads == [0, 1])
    read(worker)
    until(lambda: host.reads == [0, 1, 2])


def test_the_end_of_the_data_stays_the_end(host: Host) -> None:
    host.go()
    worker = host.worker()
    assert [number_of(read(worker)) for _ in range(12)] == [*range(6), *range(6)]
    assert [read(worker) for _ in range(2)] == [None, None]
    assert place_of(worker.position(prefetched=False)) == (1, 6)
    other = host.worker()
    other.restore({"epoch": 1, "read": 5})
    assert number_of(read(other)) == 5
    assert read(other) is None


def test_a_stuck_process_is_replaced(host: Host) -> None:
    first = host.worker()
    for _ in range(3):
        read(first)
    until(lambda: host.reads[-1:] == [3])
    stuck = host.pids[0]
    os.kill(stuck, signal.SIGSTOP)
    host.go()
    read_on(host, 2, 2, stall_seconds=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(stuck, 0)


def test_a_process_that_is_stopped_while_it_reads_is_replaced(host: Host) -> None:
    first = host.worker(answer_seconds=0.5)
    for _ in range(3):
        read(first)
    until(lambda: host.reads[-1:] == [3])
    os.kill(host.pids[0], signal.SIGSTOP)
    with pytest.raises(ReadFailed, match=r"data\(\) has not answered for 0.5 s") as lost:
        read(first)
    assert lost.value.failure.cause is Cause.LOST
    host.go()
    read_on(host, 3, 2, answer_seconds=0.5)


def test_a_process_that_was_suspended_between_two_mini_batches_is_replaced(host: Host) -> None:
    host.go()
    first = host.worker()
    first.expect(1)  # so the process does not read ahead
    read(first)
    (stuck,) = host.pids
    os.kill(stuck, signal.SIGSTOP)
    read_on(host, 1, 2, answer_seconds=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(stuck, 0)


def test_a_process_that_still_reads_is_waited_for(host: Host) -> None:
    first = host.worker(answer_seconds=0.5)
    for _ in range(3):
        read(first)
    until(lambda: host.reads[-1:] == [3])
    log = host.folder / "run" / "logs" / "worker-0.log"
    until(lambda: "in data" in log.read_text())  # the stack of what takes long
    second = host.worker(answer_seconds=0.5)
    threading.Timer(1.5, host.go).start()
    second.restore({"epoch": 0, "read": 3})
    assert number_of(read(second)) == 3
    assert len(host.pids) == 1


def test_a_lost_process_is_a_loss_that_a_job_recovers_from(host: Host) -> None:
    host.go()
    worker = host.worker()
    worker.expect(1)
    read(worker)
    (pid,) = host.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ReadFailed, match=r"the process that reads data\(\) is gone") as lost:
        read(worker)
    assert lost.value.failure.cause is Cause.PEER  # secondary: its agent may be gone


def test_a_request_that_the_system_refuses_is_a_loss(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a socket does in a memory cgroup that is full; the process lives, and has the data."""
    host.go()
    first = host.worker()
    for _ in range(2):
        read(first)
    with monkeypatch.context() as patch:
        patch.setattr(remote_reader, "send", refuse)
        with pytest.raises(ReadFailed, match="cannot be asked: No buffer space available") as lost:
            read(first)
    assert lost.value.failure.cause is Cause.LOST
    read_on(host, 2, 1)


def test_a_connection_that_was_lost_on_the_way_is_no_error() -> None:
    """The system drops the descriptor of a message if the process may open no other."""
    (connection, worker), (control, agent) = socket.socketpair(), socket.socketpair()
    with connection, worker, control:
        with agent:
            agent.sendall(b"\0")
        assert ReaderProcess(connection, control, ReadingClock()).serve() == 1  # the agent is gone


def refuse(*_: object) -> None:
    raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


def test_what_data_has_detached_does_not_hide_the_loss_of_its_process(host: Host) -> None:
    (host.folder / "detach").touch()
    host.go()
    worker = host.worker(stall_seconds=1.0, answer_seconds=1.0)
    worker.expect(1)
    read(worker)
    until((host.folder / "detach").read_text)
    os.kill(host.pids[0], signal.SIGKILL)
    with pytest.raises(ReadFailed, match=r"the process that reads data\(\) is gone"):
        read(worker)


def test_the_first_mini_batch_can_be_peeked_at_by_each_worker(host: Host) -> None:
    host.go()
    first = host.worker()
    peeked = torch.cat(first.peek().inputs)
    batch = read(first)
    assert batch is not None
    assert torch.equal(batch[:4], peeked)
    for _ in range(4):
        read(first)
    second = host.worker()
    assert torch.equal(torch.cat(second.peek().inputs), peeked)
    second.restore({"epoch": 0, "read": 4})
    assert number_of(read(second)) == 4
    assert len(host.pids) == 1


@pytest.mark.parametrize("peeks", [False, True])
def test_generators_have_the_states_of_the_process_only_if_it_draws(
    host: Host, peeks: bool
) -> None:
    for generator in (DRAWN, IDLE):
        generator.manual_seed(1)
    host.go()
    worker = host.worker()
    if peeks:
        worker.peek()
    for _ in range(3):
        torch.rand(1, generator=IDLE)  # as a layer or before_update() does
        worker.read()
    expected = torch.Generator().manual_seed(1)
    for _ in range(3):
        torch.rand(1, generator=expected)
    for generator in (DRAWN, IDLE):
        assert torch.equal(generator.get_state(), expected.get_state())
