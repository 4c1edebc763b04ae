"""Ports that are reserved for the processes of a test."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def reserve_port(during: ExitStack) -> int:
    """Return a port of this host that the kernel assigns to no other socket until `during` closes.

    A process that binds it by number, with SO_REUSEADDR, succeeds. A port that is found free and
    released can be anybody's by then.
    """
    holder = during.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    return port
