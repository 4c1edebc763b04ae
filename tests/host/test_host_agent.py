"""The agent of a host."""

from __future__ import annotations

import socket

from pipeworker.host.agent import unreachable_reason
from pipeworker.wire.lines import Fork


def request(endpoint: str, generation: int = 1, local_rank: int = 0) -> Fork:
    return Fork(3, generation, endpoint, "token", local_rank, 1, ())


def test_the_first_worker_of_a_host_reports_an_unreachable_coordinator() -> None:
    """Later generations wait for it instead, because the network may recover."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert unreachable_reason(request(endpoint)) == ""
    host = socket.gethostname()
    text = f"{host} cannot reach the coordinator at {endpoint}: Connection refused; the hosts"
    assert unreachable_reason(request(endpoint)).startswith(text)
    assert unreachable_reason(request(endpoint, generation=2)) == ""
    assert unreachable_reason(request(endpoint, local_rank=1)) == ""
