"""The addresses of this host: of an interface, and on the way to another host."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path
from urllib.parse import urlsplit

from pipeworker.errors import UsageError

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Of the environment: the interface of this host, where ``--interface`` names none for all."""
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_GLOBAL = "00"  # the scope of an address that other hosts can reach


def chosen(interface: str | None) -> tuple[str, str]:
    """The interface that is asked for and by what; empty where the route is to choose."""
    if interface:
        return interface, "--interface"
    return os.environ.get(VARIABLE, ""), VARIABLE


def address_of(name: str, said: str = "--interface") -> str:
    """The first address of an interface.

    Args:
        said: by what it was asked for.

    Raises:
        UsageError: this host has no such interface, or it has no address.
    """
    if sys.platform != "linux":
        raise UsageError(f"{said} {name}: interfaces can be named on Linux only")
    if address := _address(name):
        return address
    names = [known for _, known in socket.if_nameindex()]
    what = "has no address" if name in names else "is none"
    there = ", ".join(f"{known} ({_address(known) or 'no address'})" for known in names)
    raise UsageError(f"{said} {name}: that {what} on {socket.gethostname()}, which has {there}")


def outward(name: str, said: str = "--interface") -> str:
    """The first address of an interface, where it leads to other hosts.

    Raises:
        UsageError: as for :func:`address_of`; or it leads to none.
    """
    address = address_of(name, said)
    if is_loopback(address):
        raise UsageError(f"{said} {name}: other hosts of this job cannot reach {address}")
    return address


def own_address(peer: tuple[str, int], interface: str | None) -> str:
    """This host's address for what it exchanges with others.

    Args:
        peer: one of them; the interface that reaches it is taken where none is named.

    Raises:
        UsageError: the one that is named has no address.
        OSError: nothing leads to the peer.
    """
    name, said = chosen(interface)
    return address_of(name, said) if name else towards(*peer)


def named(address: str) -> str:
    """The interface of this host that has an address, as its first; empty where none is found."""
    if sys.platform != "linux":
        return ""
    return next((name for _, name in socket.if_nameindex() if _address(name) == address), "")


def towards(host: str, port: int = 1) -> str:
    """This host's own address on the route to another one (no packet is sent).

    Raises:
        OSError: the other has no address, or nothing leads there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def ours(name: str) -> str:
    """The address that a name stands for, if it is this host's.

    Raises:
        OSError: it is not.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
    return str(address[0])


def unreached(endpoint: str, seconds: float) -> str:
    """Why nobody answers at an endpoint, within so many seconds; empty where somebody does."""
    url = urlsplit(endpoint)
    try:
        socket.create_connection((url.hostname or "", url.port or 0), seconds).close()
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_loopback(address: str) -> bool:
    """Whether a name or an address is of the host itself alone, as far as its look tells."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _address(name: str) -> str:
    """Of an interface, IPv4 before IPv6; empty where there is none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", os.fsencode(name)[:15])
            )
        except OSError:
            return _address_6(name)
    return socket.inet_ntoa(answer[20:24])


def _address_6(name: str) -> str:
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        address, _, _, scope, _, interface = line.split()
        if interface == name and scope == _GLOBAL:
            return str(ipaddress.IPv6Address(bytes.fromhex(address)))
    return ""
