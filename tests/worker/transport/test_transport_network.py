"""The store at which workers meet, and the network of their hosts."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from pipeworker.errors import UsageError
from pipeworker.worker.internals import PrefixStore
from pipeworker.worker.transport.network import Network
from support.in_process.transport import ENDPOINT, LocalStore


@pytest.mark.parametrize("prefix", ["", "prefixed"])
def test_the_store_performs_the_operations_of_gloo_and_nccl(prefix: str) -> None:
    local_store = LocalStore()
    stores = [
        local_store.store(),
        local_store.store(),
    ]  # a prefix does not keep the Python object alive
    one, other = [PrefixStore(prefix, store) if prefix else store for store in stores]
    one.set("a", "1")
    one.set("b", cast("str", b"\0\xff"))  # torch passes bytes as well
    assert (other.get("a"), other.get("b")) == (b"1", b"\0\xff")
    assert other.check(["a", "b"])
    assert not other.check(["a", "missing"])
    one.wait(["a", "b"])


def test_get_waits_until_the_key_is_set() -> None:
    local_store = LocalStore()
    reader, writer = local_store.store(), local_store.store()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(reader.get, "late")
        writer.set("other", "1")
        writer.set("late", "2")
        assert got.result(20) == b"2"


def test_an_interface_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the option, else by this host's environment; else the route decides."""
    elsewhere = "tcp://192.0.2.1:1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert Network(elsewhere).own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    assert Network(elsewhere, interface="lo").own_address() == "127.0.0.1"
    words = (
        "GLOO_SOCKET_IFNAME no-such-one: the interface does not exist on "
        f"{socket.gethostname()}; choose one of lo"
    )
    with pytest.raises(UsageError, match=re.escape(words)):
        Network(ENDPOINT).own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert Network(ENDPOINT).own_address() == "127.0.0.1"
