"""Links over real gloo connections, met through a rendezvous in this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from pipeworker.errors import PeerLost, UsageError
from pipeworker.plan import orders
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import between
from pipeworker.plan.schedule import edges as edges_of
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.connect import End, check_backend, choose, connect
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.network import Network
from support.device import LateDevice
from support.jobs import Jobs
from support.nccl import NcclDevice
from support.transport import BACK, ENDPOINT, FORTH, MEMBERSHIP, Meeting, connect_all

TWO = Placement.identity(2)
BACKENDS = ["auto", "gloo", "tls"]
"""Shared memory, as both ends are on one host, and sockets, bare or encrypted."""


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> tuple[Link, Link]:
    """Both ends of one edge."""
    source, target = connect_all((FORTH,), 2, request.param)
    return source[FORTH], target[FORTH]


@pytest.mark.parametrize("prefix", ["", "prefixed"])
def test_the_store_does_what_a_store_does(prefix: str) -> None:
    meeting = Meeting()
    stores = [meeting.store(), meeting.store()]  # a prefix does not keep the Python object alive
    mine, yours = [PrefixStore(prefix, store) if prefix else store for store in stores]
    mine.set("a", "1")
    mine.set("b", cast("str", b"\0\xff"))  # torch says bytes as well
    assert (yours.get("a"), yours.get("b")) == (b"1", b"\0\xff")
    assert [mine.add("n", 2), yours.add("n", 3)] == [2, 5]
    assert yours.check(["a", "b"])
    assert not yours.check(["a", "missing"])
    assert mine.compare_set("a", "1", "2") == b"2"
    assert yours.compare_set("a", "1", "3") == b"2"
    mine.wait(["a", "b"])


def test_a_deleted_key_is_gone() -> None:
    store = Meeting().store()
    store.set("a", "1")
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])


def test_getting_waits_until_the_key_is_set() -> None:
    meeting = Meeting()
    reader, writer = meeting.store(), meeting.store()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(reader.get, "late")
        writer.set("other", "1")
        writer.set("late", "2")
        assert got.result(20) == b"2"


def test_no_default_process_group_is_made(pair: tuple[Link, Link]) -> None:
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_edge_of_a_pipeline_is_connected(backend: str) -> None:
    edges = edges_of(orders.build("gpipe", 4, 2, "always"))
    links = connect_all(edges, 4, backend)
    assert len(edges) == 7  # three forth, three back, one for targets
    for number, edge in enumerate(edges):
        got = torch.empty(3)
        receiving = links[edge.target][edge].bulk.receive([got], 0)[0]
        links[edge.source][edge].bulk.send(torch.full((3,), float(number)), 0).wait()
        receiving.wait()
        assert got.tolist() == [float(number)] * 3


def test_an_interface_that_leads_to_no_other_host_is_said() -> None:
    """Rather than tried, until the other end has waited long enough."""
    store = Meeting().store()
    store.set("host/1", "another host")
    with pytest.raises(UsageError, match="--interface lo: other hosts of this job cannot"):
        connect([FORTH], 0, TWO, store, Network(ENDPOINT, interface="lo"), MEMBERSHIP)


def test_values_over_a_channel(pair: tuple[Link, Link]) -> None:
    source, target = pair
    courier = Courier()
    sender, receiver = Sender(source, 4, courier), Receiver(target, 4)

    def value(step: int, m: int) -> Any:
        rows = 1 << 15 if m == 1 else 2 + (step == 2) * m  # one is large; a shape changes
        x = torch.full((rows, 3), 10.0 * step + m)
        return {"x": x.t(), "again": x, "mask": x[:, :1].expand(rows, 4) > 0, "n": step // 3}

    for step in range(5):
        sender.begin(0)
        receiver.begin(0, range(3))
        for m in range(3):
            sent = value(step, m)
            sender.send(m, sent)
            got = receiver.receive(m)
            assert got.keys() == sent.keys()
            assert got["n"] == sent["n"]
            for key in ("x", "again", "mask"):
                assert torch.equal(got[key], sent[key])
                assert got[key].stride() == sent[key].stride()
            del got
            receiver.release(m)
    sender.flush()
    courier.close()


def test_stages_of_one_worker_and_replicas_are_connected_by_where_they_are() -> None:
    """Edges name stages; who connects is the rank that holds them, within its replica."""
    placement = Placement(((0, 3), (1, 2)), replicas=2)
    edges = [FORTH, BACK, Edge(2, 3, Payload.ACTIVATION)]
    meeting = Meeting()
    stores = [meeting.store() for _ in range(4)]
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
def test_a_stage_is_connected_to_its_like_in_other_replicas(backend: str) -> None:
    """Both ways, beside what is within a replica; all workers go through the edges in one order."""
    placement = Placement.identity(2, 3)
    edges = [[*between(placement), FORTH] for _ in range(6)]
    meeting = Meeting()
    stores = [meeting.store() for _ in range(6)]
    network = Network(ENDPOINT, backend)
    with ThreadPoolExecutor(6) as pool:
        made = []
        for rank, store in enumerate(stores):
            stage, replica = rank % 2, rank // 2
            mine = sorted(
                edge
                for edge in edges[rank]
                if stage in (edge.source, edge.target)
                and (edge.origin < 0 or replica in (edge.origin, edge.goal))
            )
            assert len(mine) == 5
            made.append(pool.submit(connect, mine, rank, placement, store, network, MEMBERSHIP))
        links = [future.result(20) for future in made]
    for edge in between(placement):
        source = links[placement.rank_of(edge.source, edge.origin)][edge]
        target = links[placement.rank_of(edge.target, edge.goal)][edge]
        said = float(10 * edge.origin + edge.goal)
        got = torch.empty(2)
        receiving = target.bulk.receive([got], 0)[0]
        source.bulk.send(torch.full((2,), said), 0).wait()
        receiving.wait()
        assert got.tolist() == [said, said]
    for some in links:
        for link in some.values():
            link.close()


# What connects two workers.

HERE, BESIDE, FAR = End("a", "cuda", "gpu-1"), End("a", "cuda", "gpu-2"), End("b", "cuda", "gpu-1")


@pytest.mark.parametrize(
    ("mine", "theirs", "backend", "means"),
    [
        (HERE, BESIDE, "auto", ("shared", "mapped")),
        (HERE, HERE, "auto", ("shared", "mapped")),
        (HERE, FAR, "auto", ("gloo", "nccl")),
        (End("a"), End("a"), "auto", ("shared", "")),
        (End("a"), End("b"), "auto", ("gloo", "")),
        (HERE, End("a"), "auto", ("shared", "")),
        (HERE, End("b", "cuda"), "auto", ("gloo", "")),
        (HERE, End("a", "posix", "gpu-2"), "auto", ("shared", "")),
        (HERE, BESIDE, "tls", ("shared", "mapped")),
        (HERE, FAR, "tls", ("tls", "")),
        (HERE, BESIDE, "gloo", ("gloo", "")),
        (HERE, FAR, "gloo", ("gloo", "")),
        (HERE, BESIDE, "nccl", ("shared", "nccl")),
        (HERE, FAR, "nccl", ("gloo", "nccl")),
    ],
)
def test_each_edge_has_the_best_of_what_both_ends_have(
    mine: End, theirs: End, backend: str, means: tuple[str, str]
) -> None:
    assert choose(FORTH, mine, theirs, backend) == means
    assert choose(FORTH, theirs, mine, backend) == means
    for payload in (Payload.TARGET, Payload.DATA):
        assert choose(Edge(0, 1, payload), mine, theirs, backend) == (means[0], "")
    for end in (mine, theirs):
        assert End.heard(end.said()) == end


def test_a_backend_is_refused_that_the_device_does_not_have() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    for backend in ("auto", "gloo", "tls"):
        check_backend(backend, cpu, None)
    check_backend("nccl", cuda, NcclDevice())
    with pytest.raises(UsageError, match="nccl needs CUDA devices, and stages compute on cpu"):
        check_backend("nccl", cpu, None)
    with pytest.raises(UsageError, match="this torch is built without NCCL; use --backend auto"):
        check_backend("nccl", cuda, LateDevice())


def test_the_interface_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
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
    from pipeworker.worker.transport.links import shared
    from pipeworker.worker.transport.network import CoordinatorStore, Network
    from pipeworker.worker.transport.proof import Membership

    address, endpoint, backend, token = sys.argv[1:]
    if backend == "tls":
        shared.host_identity = lambda: "another host"
    forth, back = Edge(0, 1, Payload.ACTIVATION), Edge(1, 0, Payload.GRADIENT)
    with Client(address) as questions:

        def ask(*question):
            questions.send(question)
            return questions.recv()

        placement = Placement.identity(2)
        store, member = CoordinatorStore(ask), Membership(token, 1)
        network = Network(endpoint, backend)
        links = connect([forth, back], 1, placement, store, network, member)
        tensor = torch.empty(4)
        links[forth].bulk.receive([tensor], 0)[0].wait()
        links[back].bulk.send(tensor * 2, 0).wait()
        questions.send(None)
        signal.pause()
"""
"""Stage 1 in a process of its own: answers one tensor, then holds still."""


@pytest.fixture(params=BACKENDS)
def neighbour(
    request: pytest.FixtureRequest, jobs: Jobs
) -> Iterator[tuple[dict[Edge, Link], Callable[[], None]]]:
    """Links to a process, and how to kill it."""
    address = str(jobs.folder / "questions")
    script = jobs.write(NEIGHBOUR, "neighbour.py")
    meeting = Meeting()
    ask = meeting.ask()
    answered = threading.Event()
    with Listener(address) as listener:

        def answer() -> None:
            with listener.accept() as questions:
                while (question := questions.recv()) is not None:
                    questions.send(ask(*question))
                answered.set()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        words = (address, ENDPOINT, request.param, MEMBERSHIP.token)
        process = jobs.python(str(script), *words)
        store = meeting.store()
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


def test_a_killed_peer_ends_a_wait_and_all_that_follows(
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
