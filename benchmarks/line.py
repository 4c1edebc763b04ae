"""The share of a line between two hosts that a channel uses, with a bare loop over gloo and iperf3.

The hosts are two network namespaces with a veth pair between them, so it runs as root:
``python benchmarks/line.py [RATE]``. With a rate (``1gbit``) the line is that slow; without one the
two cores are the limit. ``--delay`` and ``--loss`` make a long line of it; ``--control`` selects
TCP's congestion control.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

HOSTS, ADDRESSES = ("line-0", "line-1"), ("10.79.0.1", "10.79.0.2")
SIZES = {"64 KB": 64 << 10, "4 MB": 4 << 20, "64 MB": 64 << 20}
STREAMS = (1, 2, 4)
AHEAD, MICROBATCHES = 4, 8
LONGEST = 10.0
"""The most seconds that a step's messages may take; larger sizes are left out."""
PORT = 29500
UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}

Way = Callable[[int, int], None]
"""Moves messages at one end, given their size in bytes and their number."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def make(arguments: argparse.Namespace) -> subprocess.Popen[str] | None:
    """Make the hosts and their line; return the process that carries a long line."""
    for name in HOSTS:
        ip("netns", "add", name)
    carrier = None
    if arguments.delay or arguments.loss:
        numbers = (in_bytes(arguments.rate or "100mbit"), arguments.delay / 1000, arguments.loss)
        script = str(Path(__file__).with_name("distance.py"))
        line = [sys.executable, script, *HOSTS, *map(str, numbers)]
        carrier = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert carrier.stdout is not None
        assert carrier.stdout.readline()
    else:
        veth = ("link", "add", "line", "type", "veth", "peer", "name", "line")
        ip("-n", HOSTS[0], *veth, "netns", HOSTS[1])
    for name, address in zip(HOSTS, ADDRESSES, strict=True):
        ip("-n", name, "address", "add", f"{address}/24", "dev", "line")
        for link in ("line", "lo"):
            ip("-n", name, "link", "set", link, "up")
        if arguments.rate and carrier is None:
            shape = ("rate", arguments.rate, "burst", "256kb", "latency", "20ms")
            tc = ("tc", "-n", name, "qdisc", "add", "dev", "line", "root", "tbf")
            subprocess.run([*tc, *shape], check=True)
        if arguments.control:
            setting = f"net.ipv4.tcp_congestion_control={arguments.control}"
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", setting], check=True)
    return carrier


def in_bytes(rate: str) -> float:
    """Return bytes a second of a rate in tc's notation."""
    return float(rate[:-4]) * UNITS[rate[-4:]]


def iperf(streams: int) -> float:
    """Return bytes a second by iperf3."""
    within = ("ip", "netns", "exec")
    server = subprocess.Popen([*within, HOSTS[1], "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    client = [*within, HOSTS[0], "iperf3", "-c", ADDRESSES[1], "-P", str(streams)]
    line = [*client, "-t", "2", "-J"]
    output = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    server.wait()
    return float(json.loads(output)["end"]["sum_received"]["bits_per_second"]) / 8


def loop(arguments: argparse.Namespace, size: int) -> dict[str, float]:
    """Return the median bytes a second of each way of moving messages, at the receiver."""
    settings = json.dumps([size, arguments.rounds, arguments.seconds])
    ends = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, __file__, "end", str(rank), settings],
            stdout=subprocess.PIPE,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        for rank, name in enumerate(HOSTS)
    ]
    outputs = [end.communicate(timeout=900)[0] for end in ends]
    figures: dict[str, list[float]] = json.loads(outputs[1])
    return {name: statistics.median(values) for name, values in figures.items()}


def end(rank: int, size: int, rounds: int, seconds: float) -> None:
    """Run one of the two processes; rank 0 sends."""

    from pipeworker.plan.actions import Edge, Payload
    from pipeworker.worker.internals import PrefixStore, ProcessGroupGloo, TCPStore, gloo_options
    from pipeworker.worker.transport.credentials import Credentials, Login
    from pipeworker.worker.transport.handshake import RendezvousPoint
    from pipeworker.worker.transport.links import tls
    from pipeworker.worker.transport.links.gloo import GroupLink

    patience = timedelta(seconds=600)
    store = TCPStore(ADDRESSES[0], PORT, 2, rank == 0, patience)

    def group(name: str) -> Any:
        device = ProcessGroupGloo.create_device(hostname=ADDRESSES[rank])
        return ProcessGroupGloo(
            PrefixStore(name, store), rank, 2, gloo_options([device], timedelta(seconds=60))
        )

    groups = [group(str(number)) for number in range(max(STREAMS))]
    edge = Edge(0, 1, Payload.ACTIVATION)
    point = RendezvousPoint(store, "tls", time.monotonic() + 60)
    credentials = Credentials.of("the token of a benchmark, which is not secret")
    login = Login(b"not a secret either", credentials)
    over_gloo = GroupLink(edge, group("channel"))
    over_tls = tls.connect(edge, login, point, ADDRESSES[rank], sends=not rank)
    ways: dict[str, Way] = {f"gloo x{n}": partial(bare, groups[:n], rank) for n in STREAMS}
    ways |= {"channel": through_channel(over_gloo, rank), "tls": through_channel(over_tls, rank)}

    def timed(name: str, run: Way, count: int) -> float:
        store.set(f"{name}/{rank}", "")
        store.wait([f"{name}/{1 - rank}"])
        began = time.perf_counter()
        run(size, count)
        return time.perf_counter() - began

    figures: dict[str, list[float]] = {name: [] for name in ways}
    counts = {}
    for name, run in ways.items():
        timed(f"{name}/first", run, MICROBATCHES)
        took = timed(f"{name}/try", run, MICROBATCHES)
        if rank:
            store.set(f"{name}/count", str(max(1, min(512, int(seconds / took)))))
        counts[name] = MICROBATCHES * int(store.get(f"{name}/count"))
    for number in range(rounds):
        for name in ways if number % 2 else reversed(ways):
            took = timed(f"{name}/{number}", ways[name], counts[name])
            figures[name].append(counts[name] * size / took)
    if rank:  # on standard output, which the parent reads
        print(json.dumps(figures))
        store.set("done", "")
    else:
        store.wait(["done"])
    sys.stdout.flush()
    os._exit(0)  # a receive for the next header stays posted


def bare(groups: list[Any], rank: int, size: int, count: int) -> None:
    """Move messages, each cut into as many parts as there are groups."""
    import torch

    tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(AHEAD)]
    pending: deque[list[Any]] = deque()
    for number in range(count):
        if len(pending) == AHEAD:
            for work in pending.popleft():
                work.wait()
        parts = tensors[number % AHEAD].tensor_split(len(groups))
        pairs = zip(groups, parts, strict=True)
        if rank == 0:
            pending.append([group.send([p], 1, 0) for group, p in pairs])
        else:
            pending.append([group.recv([p], 0, 0) for group, p in pairs])
    while pending:
        for work in pending.popleft():
            work.wait()


def through_channel(link: Any, rank: int) -> Way:
    """Return a way that moves messages as stages do, a number of micro-batches a step."""
    import torch

    from pipeworker.host.task_thread import TaskThread
    from pipeworker.worker.transport.channel import Receiver, Sender

    if rank == 0:
        sender = Sender(link, AHEAD, TaskThread("send"))

        def send(size: int, count: int) -> None:
            tensor = torch.zeros(size, dtype=torch.uint8)
            for _ in range(0, count, MICROBATCHES):
                sender.begin(1)
                for number in range(MICROBATCHES):
                    sender.send(number, tensor)
            sender.flush()

        return send
    receiver = Receiver(link, AHEAD)

    def receive(size: int, count: int) -> None:
        for _ in range(0, count, MICROBATCHES):
            receiver.begin(1, range(MICROBATCHES))
            for number in range(MICROBATCHES):
                receiver.receive(number)
                receiver.release(number)

    return receive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rate", nargs="?", default="", help="in tc's notation: 1gbit")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds, each way")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets")
    parser.add_argument("--control", default="", help="TCP's congestion control: cubic, bbr")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one figure of one round")
    arguments = parser.parse_args()
    carrier = None
    try:
        carrier = make(arguments)
        line = max(one := iperf(1), several := iperf(4))
        print(f"iperf3: {one / 1e6:.1f} MB/s with one stream, {several / 1e6:.1f} with four")
        if carrier:
            line = in_bytes(arguments.rate or "100mbit")
        for name, size in SIZES.items():
            if MICROBATCHES * size / line < LONGEST:
                figures = loop(arguments, size)
                shares = ", ".join(f"{kind} {got / line:.2f}" for kind, got in figures.items())
                print(f"{name}: {shares} of the line", flush=True)
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "delete", name], check=False)
        if carrier:
            carrier.kill()
            carrier.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["end"]:
        end(int(sys.argv[2]), *json.loads(sys.argv[3]))
    else:
        main()
