"""The command that carries the lines of one agent between the launcher's pipes and Ray's driver."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection

OUT, ERROR, END = range(3)
"""The first byte of a message from the driver: the agent's output, its errors, or its status."""
SIZE = 1 << 16
"""The most bytes of a message."""


def write(descriptor: int, data: bytes) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(descriptor, data) :]


def _forward(connection: Connection) -> None:
    """Send our input to the driver; an empty message is its end."""
    with suppress(OSError):  # the driver is gone, which the other direction reports
        while data := os.read(0, SIZE):
            connection.send_bytes(data)
        connection.send_bytes(b"")


def ignore_signals() -> None:
    """Ignore signals that `ray job stop` sends to all processes: the launcher ends this one."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main() -> int:
    ignore_signals()
    driver, bundle, *line = sys.argv[3:]
    try:
        connection = Client(f"\0{driver}", "AF_UNIX")
        connection.send_bytes(json.dumps({"bundle": int(bundle), "line": line}).encode())
        threading.Thread(target=_forward, args=(connection,), daemon=True).start()
        while True:
            message = connection.recv_bytes()
            if message[0] == END:
                return message[1]
            write(1 if message[0] == OUT else 2, message[1:])
    except BrokenPipeError:  # the launcher is gone
        return 1
    except (EOFError, OSError):
        print("the driver of the job on Ray is gone", file=sys.stderr)
        return 1
