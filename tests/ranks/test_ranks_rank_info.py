"""The rank of a process, its store, and the coordinator's address."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pipeworker.errors import RendezvousError, UsageError
from pipeworker.ranks import rank_info as module
from pipeworker.ranks.rank_info import RankInfo

NAMES = {"first": "127.0.1.1", "second": "10.0.0.2", "10.0.0.1": "10.0.0.1"}
"""Names that resolve to this host; its own is a loopback address, as in Debian's /etc/hosts."""


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> RankInfo:
    """Return rank 0 on a host whose name is a loopback address."""

    def ours(name: str) -> str:
        if name not in NAMES:
            raise OSError("not ours")
        return NAMES[name]

    monkeypatch.setattr(module, "resolve_local", ours)
    monkeypatch.setattr(module, "address_towards", lambda name: "127.0.0.1")
    monkeypatch.setattr("socket.gethostname", lambda: "first")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return RankInfo(0, 2, 0, 1, "first", 29500)


def test_a_loopback_name_is_replaced_by_the_address_that_others_see(first: RankInfo) -> None:
    assert first.coordinator_address(seen=["", "192.0.2.1", "10.0.0.1"]) == "10.0.0.1"
    assert first.coordinator_address() == "127.0.0.1"
    with pytest.raises(UsageError, match="neither first nor the name of rank 0's host, first"):
        first.coordinator_address(seen=["127.0.1.1", "192.0.2.1"])


def test_master_address() -> None:
    assert RankInfo(1, 2, 0, 1, "127.0.0.5", 1).master_address() == "127.0.0.5"
    assert RankInfo(1, 2, 0, 1, "no host", 1).master_address() == ""


def test_a_lost_store_of_torchrun_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torchrun's first agent ends as soon as one of its ranks has reported a mistake."""
    monkeypatch.setattr(module, "timings", lambda: SimpleNamespace(reach=0.1, rendezvous=300.0))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RendezvousError, match="rank 1 cannot meet the others"):
        RankInfo(1, 2, 0, 1, "127.0.0.1", port).open_store()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_a_variable_that_is_no_integer_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**variables, name: "x"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UsageError, match=f"^{name} 'x': must be an integer"):
        RankInfo.from_environment()


def test_a_local_rank_beside_a_process_group_must_be_an_integer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "x")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="LOCAL_RANK 'x': must be an integer"):
            RankInfo.detect()
    finally:
        dist.destroy_process_group()
