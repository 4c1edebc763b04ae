"""Where the coordinator of ranks on several hosts listens."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from pipeworker.errors import NotMet, UsageError
from pipeworker.session import place as module
from pipeworker.session.place import Place

NAMES = {"first": "127.0.1.1", "second": "10.0.0.2", "10.0.0.1": "10.0.0.1"}
"""What is this host's, as Debian's /etc/hosts has its name."""


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Rank 0's, on a host whose name is a loopback's."""

    def ours(name: str) -> str:
        if name not in NAMES:
            raise OSError("not ours")
        return NAMES[name]

    monkeypatch.setattr(module, "ours", ours)
    monkeypatch.setattr(module, "towards", lambda name: "127.0.0.1")
    monkeypatch.setattr("socket.gethostname", lambda: "first")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return Place(0, 2, 0, 1, "first", 29500)


def test_a_name_that_is_a_loopbacks_at_home_is_what_the_others_take_it_for(first: Place) -> None:
    assert first.coordinator_address(False, seen=["", "192.0.2.1", "10.0.0.1"]) == "10.0.0.1"
    assert first.coordinator_address(True) == "127.0.0.1"
    with pytest.raises(UsageError, match="neither first nor the name of rank 0's host, first"):
        first.coordinator_address(False, seen=["127.0.1.1", "192.0.2.1"])


def test_a_name_is_looked_up() -> None:
    assert Place(1, 2, 0, 1, "127.0.0.5", 1).master_address() == "127.0.0.5"
    assert Place(1, 2, 0, 1, "no host", 1).master_address() == ""


def test_a_store_of_torchruns_that_is_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first agent ends as soon as a rank there has said a mistake."""
    monkeypatch.setattr(module, "timings", lambda: SimpleNamespace(reach=0.1, meet=300.0))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NotMet, match="rank 1 cannot meet the others"):
        Place(1, 2, 0, 1, "127.0.0.1", port).store()
