"""A long-distance line between two network namespaces, for hosts without netem.

The line has a rate, a delay and a loss. It consists of two tun devices and a process that forwards
packets from one to the other after the delay. The process uses one core for some 30,000 packets a
second.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

DEVICE = "line"
_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_BUFFER = 0.05
"""The size of the queue before the line, in seconds at its rate; further packets are lost."""


def device(namespace: str) -> int:
    """Enter a namespace for good, and return the descriptor of a new tun device in it."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    wanted = struct.pack("16sH", DEVICE.encode(), _TUN | _NO_HEADER)
    fcntl.ioctl(descriptor, _TUNSETIFF, wanted)
    return descriptor


def relay(ends: tuple[int, int], rate: float, delay: float, loss: float) -> None:
    """Forward packets until this process is killed.

    Args:
        ends: descriptors of the two devices.
        rate: bytes a second, each way.
        delay: seconds, each way.
        loss: share of packets.
    """
    queues: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    free = [0.0, 0.0]  # when the line can take the next packet
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    while True:
        now = time.monotonic()
        for queue, out in zip(queues, reversed(ends), strict=True):
            while queue and queue[0][0] <= now:
                with suppress(OSError):  # the device is not up yet, or its queue is full
                    os.write(out, queue.popleft()[1])
        due = min((queue[0][0] for queue in queues if queue), default=now + 1)
        poll.poll(max(0, int((due - now) * 1000)))
        for side, (queue, end) in enumerate(zip(queues, ends, strict=True)):
            for _ in range(64):
                try:
                    packet = os.read(end, 1 << 16)
                except BlockingIOError:
                    break
                now = time.monotonic()
                begins = max(now, free[side])
                if begins - now > _BUFFER:
                    continue
                free[side] = begins + len(packet) / rate
                if random.random() >= loss:
                    queue.append((free[side] + delay, packet))


if __name__ == "__main__":
    first, second, *numbers = sys.argv[1:]
    rate, delay, loss = map(float, numbers)
    ends = device(first), device(second)
    print("up", flush=True)
    relay(ends, rate, delay, loss)
