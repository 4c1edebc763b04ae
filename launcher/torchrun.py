"""One rank of a torchrun job: this process is the worker of a stage.

Rank 0's host runs the coordinator. The other ranks learn its address, and the token when
``PIPEWORKER_TOKEN`` is not set, from torchrun's own store.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TextIO

from launcher.processes import LineProcess
from launcher.show import Show
from pipeworker.coordinator.report import Configuration
from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir
from pipeworker.wire.keys import TOKEN_VARIABLE, new_token
from pipeworker.worker.forkserver import die_with, kill_group

_JOIN_SECONDS = 300.0
_VERDICT_SECONDS = 8.0
_PREFIX = "pipeworker"


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's place in the job, as torchrun says it in the environment."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    restart: int

    @staticmethod
    def from_environment() -> Rank:
        """Raises UsageError when the variables of torchrun are not there."""
        try:
            return Rank(
                rank=int(os.environ["RANK"]),
                world=int(os.environ["WORLD_SIZE"]),
                local_rank=int(os.environ["LOCAL_RANK"]),
                local_world=int(os.environ["LOCAL_WORLD_SIZE"]),
                address=os.environ["MASTER_ADDR"],
                port=int(os.environ["MASTER_PORT"]),
                restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        except KeyError as error:
            raise UsageError(f"this is not a torchrun job: {error} is not set") from None


def run(rank: Rank, options: Options, make_run_dir: Callable[[], RunDir]) -> int:
    """Be this rank's worker to the end of the job; returns the exit status.

    Args:
        make_run_dir: called on rank 0 alone.
    """
    die_with(os.getppid())
    _guard()

    from torch._C._distributed_c10d import TCPStore

    # Torchrun's agent serves the store; without it, rank 0 does, as init_process_group would.
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        rank.address,
        rank.port,
        world_size=None,
        is_master=rank.rank == 0 and not agent_serves,
        timeout=timedelta(seconds=_JOIN_SECONDS),
    )
    key = f"{_PREFIX}/{rank.restart}"
    if rank.rank == 0:
        return _Head(rank, options, make_run_dir(), store, key).run()
    endpoint = store.get(f"{key}/endpoint").decode()
    token = os.environ.get(TOKEN_VARIABLE) or store.get(f"{key}/token").decode()
    return _work(rank, endpoint, token, os._exit)


def _guard() -> None:
    """Fork a process that, when this one ends, kills what it started: its process group.

    Torchrun makes each rank the leader of a group, but forgets the group of one that died.
    """
    me = os.getpid()
    if sys.platform != "linux" or os.getpgrp() != me or os.fork():
        return
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.setsid()
        die_with(me, signal.SIGTERM)
        while os.getppid() == me:
            signal.sigwait({signal.SIGTERM})
        kill_group(me)
    finally:
        os._exit(0)


def _work(rank: Rank, endpoint: str, token: str, leave: Callable[[int], None]) -> int:
    from pipeworker.worker import service

    return service.run(service.Settings(rank.rank, endpoint, token, rank.local_rank, leave=leave))


class _Head:
    """Rank 0: starts the coordinator, shows what it says, and is a worker like the others."""

    def __init__(self, rank: Rank, options: Options, run_dir: RunDir, store: Any, key: str) -> None:
        self._rank = rank
        self._options = options
        self._run_dir = run_dir
        self._store = store
        self._key = key
        self._verdict: dict[str, Any] | None = None
        self._over = threading.Event()
        # The worker's output goes to its log; what the user should see goes where it went before.
        self._show = Show(options, str(run_dir.path), _again(1), _again(2))
        self._coordinator = LineProcess("pipeworker.coordinator.service")

    def run(self) -> int:
        rank = self._rank
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            token = new_token()
            self._store.set(f"{self._key}/token", token)
            self._show.warning(
                f"{TOKEN_VARIABLE} is not set: the token goes through torchrun's store, which "
                "anyone who reaches its port can read"
            )
        host = "127.0.0.1" if rank.local_world == rank.world else _bind_address(rank.address)
        configuration = Configuration(
            self._options, str(self._run_dir.path), token, host, starter=0
        )
        self._coordinator.say(configuration.to_json())
        endpoint = self._bound()
        self._store.set(f"{self._key}/endpoint", endpoint)
        threading.Thread(target=self._listen, name="coordinator", daemon=True).start()
        status = _work(rank, endpoint, token, self._leave)
        return self._finish(status)

    def _bound(self) -> str:
        while True:
            events, more = self._coordinator.hear()
            for event in events:
                if "bound" in event:
                    return str(event["bound"])
            if not more:
                raise UsageError("the coordinator did not start: see its log in the run directory")

    def _listen(self) -> None:
        """Show what the coordinator says until it ends."""
        more = True
        while more:
            events, more = self._coordinator.hear()
            for event in events:
                ((kind, value),) = event.items()
                if kind == "ended":
                    self._verdict = value
                getattr(self._show, kind)(value)
        self._over.set()

    def _leave(self, status: int) -> None:
        """Called by the control thread while the main thread is inside a step."""
        os._exit(self._finish(status))

    def _finish(self, status: int) -> int:
        """The coordinator is this process's child: let it speak its verdict before leaving."""
        self._over.wait(_VERDICT_SECONDS)
        self._coordinator.hang_up()
        self._coordinator.finish(1.0)
        return int(self._verdict["exit_status"]) if self._verdict else status or 1


def _again(descriptor: int) -> TextIO:
    """A second file on what a descriptor is open on."""
    return os.fdopen(os.dup(descriptor), "w", encoding="utf-8")


def _bind_address(master: str) -> str:
    """The address other hosts reach rank 0 at: the master's when it is ours, else our own."""
    for name in (master, socket.gethostname()):
        try:
            address = str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
            if ipaddress.ip_address(address).is_loopback:
                continue  # as some hosts resolve their own name
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.bind((address, 0))
            return address
        except OSError:
            continue
    raise UsageError(
        f"neither {master} nor this host's name is an address of rank 0's host that others can "
        "reach: give torchrun a --master-addr that is"
    )
