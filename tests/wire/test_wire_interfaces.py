"""The addresses of this host."""

from __future__ import annotations

import re
import socket

import pytest

from pipeworker.errors import UsageError
from pipeworker.wire import interfaces


def test_an_interface_has_its_address() -> None:
    assert interfaces.address_of("lo") == "127.0.0.1"
    assert interfaces.own_address(("192.0.2.1", 1), "lo") == "127.0.0.1"
    assert interfaces.towards("127.0.0.1") == "127.0.0.1"
    assert interfaces.named("127.0.0.1") == "lo"
    assert interfaces.named("192.0.2.1") == ""


def test_an_address_is_of_this_host_or_is_not() -> None:
    assert interfaces.ours("127.0.0.1") == interfaces.ours("localhost") == "127.0.0.1"
    with pytest.raises(OSError, match="assign"):
        interfaces.ours("192.0.2.1")


def test_why_nobody_answers_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert interfaces.unreached(endpoint, 5) == ""
    assert interfaces.unreached(endpoint, 5) == "Connection refused"


def test_one_that_is_none_is_said_with_those_there_are() -> None:
    words = f"--interface eth77: that is none on {socket.gethostname()}, which has lo (127.0.0.1)"
    with pytest.raises(UsageError, match=re.escape(words)):
        interfaces.address_of("eth77")


def test_the_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(interfaces.VARIABLE, "eth5")
    assert interfaces.chosen("eth1") == ("eth1", "--interface")
    assert interfaces.chosen(None) == ("eth5", interfaces.VARIABLE)
    monkeypatch.delenv(interfaces.VARIABLE)
    assert interfaces.chosen(None)[0] == ""


@pytest.mark.parametrize(
    ("address", "is_so"),
    [("127.0.0.1", True), ("127.3.0.1", True), ("::1", True), ("localhost", True), ("a", False)],
)
def test_loopback_is_told_by_its_look(address: str, is_so: bool) -> None:
    assert interfaces.is_loopback(address) is is_so
