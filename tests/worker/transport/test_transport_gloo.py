"""Links by gloo; test_transport_link.py tests all links."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import PeerLost
from pipeworker.worker.transport.links import gloo
from pipeworker.worker.transport.network import Network
from support.faults.authentication import REJECTED, carries
from support.faults.unauthenticated_peers import UnauthenticatedPeers, listening
from support.in_process.transport import ENDPOINT, FORTH, LocalStore, connect_all
from support.slow import slow

_TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("data", "leaves"),
    [(b"", False), (b"GET / HTTP/1.1\r\n\r\n", False), (b"\xa5" * 500, False), (b"", True)],
    ids=["silent", "sends", "sends more", "leaves"],
)
def test_a_process_that_takes_a_rank_of_a_gloo_group_is_rejected(
    data: bytes,
    leaves: bool,
    short_handshake: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It has every rank of both ends' groups before the two meet."""
    peers = UnauthenticatedPeers(data, leave=leaves)
    real, lock = gloo.create_device, threading.Lock()
    made: list[Any] = []

    def device(network: Network) -> Any:
        with lock:
            before = listening()
            made.append(real(network))
            (port,) = listening() - before
            if len(made) <= 2:
                peers.take_places(port)
        return made[-1]

    monkeypatch.setattr(gloo, "create_device", device)
    source, target = (links[FORTH] for links in connect_all((FORTH,), 2, "gloo"))
    assert carries(source, target)
    assert len(made) >= 4  # each end has left its first port
    received = peers.received()
    peers.close()
    assert len(received) <= 1
    err = capfd.readouterr().err
    assert err.count(REJECTED) >= 2
    assert received or leaves or "Connection" in err  # it had a rank


def test_a_failing_network_is_not_taken_for_an_attack(
    short_handshake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def group(store: Any, network: Network, prefix: str, rank: int, deadline: float) -> Any:
        tried.append(prefix)
        raise RuntimeError("no route to host")

    monkeypatch.setattr(gloo, "create_group", group)
    with pytest.raises(PeerLost, match="no route to host"):
        connect_all((FORTH,), 2, "gloo")
    assert len(tried) == 2 * 3


def test_a_group_has_a_timeout_even_if_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo counts milliseconds, and takes 0 for no timeout."""
    timeouts: list[timedelta] = []

    def options(devices: Any, timeout: timedelta) -> Any:
        timeouts.append(timeout)
        raise RuntimeError("enough")

    monkeypatch.setattr(gloo, "gloo_options", options)
    store, network = LocalStore().store(), Network(ENDPOINT, "gloo")
    for deadline in (0.0, time.monotonic() + 0.003):
        with pytest.raises(RuntimeError, match="enough"):
            gloo.create_group(store, network, "name", 0, deadline)
    assert timeouts == [timedelta(milliseconds=1)] * 2


LATE = """
import sys, threading, time
from support.in_process.transport import ENDPOINT, LocalStore
from pipeworker.worker.transport.links.gloo import create_group
from pipeworker.worker.transport.network import Network

def run(number, rank, late):
    store, network = STORE.store(), Network(ENDPOINT, "gloo")
    create_group(store, network, f"first/{number}", rank, time.monotonic() + 50)
    if late:
        get = store.get
        store.get = lambda key: (get(key), time.sleep(0.6))[0]
    try:
        deadline = time.monotonic() + (1.5 if late else 0.3)
        create_group(store, network, f"second/{number}", rank, deadline)
    except RuntimeError:
        FAILED.append(rank)
    time.sleep(1)

STORE, FAILED = LocalStore(), []
threads = [
    threading.Thread(target=run, args=(number, rank, rank == number % 2))
    for number in range(12) for rank in (0, 1)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(FAILED))
"""


@slow
def test_a_peer_that_comes_after_its_group_failed_does_not_crash_the_worker() -> None:
    """gloo keeps a pointer to the failed pair for as long as the device listens."""
    ran = subprocess.run([sys.executable, "-c", LATE], cwd=_TESTS, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 6  # of 12 that were not waited for
