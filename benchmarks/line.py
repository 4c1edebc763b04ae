"""What of a line between two hosts a channel gets, against a bare loop over gloo and iperf3.

Two network namespaces and a veth between them, as root: ``python benchmarks/line.py [1gbit]``. With
a rate, the line is that slow; without one, the two cores are what limits it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

HOSTS, ADDRESSES = ("line-0", "line-1"), ("10.79.0.1", "10.79.0.2")
SIZES = {"64 KB": 64 << 10, "4 MB": 4 << 20, "64 MB": 64 << 20}
STREAMS = (1, 2, 4)
BYTES = 1 << 30
"""That pass for one figure over a line without a rate."""
AHEAD, MICROBATCHES = 4, 8
PORT = 29500


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def make(rate: str) -> None:
    for name in HOSTS:
        ip("netns", "add", name)
    veth = ("link", "add", "line", "type", "veth", "peer", "name", "line")
    ip("-n", HOSTS[0], *veth, "netns", HOSTS[1])
    for name, address in zip(HOSTS, ADDRESSES, strict=True):
        ip("-n", name, "address", "add", f"{address}/24", "dev", "line")
        for link in ("line", "lo"):
            ip("-n", name, "link", "set", link, "up")
        if rate:
            shape = ("rate", rate, "burst", "256kb", "latency", "20ms")
            tc = ("tc", "-n", name, "qdisc", "add", "dev", "line", "root", "tbf")
            subprocess.run([*tc, *shape], check=True)


def iperf(streams: int) -> float:
    """Bytes a second."""
    within = ("ip", "netns", "exec")
    server = subprocess.Popen([*within, HOSTS[1], "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    client = [*within, HOSTS[0], "iperf3", "-c", ADDRESSES[1], "-P", str(streams)]
    line = [*client, "-t", "2", "-J"]
    said = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    server.wait()
    return float(json.loads(said)["end"]["sum_received"]["bits_per_second"]) / 8


def loop(streams: int, size: int, total: int, *, channel: bool) -> float:
    """Bytes a second, as the receiver sees them."""
    what = json.dumps([streams, size, total, channel])
    ends = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, __file__, "end", str(rank), what],
            stdout=subprocess.PIPE,
        )
        for rank, name in enumerate(HOSTS)
    ]
    said = [end.communicate(timeout=300)[0] for end in ends]
    return float(said[1])


def end(rank: int, streams: int, size: int, total: int, channel: bool) -> None:
    """One of two processes: 0 sends."""

    from pipeworker.worker.internals import PrefixStore, ProcessGroupGloo, TCPStore, gloo_options

    store = TCPStore(ADDRESSES[0], PORT, 2, rank == 0, timedelta(seconds=60))
    groups: list[Any] = []
    for number in range(streams):
        device = ProcessGroupGloo.create_device(hostname=ADDRESSES[rank])
        options = gloo_options(device, timedelta(seconds=60))
        groups.append(ProcessGroupGloo(PrefixStore(str(number), store), rank, 2, options))
    count = min(4096, max(8, total // size))
    run = through_channel(groups[0], rank) if channel else partial(bare, groups, rank)
    run(size, MICROBATCHES)
    began = time.perf_counter()
    run(size, count)
    if rank:  # on standard output alone: it is what the parent reads
        print(count * size / (time.perf_counter() - began))
    if rank:
        store.set("done", "")
    else:
        store.wait(["done"])
    sys.stdout.flush()
    os._exit(0)  # a receive for the next header stays posted


def bare(groups: list[Any], rank: int, size: int, count: int) -> None:
    """Each message is cut into as many parts as there are streams."""
    import torch

    part = size // len(groups)
    tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(AHEAD)]
    under_way: deque[list[Any]] = deque()
    for number in range(count):
        if len(under_way) == AHEAD:
            for work in under_way.popleft():
                work.wait()
        parts = tensors[number % AHEAD].split(part)
        pairs = zip(groups, parts, strict=False)
        if rank == 0:
            under_way.append([group.send([p], 1, 0) for group, p in pairs])
        else:
            under_way.append([group.recv([p], 0, 0) for group, p in pairs])
    while under_way:
        for work in under_way.popleft():
            work.wait()


def through_channel(group: Any, rank: int) -> Callable[[int, int], None]:
    """As stages exchange them, so many micro-batches a step."""
    import torch

    from pipeworker.plan.actions import Edge, Payload
    from pipeworker.worker.transport.channel import Receiver, Sender
    from pipeworker.worker.transport.courier import Courier
    from pipeworker.worker.transport.distributed import GroupLink

    cpu = torch.device("cpu")
    link = GroupLink(Edge(0, 1, Payload.ACTIVATION), group, cpu)
    if rank == 0:
        sender = Sender(link, AHEAD, Courier())

        def send(size: int, count: int) -> None:
            tensor = torch.zeros(size, dtype=torch.uint8)
            for _ in range(0, count, MICROBATCHES):
                sender.begin(1)
                for number in range(MICROBATCHES):
                    sender.send(number, tensor)
            sender.flush()

        return send
    receiver = Receiver(link, cpu, AHEAD)

    def receive(size: int, count: int) -> None:
        for _ in range(0, count, MICROBATCHES):
            receiver.begin(1, range(MICROBATCHES))
            for number in range(MICROBATCHES):
                receiver.receive(number)
                receiver.release(number)

    return receive


def main() -> None:
    rate = sys.argv[1] if len(sys.argv) > 1 else ""
    total = BYTES >> 2 if rate else BYTES
    try:
        make(rate)
        line = max(one := iperf(1), several := iperf(4))
        print(f"iperf3: {one / 1e9:.2f} GB/s with one stream, {several / 1e9:.2f} with four")
        for name, size in SIZES.items():
            figures = {f"gloo x{n}": loop(n, size, total, channel=False) for n in STREAMS}
            figures["channel"] = loop(1, size, total, channel=True)
            shares = ", ".join(f"{kind} {got / line:.2f}" for kind, got in figures.items())
            print(f"{name}: {shares} of the line", flush=True)
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "delete", name], check=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["end"]:
        end(int(sys.argv[2]), *json.loads(sys.argv[3]))
    else:
        main()
