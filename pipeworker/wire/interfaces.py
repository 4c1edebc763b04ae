"""The addresses of this host: of an interface, and on the route to another host."""

from __future__ import annotations

import ipaddress
import os
import socket
from urllib.parse import urlsplit

from pipeworker.errors import UsageError

VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names this host's interface, without ``--interface``."""


def configured(interface: str | None) -> tuple[str, str]:
    """Return the interface, "" if the route decides, and the option or variable it comes from.

    torch accepts several in the variable, divided by commas; the first one is used.
    """
    first = os.environ.get(VARIABLE, "").partition(",")[0]
    return (interface, "--interface") if interface else (first, VARIABLE)


def address_of(name: str, source: str = "--interface") -> str:
    """Return the first address of an interface, which the option or variable `source` names.

    Raises:
        UsageError: this host has no such interface, or it has no address.
    """
    addresses = _addresses()
    if address := addresses.get(name):
        return address
    problem = "has no address" if name in addresses else "does not exist"
    known = ", ".join(f"{one} ({address or 'no address'})" for one, address in addresses.items())
    raise UsageError(
        f"{source} {name}: the interface {problem} on {socket.gethostname()}; choose one of {known}"
    )


def external_address_of(name: str, source: str = "--interface") -> str:
    """Return the first address of an interface, or raise UsageError if it is a loopback one."""
    address = address_of(name, source)
    if is_loopback(address):
        raise UsageError(
            f"{source} {name}: other hosts of this job cannot reach {address} of "
            f"{socket.gethostname()}; choose an interface that leads to them"
        )
    return address


def own_address(peer: tuple[str, int], interface: str | None) -> str:
    """Return this host's address of an interface, or else on the route to a peer (host, port).

    Raises:
        UsageError: the configured interface does not exist or has no address, or the address on the
            route is a link-local one, which is valid only with the name of an interface (IPv6).
        OSError: there is no route to the peer.
    """
    name, source = configured(interface)
    if name:
        return address_of(name, source)
    address = address_towards(*peer)
    if ":" in address and ipaddress.ip_address(address).is_link_local:
        raise UsageError(
            f"--interface: the route from {socket.gethostname()} to {peer[0]} has the link-local "
            f"address {address}, which other hosts cannot use; name an interface with another one"
        )
    return address


def interface_with(address: str) -> str:
    """Return the interface of this host whose first address this is, or ""."""
    return next((name for name, first in _addresses().items() if first == address), "")


def address_towards(host: str, port: int = 1) -> str:
    """Return this host's own address on the route to another one; no packet is sent.

    Raises:
        OSError: the other host has no address, or there is no route to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def resolve_local(host: str) -> str:
    """Return the address that a host name stands for, provided that it is this host's.

    Raises:
        OSError: it is not this host's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
    return str(address[0])


def connection_error(endpoint: str, timeout: float) -> str:
    """Return why ``tcp://host:port`` does not accept a connection in `timeout` seconds, or ""."""
    url = urlsplit(endpoint)
    try:
        socket.create_connection((url.hostname or "", url.port or 0), timeout).close()
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_loopback(address: str) -> bool:
    """Return whether a name or an address is a loopback one; names are not resolved."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _addresses() -> dict[str, str]:
    """Return the first address of each interface, IPv4 before IPv6, or ""."""
    import psutil  # here: most commands never need it

    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        v4 = [one.address for one in addresses if one.family == socket.AF_INET]
        v6 = [one.address for one in addresses if one.family == socket.AF_INET6]
        routed = [a for a in v6 if not ipaddress.ip_address(a.partition("%")[0]).is_link_local]
        found[name] = next(iter(v4 + routed), "")
    return found
