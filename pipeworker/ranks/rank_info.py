"""This process's rank in its job, and the store at which the ranks first meet."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from pipeworker.environment import timings
from pipeworker.errors import RendezvousError, UsageError
from pipeworker.wire import interfaces
from pipeworker.wire.interfaces import address_towards, resolve_local

if TYPE_CHECKING:
    from pipeworker.worker.internals import Store

_POLL_SECONDS = 0.02
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank as torchrun describes it in the environment.

    Attributes:
        local_world: the processes on this host; 0 if unknown.
        address: the host of the store, torchrun's ``MASTER_ADDR``.
        restart: how often torchrun has restarted the ranks of this node.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    restart: int = 0

    @property
    def has_store(self) -> bool:
        """Whether there is a store that other processes use too."""
        return self.world > 1 or self.agent_serves

    @property
    def agent_serves(self) -> bool:
        """Whether torchrun's agent serves the store, which then outlives its ranks."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @staticmethod
    def from_environment() -> RankInfo:
        """Read torchrun's variables, of which LOCAL_* and TORCHELASTIC_* are optional."""
        try:
            rank, world = _integer("RANK"), _integer("WORLD_SIZE")
            address = os.environ["MASTER_ADDR"]
            all_local = world if interfaces.is_loopback(address) else 0
            if not 0 <= rank < world:
                raise UsageError(
                    f"RANK {rank}: not a rank of a job with WORLD_SIZE {world}; count from 0"
                )
            return RankInfo(
                rank=rank,
                world=world,
                local_rank=_integer("LOCAL_RANK", rank),
                local_world=_integer("LOCAL_WORLD_SIZE", all_local),
                address=address,
                port=_integer("MASTER_PORT"),
                restart=_integer("TORCHELASTIC_RESTART_COUNT", 0),
            )
        except KeyError as error:
            raise UsageError(
                f"this is not a torchrun job: {error} is not set; in processes that you start "
                "yourself, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            ) from None

    @staticmethod
    def detect() -> RankInfo:
        """Use the default process group, else the environment, else assume a single process."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return RankInfo._from_group(dist.get_rank(), dist.get_world_size())
        if not any(name in os.environ for name in ("RANK", "WORLD_SIZE")):
            return RankInfo.single_process()
        return RankInfo.from_environment()

    @staticmethod
    def single_process() -> RankInfo:
        """Return the only rank of a job of one process."""
        return RankInfo(0, 1, 0, 1, _LOOPBACK, 0)

    @staticmethod
    def _from_group(rank: int, world: int) -> RankInfo:
        from pipeworker.worker.internals import default_store

        store = default_store()
        key = "pipeworker/host/{}"
        store.set(key.format(rank), socket.gethostname())
        hosts = [store.get(key.format(other)) for other in range(world)]
        before = hosts[:rank].count(hosts[rank])
        return RankInfo(
            rank=rank,
            world=world,
            local_rank=_integer("LOCAL_RANK", before),
            local_world=hosts.count(hosts[rank]),
            address=os.environ.get("MASTER_ADDR", ""),
            port=0,
        )

    def open_store(self) -> Store:
        """Open the default process group's store, torchrun's, or one that rank 0 serves.

        Rank 0's own store lives as long as its process: another rank may be on its way to the next
        job when this one's job ends.

        Raises:
            UsageError: no process answers at the address, or another program does.
            RendezvousError: torchrun's store is gone.
        """
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            from pipeworker.worker.internals import default_store

            return default_store()
        serves = self.rank == 0 and not self.agent_serves
        # Torchrun's store exists before its ranks do: if it is missing, it is gone.
        limit = timings().reach if self.agent_serves else timings().rendezvous
        try:
            return _open_store(self.address, self.port, serves, limit)
        except (RuntimeError, OSError) as error:
            # The address is right if torchrun's agents have met there.
            kind = RendezvousError if self.agent_serves else UsageError
            raise kind(
                f"rank {self.rank} cannot meet the others at MASTER_ADDR {self.address}, "
                f"MASTER_PORT {self.port}: {error}"
            ) from None

    def master_address(self) -> str:
        """Resolve the name of the first host here; empty if that is impossible."""
        try:
            found = socket.getaddrinfo(self.address or None, 1, type=socket.SOCK_STREAM)
        except OSError:
            return ""
        return str(found[0][4][0])

    def coordinator_address(self, interface: str | None = None, seen: Sequence[str] = ()) -> str:
        """Choose the address at which rank 0's coordinator listens; all ranks reach it.

        In order: loopback if all ranks are on this host; the address of the named interface; the
        master's address if it is this host's; this host's address on the route to the master; the
        address of this host's name; an address in `seen`, to which other hosts resolve the master's
        name. The last is for hosts whose own name is a loopback address, as in Debian.

        Raises:
            UsageError: none of them is an address that others can reach.
        """
        if not seen or (interfaces.is_loopback(self.address) and self.address != "localhost"):
            return _LOOPBACK  # a numeric loopback address means one host; a name may not
        chosen, source = interfaces.configured(interface)
        if chosen:
            return interfaces.external_address_of(chosen, source)
        here = socket.gethostname()
        candidates: list[tuple[Callable[[str], str], str]] = [
            (resolve_local, self.address),
            (address_towards, self.address),
            *((resolve_local, name) for name in (here, *seen)),
        ]
        for find, known in candidates:
            with suppress(OSError):
                if known and not interfaces.is_loopback(address := find(known)):
                    return address
        raise UsageError(
            f"the ranks are on several hosts, and neither {self.address} nor the name of rank 0's "
            f"host, {here}, leads to an address that others can reach; give torchrun a "
            "--master-addr that is one, or name the interface with --interface"
        )


def wait_until(done: Callable[[], bool], seconds: float | None = None) -> None:
    """Wait for a condition; unlike the store's own waits, this one can be interrupted.

    Raises:
        TimeoutError: `seconds` have passed, by default the time that other ranks have to join.
    """
    limit = timings().rendezvous if seconds is None else seconds
    deadline = time.monotonic() + limit
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit:g} s")
        time.sleep(_POLL_SECONDS)


def _retry(attempt: Callable[[], object], seconds: float) -> None:
    """Repeat a call while it raises an OSError; raise that error after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            attempt()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(f"{error.strerror or error}, for {seconds:g} s") from None
            time.sleep(_POLL_SECONDS)


@cache
def _open_store(address: str, port: int, serves: bool, limit: float) -> Store:
    from pipeworker.worker.internals import TCPStore

    # Names may resolve late where hosts start together.
    _retry(lambda: socket.getaddrinfo(address, None), timings().reach)
    if not serves:
        _retry(lambda: socket.create_connection((address, port), 5).close(), limit)
    # The serving rank reaches its own store soon or never; the others have just connected to it.
    soon = timedelta(seconds=timings().reach)
    store = TCPStore(
        address, port, world_size=None, is_master=serves, timeout=soon, multi_tenant=True
    )
    store.set_timeout(timedelta(seconds=timings().rendezvous))
    return store


def _integer(name: str, default: int | None = None) -> int:
    """Return the integer in one of torchrun's variables; without a default it must be set."""
    value = os.environ[name] if default is None else os.environ.get(name, default)
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name} {value!r}: must be an integer, as torchrun sets it") from None
