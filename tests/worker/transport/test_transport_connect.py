"""Connecting workers: the mechanism of each edge, the store where they meet, and lost peers."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from typing import Any

import pytest
import torch

from pipeworker.errors import PeerLost, UsageError
from pipeworker.host.task_thread import TaskThread
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import edges as edges_of
from pipeworker.plan.schedule import replica_edges
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.connect import Endpoint, check_backend, choose, connect
from pipeworker.worker.transport.links import mapped
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.network import Network
from support.devices.device import LateDevice
from support.devices.mapped import MappedDevice
from support.devices.nccl import NcclDevice
from support.in_process.transport import BACK, ENDPOINT, FORTH, MEMBERSHIP, LocalStore, connect_all
from support.pure.orders import build
from support.real_jobs.jobs import Jobs

TWO = Placement.identity(2)
BACKENDS = ["auto", "gloo", "tls"]
"""Shared memory, since both ends are on one host, and sockets, plain or encrypted."""


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> tuple[Link, Link]:
    """Both ends of one edge."""
    source, target = connect_all((FORTH,), 2, request.param)
    return source[FORTH], target[FORTH]


def test_nothing_is_left_of_an_edge_whose_devices_cannot_be_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def negotiate(connection: socket.socket, *_: object, **__: object) -> None:
        connection.close()
        raise OSError("no device")

    before = threading.active_count()
    monkeypatch.setattr(mapped, "negotiate", negotiate)
    with pytest.raises(PeerLost, match=r"the worker of .* no device"):
        connect_all((FORTH,), 2, devices=[MappedDevice(), MappedDevice()])
    assert threading.active_count() == before


def test_no_default_process_group_is_made(pair: tuple[Link, Link]) -> None:
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_edge_of_a_pipeline_is_connected(backend: str) -> None:
    edges = edges_of(build("gpipe", 4, 2, "always"))
    links = connect_all(edges, 4, backend)
    assert len(edges) == 7  # three forth, three back, one for targets
    for number, edge in enumerate(edges):
        got = torch.empty(3)
        receiving = links[edge.target][edge].bulk.receive([got], 0)[0]
        links[edge.source][edge].bulk.send(torch.full((3,), float(number)), 0).wait()
        receiving.wait()
        assert got.tolist() == [float(number)] * 3


def test_an_interface_that_leads_to_no_other_host_is_an_error() -> None:
    """It is not tried until the other end's timeout."""
    store = LocalStore().store()
    store.set("host/1", "another host")
    with pytest.raises(UsageError, match="--interface lo: other hosts of this job cannot"):
        connect([FORTH], 0, TWO, store, Network(ENDPOINT, interface="lo"), MEMBERSHIP)


def test_values_arrive_over_a_channel(pair: tuple[Link, Link]) -> None:
    source, target = pair
    thread = TaskThread("send")
    sender, receiver = Sender(source, 4, thread), Receiver(target, 4)

    def value(step: int, m: int) -> Any:
        rows = 1 << 15 if m == 1 else 2 + (step == 2) * m  # one is large; a shape changes
        x = torch.full((rows, 3), 10.0 * step + m)
        return {"x": x.t(), "same": x, "mask": x[:, :1].expand(rows, 4) > 0, "n": step // 3}

    for step in range(5):
        sender.begin(0)
        receiver.begin(0, range(3))
        for m in range(3):
            sent = value(step, m)
            sender.send(m, sent)
            got = receiver.receive(m)
            assert got.keys() == sent.keys()
            assert got["n"] == sent["n"]
            for key in ("x", "same", "mask"):
                assert torch.equal(got[key], sent[key])
                assert got[key].stride() == sent[key].stride()
            del got
            receiver.release(m)
    sender.flush()
    thread.close()


def test_edges_connect_the_ranks_that_hold_their_stages() -> None:
    """With several stages a worker, and within each replica."""
    placement = Placement(((0, 3), (1, 2)), replicas=2)
    edges = [FORTH, BACK, Edge(2, 3, Payload.ACTIVATION)]
    local_store = LocalStore()
    stores = [local_store.store() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        made = [
            pool.submit(connect, edges, rank, placement, store, Network(ENDPOINT), MEMBERSHIP)
            for rank, store in enumerate(stores)
        ]
        links = [future.result(20) for future in made]
    for replica in (0, 1):
        for edge in edges:
            source = links[placement.rank_of(edge.source, replica)][edge]
            target = links[placement.rank_of(edge.target, replica)][edge]
            got = torch.empty(2)
            receiving = target.bulk.receive([got], 0)[0]
            source.bulk.send(torch.full((2,), float(replica)), 0).wait()
            receiving.wait()
            assert got.tolist() == [replica, replica]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_stage_is_connected_to_the_same_stage_of_other_replicas(backend: str) -> None:
    """Both ways, in addition to the edges within a replica."""
    placement = Placement.identity(2, 3)
    edges = [[*replica_edges(placement), FORTH] for _ in range(6)]
    local_store = LocalStore()
    stores = [local_store.store() for _ in range(6)]
    network = Network(ENDPOINT, backend)
    with ThreadPoolExecutor(6) as pool:
        made = []
        for rank, store in enumerate(stores):
            stage, replica = rank % 2, rank // 2
            own = sorted(
                edge
                for edge in edges[rank]
                if stage in (edge.source, edge.target)
                and (edge.origin < 0 or replica in (edge.origin, edge.goal))
            )
            assert len(own) == 5
            made.append(pool.submit(connect, own, rank, placement, store, network, MEMBERSHIP))
        links = [future.result(20) for future in made]
    for edge in replica_edges(placement):
        source = links[placement.rank_of(edge.source, edge.origin)][edge]
        target = links[placement.rank_of(edge.target, edge.goal)][edge]
        value = float(10 * edge.origin + edge.goal)
        got = torch.empty(2)
        receiving = target.bulk.receive([got], 0)[0]
        source.bulk.send(torch.full((2,), value), 0).wait()
        receiving.wait()
        assert got.tolist() == [value, value]
    for some in links:
        for link in some.values():
            link.close()


# The choice of mechanisms.

HERE = Endpoint("a", "cuda", "gpu-1")
BESIDE, FAR = Endpoint("a", "cuda", "gpu-2"), Endpoint("b", "cuda", "gpu-1")


@pytest.mark.parametrize(
    ("own", "other", "backend", "mechanisms"),
    [
        (HERE, BESIDE, "auto", ("shared", "mapped")),
        (HERE, HERE, "auto", ("shared", "mapped")),
        (HERE, FAR, "auto", ("gloo", "nccl")),
        (Endpoint("a"), Endpoint("a"), "auto", ("shared", "")),
        (Endpoint("a"), Endpoint("b"), "auto", ("gloo", "")),
        (HERE, Endpoint("a"), "auto", ("shared", "")),
        (HERE, Endpoint("b", "cuda"), "auto", ("gloo", "")),
        (HERE, Endpoint("a", "posix", "gpu-2"), "auto", ("shared", "")),
        (HERE, BESIDE, "tls", ("shared", "mapped")),
        (HERE, FAR, "tls", ("tls", "")),
        (HERE, BESIDE, "gloo", ("gloo", "")),
        (HERE, FAR, "gloo", ("gloo", "")),
        (HERE, BESIDE, "nccl", ("shared", "nccl")),
        (HERE, FAR, "nccl", ("gloo", "nccl")),
    ],
)
def test_each_edge_has_the_best_mechanism_that_both_ends_have(
    own: Endpoint, other: Endpoint, backend: str, mechanisms: tuple[str, str]
) -> None:
    assert choose(FORTH, own, other, backend) == mechanisms
    assert choose(FORTH, other, own, backend) == mechanisms
    for payload in (Payload.TARGET, Payload.DATA):
        assert choose(Edge(0, 1, payload), own, other, backend) == (mechanisms[0], "")
    for end in (own, other):
        assert Endpoint(*"\n".join(end).split("\n")) == end  # as it crosses the store


def test_a_backend_that_the_device_lacks_is_refused() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    for backend in ("auto", "gloo", "tls"):
        check_backend(backend, cpu, None)
    check_backend("nccl", cuda, NcclDevice())
    with pytest.raises(
        UsageError,
        match="nccl: requires CUDA devices, but stages compute on cpu; use --backend auto",
    ):
        check_backend("nccl", cpu, None)
    with pytest.raises(UsageError, match="this torch is built without NCCL; use --backend auto"):
        check_backend("nccl", cuda, LateDevice())


def test_an_interface_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    source, target = connect_all((FORTH,), 2, "gloo")
    got = torch.zeros(1)
    receiving = target[FORTH].bulk.receive([got], 0)[0]
    source[FORTH].bulk.send(torch.ones(1), 0).wait()
    receiving.wait()
    assert got.item() == 1


# A peer that dies.


NEIGHBOUR = """
    import signal, sys
    from multiprocessing.connection import Client

    import torch
    from pipeworker.plan.actions import Edge, Payload
    from pipeworker.plan.placement import Placement
    from pipeworker.worker.transport.connect import connect
    from pipeworker.worker.transport.links import unix
    from pipeworker.worker.transport.network import CoordinatorStore, Network
    from pipeworker.worker.transport.handshake import Membership

    address, endpoint, backend, token = sys.argv[1:]
    if backend == "tls":
        unix.host_identity = lambda: "another host"
    forth, back = Edge(0, 1, Payload.ACTIVATION), Edge(1, 0, Payload.GRADIENT)
    with Client(address) as questions:

        def call(*question):
            questions.send(question)
            return questions.recv()

        placement = Placement.identity(2)
        store, member = CoordinatorStore(call), Membership(token, 1)
        network = Network(endpoint, backend)
        links = connect([forth, back], 1, placement, store, network, member)
        tensor = torch.empty(4)
        links[forth].bulk.receive([tensor], 0)[0].wait()
        links[back].bulk.send(tensor * 2, 0).wait()
        questions.send(None)
        signal.pause()
"""
"""Stage 1 in a process of its own: it doubles one tensor, then does nothing."""


@pytest.fixture(params=BACKENDS)
def neighbour(
    request: pytest.FixtureRequest, jobs: Jobs
) -> Iterator[tuple[dict[Edge, Link], Callable[[], None]]]:
    """Links to a process, and a function that kills it."""
    address = str(jobs.folder / "questions")
    script = jobs.write(NEIGHBOUR, "neighbour.py")
    local_store = LocalStore()
    call = local_store.connect()
    answered = threading.Event()
    with Listener(address) as listener:

        def answer() -> None:
            with listener.accept() as questions:
                while (question := questions.recv()) is not None:
                    questions.send(call(*question))
                answered.set()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        words = (address, ENDPOINT, request.param, MEMBERSHIP.token)
        process = jobs.python(str(script), *words)
        store = local_store.store()
        network = Network(ENDPOINT, request.param)
        links = connect([FORTH, BACK], 0, TWO, store, network, MEMBERSHIP)
        got = torch.empty(4)
        sending = links[FORTH].bulk.send(torch.ones(4), 0)
        links[BACK].bulk.receive([got], 0)[0].wait()
        sending.wait()
        assert got.tolist() == [2.0] * 4
        thread.join(20)
        assert answered.is_set()

    def kill() -> None:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL

    yield links, kill
    process.kill()


def test_a_killed_peer_fails_a_wait_and_all_later_transfers(
    neighbour: tuple[dict[Edge, Link], Callable[[], None]],
) -> None:
    links, kill = neighbour
    receiving = links[BACK].bulk.receive([torch.empty(4)], 0)[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiving.wait)
        kill()
        with pytest.raises(PeerLost, match="the channel 1>0/gradient closed"):
            waiting.result(20)
    with pytest.raises(PeerLost, match="the channel 1>0/gradient closed"):
        links[BACK].bulk.receive([torch.empty(4)], 0)[0].wait()
    with pytest.raises(PeerLost, match="the channel 0>1/activation closed"):
        links[FORTH].bulk.send(torch.ones(4), 0).wait()
