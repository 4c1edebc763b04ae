"""Hosts on one machine: network namespaces, joined by cables that a test can unplug."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

CABLES = {"cable": ("10.77.0.1", "10.77.0.2"), "second": ("10.78.0.1", "10.78.0.2")}
"""The interfaces of both hosts, and their addresses."""
ADDRESSES = CABLES["cable"]


def ip(*words: str) -> str:
    """Run the command ip; return its output."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    """One of two hosts: a network namespace, whose name its processes use as the host's."""

    name: str
    address: str

    def cut(self, cable: str = "cable") -> None:
        """Unplug a cable at this end: no connection closes, and nothing arrives."""
        ip("-n", self.name, "link", "set", cable, "down")

    def plug(self, cable: str = "cable") -> None:
        """Plug a cable in again."""
        ip("-n", self.name, "link", "set", cable, "up")

    def cut_outgoing(self) -> None:
        """Drop what this host sends over the first cable, as a damaged fibre does."""
        self._tc("add", "blackhole")

    def repair_outgoing(self) -> None:
        """Send again."""
        self._tc("delete")

    def _tc(self, what: str, *kind: str) -> None:
        place = ("qdisc", what, "dev", "cable", "root")
        subprocess.run(["tc", "-n", self.name, *place, *kind], check=True, capture_output=True)

    def sent(self, cable: str) -> int:
        """Return the number of bytes that were sent over a cable."""
        (link,) = json.loads(ip("-n", self.name, "-s", "-json", "link", "show", "dev", cable))
        return int(link["stats64"]["tx"]["bytes"])

    def reject_outgoing(self, to: Host, *open_ports: int) -> None:
        """Reject connections to another host, as a firewall does, except to some ports."""
        self._block(("to", to.address), open_ports, "prohibit")

    def drop_incoming(self, *open_ports: int) -> None:
        """Drop packets that come to all other ports, without an answer, as a firewall does."""
        after_ours = ("priority", "1000", "lookup", "local")
        ip("-n", self.name, "rule", "add", *after_ours)
        ip("-n", self.name, "rule", "delete", "priority", "0")
        self._block(("iif", "cable"), open_ports, "blackhole")

    def _block(self, what: Sequence[str], open_ports: Sequence[int], how: str) -> None:
        bounds = [1023, *sorted(open_ports), 65535]
        for number, (before, after) in enumerate(itertools.pairwise(bounds)):
            ports = ("ipproto", "tcp", "dport", f"{before + 1}-{after - 1}")
            ip("-n", self.name, "rule", "add", "priority", str(100 + number), *what, *ports, how)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts that reach each other and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    word = uuid.uuid4().hex[:8]
    names = [f"pipeworker-{word}-{index}" for index in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            for cable in CABLES:
                end = ("netns", names[1])
                ip(
                    "-n",
                    names[0],
                    "link",
                    "add",
                    cable,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    cable,
                    *end,
                )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for index, name in enumerate(names):
            for cable, addresses in CABLES.items():
                ip("-n", name, "address", "add", f"{addresses[index]}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Host(names[0], ADDRESSES[0]), Host(names[1], ADDRESSES[1])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
