"""The rendezvous of a job's ranks: each describes itself, and rank 0 starts the coordinator.

The ranks meet at a store that earlier ranks may have used. Torchrun keeps its store when it
restarts ranks, perhaps in another number, and the ranks of a new node count restarts from 0. So
rank 0 names each rendezvous at random, and another rank accepts rank 0's answer only if that rank's
own random word is in it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pipeworker.environment import timings
from pipeworker.errors import AGAIN, PipeworkerError, RendezvousError, UsageError, of_status
from pipeworker.host.descriptors import check_available
from pipeworker.ranks.coordinator_process import (
    REPORTED_BY_CALLER,
    CoordinatorProcess,
    EventListener,
    failure_text,
)
from pipeworker.ranks.rank_info import RankInfo, wait_until
from pipeworker.runs.begin import PreparedRun
from pipeworker.wire.interfaces import connection_error
from pipeworker.wire.keys import TOKEN_VARIABLE, given_token, new_token
from pipeworker.wire.lines import Warned
from pipeworker.wire.sockets import WORKER_NEEDS

if TYPE_CHECKING:
    from pipeworker.worker.internals import Store

BeginRun = Callable[[int], PreparedRun]
"""Begins the run on rank 0, given how often torchrun has restarted the ranks."""
Listen = Callable[[PreparedRun], EventListener]
"""Returns the listener to the coordinator's events, given the run."""

_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class RendezvousResult:
    """The coordinator's endpoint, the secret of the job and, on rank 0, the coordinator."""

    endpoint: str
    token: str
    coordinator: CoordinatorProcess | None = None


class PeerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's description of itself.

    Attributes:
        word: random, so that it identifies this rank in this rendezvous.
        identity: equal for processes of one host.
        restart: how often torchrun has restarted the ranks of its node.
        master: the first host's address as this host resolves it; on that host itself it may be a
            loopback address.
        proof: that the rank has been given a token, see :func:`_proof`; empty if it has none.
        given: the options and words of its command line that must be the same on all ranks.
        mistake: why the rank cannot take part; empty if it can.
    """

    word: str
    host: str
    identity: str
    restart: int
    master: str
    proof: str = ""
    given: dict[str, str] = {}
    mistake: str = ""

    @staticmethod
    def of(info: RankInfo, given: Mapping[str, str] = _NOTHING, mistake: str = "") -> PeerInfo:
        """Describe this process."""
        from pipeworker.worker.transport.links.unix import host_identity

        word, host = secrets.token_hex(8), socket.gethostname()
        master, proof = info.master_address(), _proof(word)
        at = (info.restart, master)
        return PeerInfo(word, host, host_identity(), *at, proof, dict(given), mistake)

    @staticmethod
    def decode(text: bytes) -> PeerInfo:
        """Decode the JSON of :meth:`encode`."""
        try:
            return msgspec.convert(json.loads(text), PeerInfo)
        except ValueError:
            raise PipeworkerError(
                "the store where the ranks meet has an entry that no rank of this job has written; "
                "check that all hosts have the same version of pipeworker, and that no other job "
                "uses MASTER_PORT"
            ) from None

    def encode(self) -> str:
        """Encode as JSON."""
        return json.dumps(msgspec.to_builtins(self))


def rendezvous(
    info: RankInfo, name: str, begin: BeginRun, listen: Listen, given: Mapping[str, str] = _NOTHING
) -> RendezvousResult:
    """Start the coordinator on rank 0, and learn on the other ranks where it listens.

    The `name` distinguishes the job from others that use the same store. Rank 0 alone calls `begin`
    and `listen`. What the command line has `given` must be the same on all ranks.

    Raises:
        UsageError: the ranks cannot meet, or one of them has made a mistake.
        RendezvousError: a rank does not come, or does not reach the coordinator.
        PipeworkerError: the coordinator did not start.
    """
    try:
        check_available(*WORKER_NEEDS)
    except OSError as error:
        raise PipeworkerError(f"rank {info.rank} cannot start: {error.strerror}") from None
    token = given_token()
    if info.world == 1:
        token = token or new_token()
        run = begin(info.restart)
        coordinator = CoordinatorProcess(run, token, "127.0.0.1", _listener(run, listen))
        return RendezvousResult(coordinator.endpoint, token, coordinator)
    store = info.open_store()
    if info.rank:
        answer = _join(info, store, name, given)
        return RendezvousResult(answer["endpoint"], token or answer["token"])
    return _Host(info, store, f"pipeworker/{name}").gather(token, begin, listen, given)


def report_mistake(info: RankInfo, name: str, mistake: str) -> None:
    """Have rank 0 report a mistake on this rank, which therefore cannot take part.

    If all ranks make the same mistake, rank 0 does not listen; wait as long as it needs to report.
    """
    with suppress(PipeworkerError, RuntimeError, TimeoutError):
        _exchange(
            info.open_store(), name, info.rank, PeerInfo.of(info, mistake=mistake), timings().report
        )


class _Host:
    """Rank 0's side of a rendezvous."""

    def __init__(self, info: RankInfo, store: Store, name: str) -> None:
        self._info, self._store = info, store
        self._key = f"{name}/{secrets.token_hex(8)}"
        self._others = range(1, info.world)
        store.set(name, self._key)

    def gather(
        self, token: str, begin: BeginRun, listen: Listen, given: Mapping[str, str]
    ) -> RendezvousResult:
        peers = self._wait_for_peers()
        try:
            for rank, peer in peers.items():
                if peer.mistake:
                    raise UsageError(f"rank {rank} on {peer.host}: {peer.mistake}")
            own = PeerInfo.of(self._info, given)
            _check_tokens(own, peers)
            _check_given(own, peers)
            run = begin(max(peer.restart for peer in (own, *peers.values())))
            seen = [peer.master for peer in peers.values() if peer.identity != own.identity]
            one_host = not seen
            try:
                address = self._info.coordinator_address(run.options.interface, seen)
            except UsageError:  # nothing remains of a run that cannot begin
                run.close(REPORTED_BY_CALLER, began=False)
                raise
            on_event = _listener(run, listen)
            published = "" if token else new_token()
            if published and not one_host:  # on one host the coordinator listens on loopback
                _warn(
                    f"{TOKEN_VARIABLE}: not set, so the token of the job is in torchrun's store, "
                    "where anyone who reaches its port can read it; set it on all hosts",
                    on_event,
                )
            token = token or published
            coordinator = CoordinatorProcess(run, token, address, on_event)
        except BaseException as error:  # the others are waiting
            status = error.exit_status if isinstance(error, PipeworkerError) else 1
            self._reject(peers, failure_text(error), status)
            raise
        endpoint = coordinator.endpoint
        self._answer(peers, endpoint=endpoint, token=published, one_host=one_host)
        if not one_host:
            self._wait_for_connections(coordinator, peers)
        return RendezvousResult(endpoint, token, coordinator)

    def _wait_for_peers(self) -> dict[int, PeerInfo]:
        entries, timeout = self._collect("here")
        peers = {rank: PeerInfo.decode(text) for rank, text in entries.items()}
        if timeout:
            missing = ", ".join(str(rank) for rank in self._others if rank not in peers)
            text = f"rank {missing} did not come to the job: {timeout}"
            self._reject(peers, text, AGAIN)
            raise RendezvousError(text)
        return peers

    def _wait_for_connections(
        self, coordinator: CoordinatorProcess, peers: dict[int, PeerInfo]
    ) -> None:
        reports, timeout = self._collect("reached")
        for rank, peer in peers.items():
            error = (
                f"rank {rank} on {peer.host} has not reported whether it reaches the "
                f"coordinator: {timeout}"
            )
            if rank in reports:
                error = reports[rank].decode()
            if error:
                coordinator.abort(rank, error)
                raise RendezvousError(error)

    def _collect(self, entry: str) -> tuple[dict[int, bytes], str]:
        """Wait until every other rank has written an entry.

        Returns:
            The entries by rank, and why some are missing, else "".
        """
        keys = {rank: f"{self._key}/{entry}/{rank}" for rank in self._others}
        timeout = ""
        try:
            wait_until(lambda: self._store.check([*keys.values()]))
        except TimeoutError as error:
            timeout = str(error)
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: self._store.get(key) for rank, key in keys.items()}, timeout

    def _reject(self, peers: Mapping[int, PeerInfo], error: str, status: int) -> None:
        """Answer with an error, and wait until all have it: the store may end with rank 0."""
        self._answer(peers, error=error, status=status)
        told = [f"{self._key}/told/{rank}" for rank in peers]
        with suppress(TimeoutError):  # one has ended
            wait_until(lambda: not told or self._store.check(told), timings().linger)

    def _answer(self, peers: Mapping[int, PeerInfo], **answer: Any) -> None:
        words = [peer.word for peer in peers.values()]
        text = json.dumps({"words": words, "error": "", **answer})
        self._store.set(f"{self._key}/answer", text)


def _proof(word: str) -> str:
    """Return what only a process with this one's token can compute for a word; "" without one."""
    token = given_token()
    return token and hmac.new(token.encode(), word.encode(), "sha256").hexdigest()


def _check_tokens(own: PeerInfo, peers: Mapping[int, PeerInfo]) -> None:
    """Raise UsageError unless all ranks have rank 0's token: others could never join its job."""
    wrong = {rank: peer for rank, peer in peers.items() if peer.proof != _proof(peer.word)}
    if not wrong:
        return
    ranks = ", ".join(map(str, wrong))
    hosts = ", ".join(dict.fromkeys(peer.host for peer in wrong.values()))
    how = "a value, and rank 0 on {} has none"
    if own.proof:
        given = all(peer.proof for peer in wrong.values())
        how = "another value than rank 0 on {}" if given else "no value, unlike rank 0 on {}"
    raise UsageError(
        f"{TOKEN_VARIABLE}: rank {ranks} on {hosts} has {how.format(own.host)}; set the same on "
        "all hosts"
    )


def _check_given(own: PeerInfo, peers: Mapping[int, PeerInfo]) -> None:
    """Raise UsageError unless all ranks were started with the same options and words."""
    for rank, peer in peers.items():
        for name in sorted(own.given.keys() | peer.given.keys()):
            ours, theirs = own.given.get(name), peer.given.get(name)
            if ours != theirs:
                raise UsageError(
                    f"{name}: rank {rank} on {peer.host} was started {_with(theirs)}, rank 0 on "
                    f"{own.host} {_with(ours)}; start all ranks with the same options"
                )


def _with(value: str | None) -> str:
    return "without it" if value is None else f"with {value}"


def _join(info: RankInfo, store: Store, name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return rank 0's answer on another rank."""
    own = PeerInfo.of(info, given)
    try:
        key, answer = _exchange(store, name, info.rank, own, timings().rendezvous)
    except (RuntimeError, TimeoutError) as error:
        raise RendezvousError(f"rank 0 did not start the job: {error}") from None
    if answer["error"]:
        raise of_status(answer["status"])(answer["error"])
    if not answer["one_host"]:
        endpoint = answer["endpoint"]
        why = connection_error(endpoint, timings().reach)
        reason = why and (
            f"rank {info.rank} on {own.host} cannot reach the coordinator at {endpoint}: {why}; "
            "if another interface of rank 0's host leads there, name it with --interface; if a "
            "firewall is between, let the hosts of a job reach each other at all ports"
        )
        store.set(f"{key}/reached/{info.rank}", reason)
        if reason:
            raise RendezvousError(reason)
    return answer


def _exchange(
    store: Store, name: str, rank: int, own: PeerInfo, seconds: float
) -> tuple[str, dict[str, Any]]:
    """Describe this rank to rank 0; return the key of the rendezvous, and the answer there."""
    key = ""
    answer: dict[str, Any] = {}

    def answered() -> bool:
        nonlocal key, answer
        if not store.check([f"pipeworker/{name}"]):
            return False
        if (current := store.get(f"pipeworker/{name}").decode()) != key:
            key = current
            store.set(f"{key}/here/{rank}", own.encode())
        if not store.check([f"{key}/answer"]):
            return False
        answer = json.loads(store.get(f"{key}/answer"))
        return own.word in answer["words"]

    wait_until(answered, seconds)
    store.set(f"{key}/told/{rank}", "")
    return key, answer


def _listener(run: PreparedRun, listen: Listen) -> EventListener:
    """Return the listener, which has received the warnings of the run's start."""
    on_event = listen(run)
    for text in run.warnings:
        _warn(text, on_event)
    return on_event


def _warn(text: str, on_event: EventListener) -> None:
    with suppress(OSError):  # the loss of the terminal will show at the next event too
        on_event(Warned(text))
