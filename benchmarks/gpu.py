"""Measurements on GPUs: the channel between devices, one stage, and recompute modes.

``channel``
    Two processes, on two GPUs or on one: the rate of 64 MB relative to the device's own copy of the
    same size (target 0.8), and the time of 64 KB in one direction beyond that copy (target 30 us).
    Two processes on one GPU take turns on it, so the same is measured with both ends in one
    process as well, where they share Python's lock instead.
``alone``
    One stage compared with the plain loop over the same micro-batches, in turn: rate (0.99) and
    peak memory (1.01).
``launch``
    The same with layers of no size, which leaves the host's time for an action (60 us).
``trace``
    The part of a step of one stage in which no kernel runs, by torch's profiler, and its longest
    gaps: layers of about 2 ms leave none (target 0.01).
``modes``
    Stages that share a GPU, or have one each, by recompute mode and schedule: time and peak memory
    relative to those of one stage that keeps all activations. There is no peer, because
    torch.distributed.pipelining cannot share a GPU: NCCL rejects it, and gloo sends no tensors of a
    GPU.

``alone``, ``launch`` and ``modes`` run on the CPU as well, without a target.

    python benchmarks/gpu.py channel
    python benchmarks/gpu.py alone [--device cpu] [--width 1024 --layers 24 --precision bf16]
    python benchmarks/gpu.py launch [--device cpu]
    python benchmarks/gpu.py trace [--precision bf16]
    python benchmarks/gpu.py modes [--device cpu] [--stages 1,2,4] [--modes never,always,offload]
        [--schedules gpipe,1f1b,zbv]
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from launches import launched
from links import BACK, FORTH, asking, coordinate
from loop import loop

from pipeworker.plan.actions import Edge
from pipeworker.plan.placement import Placement
from pipeworker.worker.device.accelerator import CudaIpc, Signal, accelerator_for
from pipeworker.worker.transport.connect import connect
from pipeworker.worker.transport.handshake import Membership
from pipeworker.worker.transport.links.mapped import ReceivingLane, SendingLane
from pipeworker.worker.transport.network import CoordinatorStore, Network

AHEAD, FRAMES, PINGS, LARGE, SMALL = 4, 100, 500, 64 << 20, 64 << 10
JOB = """
import sys
import torch
from torch import nn

WIDTH, LAYERS, SAMPLES, TIME = map(int, sys.argv[1:5])

def block():
    if not TIME:
        return nn.Identity() if WIDTH else nn.Linear(1, 1)
    return nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, 0.0, batch_first=True)

def model():
    return [block] * LAYERS

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(params):
    return torch.optim.SGD(params, lr=0.01)

def data():
    x = torch.randn(SAMPLES, TIME, WIDTH) if TIME else torch.ones(SAMPLES, 1)
    while True:
        yield x, x
"""


cuda: Any = torch.cuda  # not all of it has types


def channel() -> None:
    member = Membership(secrets.token_hex(16), 1)
    context = multiprocessing.get_context("spawn")
    (target_store, store_a), (source_store, store_b) = (context.Pipe() for _ in range(2))
    server = context.Process(target=coordinate, args=([store_a, store_b],), daemon=True)
    other = context.Process(target=source, args=(source_store, member), daemon=True)
    server.start()
    other.start()
    device, made = linked(1, target_store, member)
    print(f"{torch.cuda.get_device_name(device)}, {torch.cuda.device_count()} of them")
    measure("two processes", device, made[FORTH].bulk, made[BACK].bulk)
    other.join()

    memory = Within(device)
    sent, received = (within(memory, edge) for edge in (FORTH, BACK))
    thread = threading.Thread(target=send, args=(device, sent[0], received[1]), daemon=True)
    thread.start()
    measure("one process", device, sent[1], received[0])
    thread.join()


def measure(name: str, device: torch.device, receiving: Any, sending: Any) -> None:
    """Print the rate and the latency of a lane's receiving end; ``send`` is at the other one."""
    with cuda.stream(cuda.Stream(device)):
        buffers = [receiving.allocate(LARGE) for _ in range(AHEAD)]
        posted = deque(receiving.receive(buffers, 0))
        began = 0.0
        for number in range(FRAMES):
            posted.popleft().wait()
            if not began:
                torch.cuda.synchronize(device)
                began = time.perf_counter()
            if number + AHEAD < FRAMES:
                posted += receiving.receive([buffers[number % AHEAD]], 0)
        torch.cuda.synchronize(device)
        rate = (FRAMES - 1) * LARGE / (time.perf_counter() - began)
        copies = LARGE / copy_seconds(device, LARGE)
        took = pings(device, receiving, sending, first=False)
        beyond = took - 1e6 * copy_seconds(device, SMALL)
    print(f"{name}: 64 MB {rate / 1e9:.1f} GB/s, {rate / copies:.2f} of the device's copy (0.8)")
    print(f"{name}: 64 KB {beyond:.0f} us beyond the copy (30)")


def source(questions: Connection, member: Membership) -> None:
    device, made = linked(0, questions, member)
    send(device, made[FORTH].bulk, made[BACK].bulk)


def send(device: torch.device, sending: Any, receiving: Any) -> None:
    """Be the other end of ``measure``."""
    with cuda.device(device), cuda.stream(cuda.Stream(device)):
        tensor = torch.ones(LARGE, dtype=torch.uint8, device=device)
        for _ in range(FRAMES):
            sending.send(tensor, 0).wait()
        pings(device, receiving, sending, first=True)
        torch.cuda.synchronize(device)


def linked(rank: int, questions: Connection, member: Membership) -> tuple[torch.device, Any]:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = CoordinatorStore(asking(questions))
    network = Network("tcp://127.0.0.1:1")
    places = ([FORTH, BACK], rank, Placement.identity(2), store, network, member)
    return device, connect(*places, accelerator_for(device))


class Within(CudaIpc):
    """The mapping of memory within one process: handles are numbers of what is shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared: list[Any] = []

    def share(self, memory: torch.Tensor) -> bytes:
        return self._number(memory)

    def map(self, handle: bytes) -> torch.Tensor:
        memory: torch.Tensor = self._shared[int(handle)]
        return memory

    def signal(self) -> tuple[Signal, bytes]:
        event: Signal = cuda.Event()
        return event, self._number(event)

    def signal_of(self, handle: bytes) -> Signal:
        event: Signal = self._shared[int(handle)]
        return event

    def _number(self, shared: Any) -> bytes:
        self._shared.append(shared)
        return str(len(self._shared) - 1).encode()


def within(memory: Within, edge: Edge) -> tuple[Any, Any]:
    """Return the sending and the receiving end of a lane in this process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made: list[Any] = []
    for end, kind in zip(ends, (SendingLane, ReceivingLane), strict=True):
        accelerator = accelerator_for(memory._device)
        assert accelerator
        made.append(kind(edge, end, accelerator, memory))
    return made[0], made[1]


def pings(device: torch.device, receiving: Any, sending: Any, *, first: bool) -> float:
    """Return the microseconds in one direction, until the tensor is on the device."""
    tensor = torch.ones(SMALL, dtype=torch.uint8, device=device)
    got, took = receiving.allocate(SMALL), []
    for _ in range(PINGS):
        began = time.perf_counter()
        (posted,) = receiving.receive([got], 0)
        if first:
            sending.send(tensor, 0).wait()
        posted.wait()
        torch.cuda.current_stream(device).synchronize()
        if not first:
            sending.send(tensor, 0).wait()
        took.append(time.perf_counter() - began)
    return 1e6 * statistics.median(took) / 2


def copy_seconds(device: torch.device, size: int) -> float:
    one, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(20):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        other.copy_(one)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def alone(args: argparse.Namespace, width: int, layers: int, length: int, samples: int) -> None:
    """Measure pipeworker and the plain loop in turn, in separate processes."""
    m, words = args.microbatches, (width, layers, samples, length)
    times: tuple[list[float], list[float]] = ([], [])
    peaks = [0, 0]
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.py")
        job.write_text(JOB)
        for _ in range(args.rounds):
            seconds, (peaks[0],) = trained(args, 1, "never", words, "1f1b")  # as the loop
            times[0].append(seconds)
            took, _, peaks[1] = loop(job, args.steps, m, args.device, args.precision, *words)
            times[1].append(took)
    seconds, plain = map(statistics.median, times)
    print(f"K=1, M={m}, {args.device}: ours {seconds * 1e3:.2f} ms a step, plain {plain * 1e3:.2f}")
    if length:
        print(f"rate {plain / seconds:.3f} (0.99), peak memory {peaks[0] / peaks[1]:.3f} (1.01)")
    else:
        print(f"{1e6 * (seconds - plain) / (2 * m):.0f} us of the host's time for an action (60)")


def trace(args: argparse.Namespace) -> None:
    """Profile three steps of one stage, and print the gaps between its kernels."""
    words = (args.width, args.layers, 4 * args.microbatches, args.length)
    options = f"--stages 1 --steps 12 --microbatches {args.microbatches} --recompute never"
    options += f" --profile 9:11 --device cuda --precision {args.precision}"
    with launched(JOB, options, *words) as run:
        (path,) = (run.path / "profile").glob("worker-0-*.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = sorted(
        (one["ts"], one["ts"] + one["dur"])
        for one in events
        if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    gaps, end = [], kernels[0][1]
    for began, ended in kernels[1:]:
        gaps.append(max(0.0, began - end))
        end = max(end, ended)
    whole = end - kernels[0][0]
    print(f"three steps of {len(kernels)} kernels: {whole / 3e3:.1f} ms each")
    print(f"without a kernel {sum(gaps) / whole:.4f} of the time (0.01)")
    print(f"the longest gaps: {', '.join(f'{gap:.0f}' for gap in sorted(gaps)[-12:])} us")


def modes(args: argparse.Namespace) -> None:
    """Measure each mode with each number of stages, in turn in each round."""
    words = (args.width, args.layers, 4 * args.microbatches, args.length)
    stages = [int(k) for k in args.stages.split(",")]
    schedules, found = args.schedules.split(","), args.modes.split(",")
    cases = [  # one stage has one order
        (k, mode, schedule)
        for k, mode, schedule in product(stages, found, schedules)
        if k > 1 or schedule == schedules[0]
    ]
    times: dict[tuple[int, str, str], list[float]] = {case: [] for case in cases}
    peaks: dict[tuple[int, str, str], list[int]] = {}
    for _ in range(args.rounds):
        for case in cases:
            k, mode, schedule = case
            seconds, peaks[case] = trained(args, k, mode, words, schedule)
            times[case].append(seconds)
            print(*case, f"{seconds:.4f} s, {peaks[case]} bytes", file=sys.stderr)
    print(f"M={args.microbatches}, {args.device}, medians of {args.rounds} rounds")
    for case in cases:
        k, mode, schedule = case
        took = [one / first for one, first in zip(times[case], times[cases[0]], strict=True)]
        print(
            f"K={k} {mode:8} {schedule:8} {statistics.median(times[case]) * 1e3:9.2f} ms a step, "
            f"{statistics.median(took):.3f} of the first; peak memory by worker "
            f"{', '.join(f'{peak >> 20}' for peak in peaks[case])} MiB, the most "
            f"{max(peaks[case]) / max(peaks[cases[0]]):.3f} of the first's"
        )


def trained(
    args: argparse.Namespace,
    stages: int,
    mode: str,
    words: tuple[int, ...],
    schedule: str = "gpipe",
) -> tuple[float, list[int]]:
    """Run pipeworker; return the median seconds of a step, and the peak bytes by worker."""
    options = f"--stages {stages} --steps {args.steps} --microbatches {args.microbatches}"
    options += f" --recompute {mode} --schedule {schedule}"
    options += f" --device {args.device} --precision {args.precision}"
    with launched(JOB, options, *words) as run:
        return run.seconds, run.peaks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("channel", "alone", "launch", "trace", "modes"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24, help="24 of 1024: 300M parameters")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--modes", default="never,always,offload")
    parser.add_argument("--schedules", default="gpipe")
    args = parser.parse_args()
    if (
        args.what in ("channel", "trace") or args.device == "cuda"
    ) and not torch.cuda.is_available():
        raise SystemExit("no GPU on this host: alone, launch and modes run with --device cpu")
    if args.what == "channel":
        channel()
    elif args.what == "trace":
        trace(args)
    elif args.what == "modes":
        modes(args)
    elif args.what == "alone":
        alone(args, args.width, args.layers, args.length, 4 * args.microbatches)
    else:
        args.microbatches = 64
        alone(args, 0, 1, 0, 64)


if __name__ == "__main__":
    main()
