"""A worker's connection to the coordinator, which a second one can replace.

TCP retries at growing intervals while packets are lost. On a line that is interrupted again and
again, a connection may therefore be silent for much longer than any interruption. A new connection
starts with short intervals. The first one stays open until the second one is authenticated: its end
would look like the loss of the worker.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from pipeworker.timings import Timings
from pipeworker.wire import sockets

_EVENTS = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH

Socket = zmq.Socket[bytes]


class Connection:
    """A connection to the coordinator, whose sockets are registered with a poller.

    Attributes:
        socket: sends and receives messages; replaced when a second connection takes its place.
    """

    def __init__(
        self, context: zmq.Context[Socket], token: str, endpoint: str, timings: Timings
    ) -> None:
        self._context, self._token, self._endpoint = context, token, endpoint
        self._timings = timings
        # The coordinator knows a peer by its identity, which all its connections share.
        self._identity = b"w" + secrets.token_bytes(8)
        self._second: Socket | None = None
        self.poller = zmq.Poller()
        self.socket = self._open(brief=False)
        self.poller.register(self.socket, zmq.POLLIN)

    def open_second(self) -> None:
        """Begin to open a second connection, unless this is under way."""
        if self._second is None:
            with suppress(zmq.ZMQError):  # too few descriptors: the caller will try again
                self._second = self._open(brief=True)

    def read_event(self, ready: dict[Socket | int, int]) -> bool | None:
        """Return True if a connection was opened, False if one was closed, None if neither.

        Args:
            ready: the result of polling.
        """
        second = self._second
        if second and second.get_monitor_socket() in ready and _read(second):
            self._close(self.socket, linger=0)
            self.socket, self._second = second, None
            self.poller.register(second, zmq.POLLIN)
            return True
        if self.socket.get_monitor_socket() in ready:
            return _read(self.socket)
        return None

    def close(self, *, deliver: bool) -> None:
        """Close the sockets; with `deliver`, the context delivers the last messages."""
        if self._second:
            self._close(self._second, linger=0)
        self._close(self.socket, linger=None if deliver else 0)

    @property
    def has_event(self) -> bool:
        """Whether the connection was opened or closed since the last event that was read."""
        return bool(self.socket.get_monitor_socket().poll(0))

    def _open(self, *, brief: bool) -> Socket:
        socket = sockets.client(
            self._context,
            self._token,
            self._endpoint,
            self._timings,
            identity=self._identity,
            events=_EVENTS,
            brief=brief,
        )
        self.poller.register(socket.get_monitor_socket(), zmq.POLLIN)
        return socket

    def _close(self, socket: Socket, linger: int | None) -> None:
        monitor = socket.get_monitor_socket()
        for one in (socket, monitor):
            if one in self.poller:
                self.poller.unregister(one)
        socket.disable_monitor()
        monitor.close()
        socket.close(linger=linger)


def _read(socket: Socket) -> bool:
    """Return whether the next event of a socket's monitor is that it was opened."""
    event = recv_monitor_message(socket.get_monitor_socket())["event"]
    return bool(event == zmq.Event.HANDSHAKE_SUCCEEDED)
