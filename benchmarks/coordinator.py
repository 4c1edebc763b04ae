"""The coordinator's cost of a step: a real coordinator with a simulated job of many workers.

The workers are sockets of this process. They join over CURVE as real ones do, then answer every
RunStep with a frame encoded beforehand, so the measured time is that of the coordinator and the
sockets. There are two figures, each with a target:

- 512 workers: wall seconds from the first StepDone sent to the last Advance received, the median
  over the steps. All workers answer at once, which is the worst case.
- 8 workers: CPU seconds of the coordinator per step, over all its threads. Workers answer one after
  another, as the stages of a pipeline do, so that each message wakes the coordinator.

Run ``python benchmarks/coordinator.py``; the exit status is 1 if a target is missed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from pipeworker.facts.step import Batch
from pipeworker.host.line_process import LineProcess, start_coordinator
from pipeworker.job.options import Options
from pipeworker.wire import codec, sockets
from pipeworker.wire.keys import new_token
from pipeworker.wire.lines import Bound, Configuration, FromCoordinator, ToCoordinator
from pipeworker.wire.messages.directions import Advance, Message
from pipeworker.wire.messages.plan import Built, Described, Plan, Ready
from pipeworker.wire.messages.presence import Hello, Ping, Welcome
from pipeworker.wire.messages.step import StepDone
from pipeworker.wire.reliable_stream import UNNUMBERED, pack

GENERATION = 1
MICROBATCHES = 32
BATCH = Batch(signature=1, samples=64, microbatches=MICROBATCHES, epoch=0)
PING = codec.encode(Ping(), GENERATION).partition(b"Ping")[0] + b"Ping"  # without its fields

STEP_TARGET = 50e-3
CPU_TARGET = 1e-3


@dataclass
class Peers:
    """The simulated workers of a job that has just been sent its first step."""

    sockets: list[zmq.Socket[bytes]]
    coordinator: int
    stages: int
    joining: float
    """Seconds from the first Hello to the first RunStep."""
    bytes: int = 0
    """The size of all frames of the last step."""

    def step(self, step: int, gap: float = 0.0) -> float:
        """Answer RunStep of `step` and return the wall seconds until all have the next command.

        Args:
            step: the step.
            gap: seconds between the answers of two workers.

        Raises:
            zmq.Again: the coordinator does not answer.
        """
        workers = len(self.sockets)
        frames = [_done(rank, step, self.stages, workers) for rank in range(workers)]
        self.bytes = sum(map(len, frames))
        began = time.perf_counter()
        for peer, frame in zip(self.sockets, frames, strict=True):
            peer.send(frame)
            if gap:
                time.sleep(gap)
        for peer in self.sockets:
            self.bytes += len(_answer(peer))
        return time.perf_counter() - began

    def cpu(self) -> float:
        """Return the CPU seconds of the coordinator so far, to the nanosecond (Linux)."""
        tasks = Path(f"/proc/{self.coordinator}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def _done(rank: int, step: int, stages: int, workers: int) -> bytes:
    last = rank % stages == stages - 1
    share = MICROBATCHES * stages // workers  # micro-batches of a replica
    message = StepDone(
        rank,
        step,
        losses=(0.5 / MICROBATCHES,) * share if last else (),
        counts=(),
        squares=(0.25, 1e-18, 1e-35),  # as of any number of parameters
        busy=1e-3,
        learning_rate=0.1,
        peak_memory=1 << 30,
        batch=None if rank % stages else BATCH,
    )
    return _framed(message)


def _framed(message: Message) -> bytes:
    return pack(UNNUMBERED, codec.encode(message, GENERATION))


def _answer(peer: zmq.Socket[bytes]) -> bytes:
    while (data := peer.recv())[8:].startswith(PING):
        pass
    return data[8:]


@contextmanager
def job(stages: int, replicas: int = 1) -> Iterator[Peers]:
    """Start a coordinator process, and join the workers of all stages.

    Args:
        stages: stages of a replica.
        replicas: number of replicas, a divisor of the number of micro-batches.
    """
    token, workers = new_token(), stages * replicas
    options = Options("job.py", stages, MICROBATCHES, recompute="never", replicas=replicas)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * workers + 64)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "logs").mkdir()
        process = start_coordinator()
        process.send(Configuration(options.to_json(), folder, token, "127.0.0.1"))
        peers: list[zmq.Socket[bytes]] = []
        try:
            ((started,), _) = process.receive()
            assert isinstance(started, Bound)
            listener = threading.Thread(target=_listen, args=(process,))
            listener.start()
            for _ in range(workers):
                peers.append(sockets.client(context, token, started.endpoint))
                peers[-1].setsockopt(zmq.RCVTIMEO, 60_000)

            def exchange(kind: type[Message], messages: list[Message]) -> None:
                for peer, message in zip(peers, messages, strict=True):
                    peer.send(_framed(message))
                for peer in peers:
                    answer = codec.decode(_answer(peer))[1]
                    assert isinstance(answer, kind), answer

            ranks, began = range(workers), time.perf_counter()
            exchange(Welcome, [Hello(rank, "localhost", 1000 + rank) for rank in ranks])
            exchange(Plan, [Described(rank, ("Linear",) * stages, ()) for rank in ranks])
            ready: list[Message] = [
                Ready(r, (Built(s, s, ("Linear",), 100),), "cpu", None if s else BATCH)
                for r, s in ((rank, rank % stages) for rank in ranks)
            ]
            exchange(Advance, ready)
            joining = time.perf_counter() - began
            yield Peers(peers, process._process.pid, stages, joining)
        finally:
            context.destroy(linger=0)
            process.close_input()
            listener.join()
            process.wait(5.0)


def _listen(process: LineProcess[ToCoordinator, FromCoordinator]) -> None:
    """Read the coordinator's output to its end, as the launcher does."""
    while process.receive()[1]:
        pass


def step_seconds(stages: int = 512, steps: int = 40) -> float:
    """Return the median wall seconds for handling and answering `stages` StepDone messages."""
    with job(stages) as peers:
        return statistics.median([peers.step(step) for step in range(1, steps + 1)][5:])


def step_cpu(stages: int = 8, steps: int = 200) -> float:
    """Return the mean CPU seconds of the coordinator per step."""
    with job(stages) as peers:
        peers.step(1)
        before = peers.cpu()
        for step in range(2, steps + 2):
            peers.step(step, gap=1e-3)
        return (peers.cpu() - before) / steps


def main() -> int:
    step, cpu = step_seconds(), step_cpu()
    print(f"512 workers: {step * 1e3:6.1f} ms per step        (target {STEP_TARGET * 1e3:g})")
    print(f"  8 workers: {cpu * 1e3:6.2f} ms of CPU per step (target {CPU_TARGET * 1e3:g})")
    return int(step > STEP_TARGET or cpu > CPU_TARGET)


if __name__ == "__main__":
    sys.exit(main())
