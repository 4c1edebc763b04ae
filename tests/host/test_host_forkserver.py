"""The agent of a host."""

from __future__ import annotations

import socket

from pipeworker.host.forkserver import _ForkServer
from pipeworker.wire.lines import Fork


def asked(endpoint: str, generation: int = 1, local_rank: int = 0) -> Fork:
    return Fork(3, generation, endpoint, "token", local_rank, 1, ())


def test_a_host_that_does_not_reach_the_coordinator_says_so_at_first() -> None:
    """Its workers would wait for it. Later the way may be out for a while."""
    agent, own = (_ForkServer(carried=carried) for carried in (True, False))
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert agent._out_of_reach(asked(endpoint)) == ""
    said = f"{socket.gethostname()} cannot reach the coordinator at {endpoint}: Connection refused"
    assert agent._out_of_reach(asked(endpoint)).startswith(said)
    assert agent._out_of_reach(asked(endpoint, generation=2)) == ""
    assert agent._out_of_reach(asked(endpoint, local_rank=1)) == ""
    assert own._out_of_reach(asked(endpoint)) == ""
