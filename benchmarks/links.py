"""Links between two processes of this host: shared memory, gloo and TLS, over loopback.

Throughput: one process sends a tensor repeatedly; the other has as many receives posted as a
channel has (four), and posts another as each arrives. The receiver measures the time from the first
arrival to the last, which excludes connecting and warming up. Latency: half of the median round
trip of 1 KB over two links. The kinds of links alternate, in several rounds on the same links; the
benchmark prints medians and their ratio to gloo.

    python benchmarks/links.py [--rounds 5] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import statistics
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import torch

from pipeworker.coordinator.store import KeyValueStore
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.store import StoreRequest
from pipeworker.worker.transport.connect import connect
from pipeworker.worker.transport.handshake import Membership
from pipeworker.worker.transport.links import unix
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.network import CoordinatorStore, Network

FORTH, BACK = Edge(0, 1, Payload.ACTIVATION), Edge(1, 0, Payload.GRADIENT)
KINDS = {"shared memory": "auto", "gloo": "gloo", "tls": "tls"}
SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20}
AHEAD = 4
PINGS = 500


def links(kind: str, rank: int, ask: Any, member: Membership) -> dict[Edge, Link]:
    identity = unix.host_identity
    if kind == "tls":  # as if on two hosts
        unix.host_identity = lambda: f"host {rank}"
    store = CoordinatorStore(ask)
    try:
        return connect(
            *([FORTH, BACK], rank, Placement.identity(2), store),
            *(Network("tcp://127.0.0.1:1", KINDS[kind]), member),
        )
    finally:
        unix.host_identity = identity


def stream_out(link: Link, size: int, count: int) -> None:
    tensor = torch.ones(size, dtype=torch.uint8)
    pending: deque[Any] = deque()
    for _ in range(count):
        if len(pending) == AHEAD:
            pending.popleft().wait()
        pending.append(link.bulk.send(tensor, 0))
    for one in pending:
        one.wait()


def stream_in(link: Link, size: int, count: int) -> float:
    """Receive messages; return bytes a second."""
    buffers = [link.bulk.allocate(size)[:size] for _ in range(AHEAD)]
    posted = deque(link.bulk.receive([buffer], 0)[0] for buffer in buffers[:count])
    began = 0.0
    for number in range(count):
        posted.popleft().wait()
        began = began or time.perf_counter()
        if number + AHEAD < count:
            posted += link.bulk.receive([buffers[number % AHEAD]], 0)
    return (count - 1) * size / (time.perf_counter() - began)


def pings(made: dict[Edge, Link], out: Edge, back: Edge, *, first: bool) -> float:
    """Exchange messages; return microseconds one way."""
    tensor, got = torch.ones(1024, dtype=torch.uint8), made[back].bulk.allocate(1024)[:1024]
    took = []
    for _ in range(PINGS):
        began = time.perf_counter()
        (receiving,) = made[back].bulk.receive([got], 0)
        if first:
            made[out].bulk.send(tensor, 0).wait()
        receiving.wait()
        if not first:
            made[out].bulk.send(tensor, 0).wait()
        took.append(time.perf_counter() - began)
    return 1e6 * statistics.median(took) / 2


def source(questions: Connection, orders: Connection, member: Membership) -> None:
    torch.set_num_threads(1)
    made = {kind: links(kind, 0, asking(questions), member) for kind in KINDS}
    while (order := orders.recv()) is not None:
        kind, size, count = order
        if size:
            stream_out(made[kind][FORTH], size, count)
        else:
            pings(made[kind], FORTH, BACK, first=True)
    for kind in KINDS:
        for link in made[kind].values():
            link.close()


def asking(questions: Connection) -> Any:
    def ask(*question: Any) -> Any:
        questions.send(question)
        return questions.recv()

    return ask


def coordinate(ends: list[Connection]) -> None:
    """Perform the store's operations for both processes until both have closed."""
    rendezvous = KeyValueStore()
    while ends:
        for end in multiprocessing.connection.wait(ends):
            assert isinstance(end, Connection)
            try:
                operation, keys, *more = end.recv()
            except EOFError:
                ends.remove(end)
                continue
            request = StoreRequest(0, 1, operation, keys, *more[:1])
            for peer, reply in rendezvous.handle(str(end.fileno()).encode(), request):
                next(e for e in ends if str(e.fileno()).encode() == peer).send(reply)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="about, of one measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    member = Membership(secrets.token_hex(16), 1)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(3)]
    (own, store_a), (other_end, store_b), (orders, received_orders) = pipes
    server = context.Process(target=coordinate, args=([store_a, store_b],), daemon=True)
    other = context.Process(target=source, args=(other_end, received_orders, member), daemon=True)
    server.start()
    other.start()
    made = {kind: links(kind, 1, asking(own), member) for kind in KINDS}

    figures: dict[tuple[str, str], list[float]] = {}
    for number in range(arguments.rounds + 1):
        for kind in KINDS:
            for name, size in SIZES.items():
                count = max(8, int(arguments.seconds * 1e9 / size))
                orders.send((kind, size, count))
                figure = stream_in(made[kind][FORTH], size, count)
                if number:  # the first round warms up
                    figures.setdefault((kind, name), []).append(figure / 1e9)
            orders.send((kind, 0, 0))
            took = pings(made[kind], BACK, FORTH, first=False)
            if number:
                figures.setdefault((kind, "latency"), []).append(took)
    orders.send(None)
    other.join()

    print(f"{'':14}" + "".join(f"{name:>22}" for name in (*SIZES, "1 KB")))
    for kind in KINDS:
        row = []
        for name in (*SIZES, "latency"):
            figure, gloo = (statistics.median(figures[k, name]) for k in (kind, "gloo"))
            unit = "us" if name == "latency" else "GB/s"
            row.append(f"{figure:8.2f} {unit:4} ({figure / gloo:4.2f})")
        print(f"{kind:14}" + "".join(f"{text:>22}" for text in row))


if __name__ == "__main__":
    main()
