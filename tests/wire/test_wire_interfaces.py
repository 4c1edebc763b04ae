"""The addresses of this host."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace

import psutil
import pytest

from pipeworker.errors import UsageError
from pipeworker.wire import interfaces


def test_an_interface_has_an_address() -> None:
    assert interfaces.address_of("lo") == "127.0.0.1"
    assert interfaces.own_address(("192.0.2.1", 1), "lo") == "127.0.0.1"
    assert interfaces.address_towards("127.0.0.1") == "127.0.0.1"
    assert interfaces.interface_with("127.0.0.1") == "lo"
    assert interfaces.interface_with("192.0.2.1") == ""


def test_only_an_address_of_this_host_is_local() -> None:
    assert interfaces.resolve_local("127.0.0.1") == "127.0.0.1"
    assert interfaces.resolve_local("localhost") == "127.0.0.1"
    with pytest.raises(OSError, match="assign"):
        interfaces.resolve_local("192.0.2.1")


def test_the_reason_for_a_failed_connection_is_returned() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert interfaces.connection_error(endpoint, 5) == ""
    assert interfaces.connection_error(endpoint, 5) == "Connection refused"


def test_a_silent_host_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    assert interfaces.connection_error("tcp://192.0.2.1:9", 5) == "no answer within 5 s"


def test_the_first_address_that_other_hosts_can_use_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    v4, v6, link = socket.AF_INET, socket.AF_INET6, psutil.AF_LINK
    found: dict[str, list[tuple[int, str]]] = {
        "eth0": [(link, "02:42:ac"), (v6, "fe80::1%eth0"), (v6, "2001:db8::1"), (v4, "192.0.2.1")],
        "eth1": [(v6, "fe80::2%eth1"), (v6, "2001:db8::2")],
        "tap0": [(link, "02:42:ad"), (v6, "fe80::3%tap0")],
    }
    every = {
        name: [SimpleNamespace(family=family, address=address) for family, address in pairs]
        for name, pairs in found.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: every)
    assert interfaces.external_address_of("eth0") == "192.0.2.1"
    assert interfaces.external_address_of("eth1") == "2001:db8::2"
    known = r"eth0 \(192\.0\.2\.1\), eth1 \(2001:db8::2\), tap0 \(no address\)$"
    with pytest.raises(UsageError, match=rf"tap0: the interface has no address .* of {known}"):
        interfaces.external_address_of("tap0")


def test_an_unknown_interface_is_rejected_with_the_known_ones() -> None:
    host = socket.gethostname()
    words = f"--interface eth77: the interface does not exist on {host}; choose one of lo "
    with pytest.raises(UsageError, match=re.escape(words + "(127.0.0.1)")):
        interfaces.address_of("eth77")


def test_a_loopback_interface_does_not_lead_to_other_hosts() -> None:
    with pytest.raises(UsageError, match=r"^--interface lo: other hosts .* cannot reach 127\.0"):
        interfaces.external_address_of("lo")


def test_a_link_local_address_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "address_towards", lambda *_: "fe80::1")
    with pytest.raises(UsageError, match="to fe80::2%eth0 has the link-local address fe80::1"):
        interfaces.own_address(("fe80::2%eth0", 1), None)
    monkeypatch.setattr(interfaces, "address_towards", lambda *_: "2001:db8::1")
    assert interfaces.own_address(("2001:db8::2", 1), None) == "2001:db8::1"


def test_the_option_precedes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(interfaces.VARIABLE, "eth5")
    assert interfaces.configured("eth1") == ("eth1", "--interface")
    assert interfaces.configured(None) == ("eth5", interfaces.VARIABLE)
    monkeypatch.setenv(interfaces.VARIABLE, "eth6,eth7")
    assert interfaces.configured(None) == ("eth6", interfaces.VARIABLE)
    monkeypatch.delenv(interfaces.VARIABLE)
    assert interfaces.configured(None)[0] == ""


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.3.0.1", True), ("::1", True), ("localhost", True), ("a", False)],
)
def test_loopback_addresses_are_recognized(address: str, expected: bool) -> None:
    assert interfaces.is_loopback(address) is expected
