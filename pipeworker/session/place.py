"""Where this process is among those of its job, and the store at which they first meet."""

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
from pipeworker.errors import NotMet, UsageError
from pipeworker.wire import interfaces
from pipeworker.wire.interfaces import ours, towards

if TYPE_CHECKING:
    from pipeworker.worker.internals import Store

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Place:
    """As torchrun says it in the environment; `local_world` is 0 where nobody knows."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    restart: int = 0

    @property
    def has_store(self) -> bool:
        """Whether there is one besides what this process itself would serve."""
        return self.world > 1 or self.agent_serves

    @property
    def agent_serves(self) -> bool:
        """Whether torchrun keeps the store, beyond the lives of its ranks."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @staticmethod
    def from_environment() -> Place:
        """What RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say.

        LOCAL_RANK, LOCAL_WORLD_SIZE and TORCHELASTIC_RESTART_COUNT may be left out.

        Raises:
            UsageError: a variable is not there or not a number.
        """
        try:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            address = os.environ["MASTER_ADDR"]
            all_local = world if interfaces.is_loopback(address) else 0
            if not 0 <= rank < world:
                raise UsageError(f"RANK is {rank}, and WORLD_SIZE {world}: ranks begin with 0")
            return Place(
                rank=rank,
                world=world,
                local_rank=int(os.environ.get("LOCAL_RANK", rank)),
                local_world=int(os.environ.get("LOCAL_WORLD_SIZE", all_local)),
                address=address,
                port=int(os.environ["MASTER_PORT"]),
                restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        except KeyError as error:
            raise UsageError(
                f"this is not a torchrun job: {error} is not set. In processes you start yourself, "
                "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            ) from None
        except ValueError as error:
            raise UsageError(f"the environment of a torchrun job is wrong: {error}") from None

    @staticmethod
    def found() -> Place:
        """Of the default process group, else of the environment, else of a job of one process.

        Raises:
            UsageError: the environment says half of it.
        """
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return Place._of_group(dist.get_rank(), dist.get_world_size())
        if not any(name in os.environ for name in ("RANK", "WORLD_SIZE")):
            return Place.alone()
        return Place.from_environment()

    @staticmethod
    def alone() -> Place:
        """Of a job of one process."""
        return Place(0, 1, 0, 1, "127.0.0.1", 0)

    @staticmethod
    def _of_group(rank: int, world: int) -> Place:
        from pipeworker.worker.internals import default_store

        store = default_store()
        key = "pipeworker/host/{}"
        store.set(key.format(rank), socket.gethostname())
        hosts = [store.get(key.format(other)) for other in range(world)]
        before = hosts[:rank].count(hosts[rank])
        return Place(
            rank=rank,
            world=world,
            local_rank=int(os.environ.get("LOCAL_RANK", before)),
            local_world=hosts.count(hosts[rank]),
            address=os.environ.get("MASTER_ADDR", ""),
            port=0,
        )

    def store(self) -> Store:
        """Where the ranks meet: the default process group's store, torchrun's, or rank 0's own.

        The last stays for as long as the process: another rank may already be on its way to the
        next job when this one's ends.

        Raises:
            UsageError: nobody answers there, or another program does.
            NotMet: torchrun does no longer.
        """
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            from pipeworker.worker.internals import default_store

            return default_store()
        serves = self.rank == 0 and not self.agent_serves
        # Torchrun's is there before its ranks are: where it is not, it is gone.
        limit = timings().reach if self.agent_serves else timings().meet
        try:
            return _store_at(self.address, self.port, serves, limit)
        except (RuntimeError, OSError) as error:
            kind = NotMet if self.agent_serves else UsageError  # torchrun's agents did meet there
            raise kind(
                f"rank {self.rank} cannot meet the others at MASTER_ADDR {self.address}, "
                f"MASTER_PORT {self.port}: {error}"
            ) from None

    def master_address(self) -> str:
        """That of the first host, as its name is known here; empty where it is not."""
        try:
            found = socket.getaddrinfo(self.address or None, 1, type=socket.SOCK_STREAM)
        except OSError:
            return ""
        return str(found[0][4][0])

    def coordinator_address(
        self, one_host: bool, interface: str | None = None, seen: Sequence[str] = ()
    ) -> str:
        """Where rank 0's coordinator listens: an address that all ranks reach.

        Loopback when all ranks are here; that of the interface that is named; the master's when it
        is ours; our own on the way to the master; what this host's name stands for; what others
        take the master's to be, where a name of this host is a loopback's (as Debian has it).

        Args:
            one_host: all ranks are on this one.
            interface: that others are to be reached by.
            seen: the master's address, as ranks of other hosts know it.

        Raises:
            UsageError: none of them is an address that others can reach.
        """
        if one_host or (interfaces.is_loopback(self.address) and self.address != "localhost"):
            return "127.0.0.1"  # who met at such an address is here; a name may be another host's
        name, said = interfaces.chosen(interface)
        if name:
            return interfaces.outward(name, said)
        here = socket.gethostname()
        ways: list[tuple[Callable[[str], str], str]] = [
            *((ours, self.address), (towards, self.address), (ours, here)),
            *((ours, address) for address in seen),
        ]
        for find, known in ways:
            with suppress(OSError):
                if known and not interfaces.is_loopback(address := find(known)):
                    return address
        raise UsageError(
            f"the ranks are on several hosts, and neither {self.address} nor the name of rank 0's "
            f"host, {here}, leads to an address that others can reach: give torchrun a "
            "--master-addr that is one, or name the interface with --interface"
        )


def await_others(done: Callable[[], bool], seconds: float | None = None) -> None:
    """Wait until it is so; unlike the store's own waits, this one can be interrupted.

    Raises:
        TimeoutError: it takes longer: by default, than others that join a job may take.
    """
    limit = timings().meet if seconds is None else seconds
    deadline = time.monotonic() + limit
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit:g} s")
        time.sleep(_POLL_SECONDS)


def _await_name(address: str) -> None:
    """Wait until a host's name is known; where hosts are started together it may be late.

    Raises:
        OSError: it is not, in the time that any way to others is found in.
    """
    deadline = time.monotonic() + timings().reach
    while True:
        try:
            socket.getaddrinfo(address, None)
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise OSError(error.strerror) from None
            time.sleep(_POLL_SECONDS)
        else:
            return


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except OSError:
        return False
    return True


@cache
def _store_at(address: str, port: int, serves: bool, limit: float) -> Store:
    from pipeworker.worker.internals import TCPStore

    _await_name(address)
    if not serves:
        await_others(lambda: _listens(address, port), limit)
    # Whoever serves here reaches it soon or never; who does not has just seen that it is there.
    soon = timedelta(seconds=timings().reach)
    store = TCPStore(
        address, port, world_size=None, is_master=serves, timeout=soon, multi_tenant=True
    )
    store.set_timeout(timedelta(seconds=timings().meet))
    return store
