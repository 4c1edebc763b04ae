"""Who is not the peer does not get in, and the peer does."""

from __future__ import annotations

import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker import environment
from pipeworker.errors import PeerLost, UsageError
from pipeworker.plan.placement import Placement
from pipeworker.timings import VARIABLE
from pipeworker.worker.transport import credentials, proof
from pipeworker.worker.transport.connect import connect
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.links import gloo, shared
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.network import Network
from pipeworker.worker.transport.proof import Membership, Stranger, proving
from support.strangers import Strangers, listening
from support.transport import BACK, ENDPOINT, FORTH, MEMBERSHIP, Meeting, connect_all

KEY = MEMBERSHIP.key(FORTH, 0)
TURNED_AWAY = "the channel 0>1/activation: somebody who is not the peer connected"


IMPATIENT = "handshake=0.25,reconnect=0.2"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Strangers are not suffered long."""
    yield from changed(monkeypatch, f"{IMPATIENT},connect=21")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor is the peer."""
    yield from changed(monkeypatch, f"{IMPATIENT},connect=1.1")


def changed(monkeypatch: pytest.MonkeyPatch, text: str) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, text)
    environment.timings.cache_clear()
    yield
    environment.timings.cache_clear()


def carries(source: Link, target: Link) -> bool:
    got, sent = torch.empty(3), torch.randn(3)
    receiving = target.bulk.receive([got], 0)[0]
    source.bulk.send(sent, 0).wait()
    receiving.wait()
    return torch.equal(got, sent)


# The proof itself.


def talk(
    source_key: bytes, target_key: bytes, change: Callable[[int, bytes], bytes] = lambda _, m: m
) -> list[bytes]:
    """What the two ends of an edge say to each other, as it is changed on the way."""
    source, target = proving(source_key, sends=True), proving(target_key, sends=False)
    next(source)
    question, _ = next(target)
    said = [question]
    answer, _ = source.send(change(0, question))
    said.append(answer)
    last, none = target.send(change(1, answer))
    assert none == 0
    said.append(last)
    with pytest.raises(StopIteration):
        source.send(change(2, last))
    with pytest.raises(StopIteration):
        target.send(b"")
    return said


def test_two_who_know_the_key_are_let_in_and_never_say_it() -> None:
    said = talk(KEY, KEY)
    assert [len(message) for message in said] == [32, 64, 32]
    assert not any(KEY in message for message in said)
    assert not {*said} & {*talk(KEY, KEY)}  # nothing is said twice


@given(st.integers(0, 2), st.integers(0, 63), st.integers(1, 255))
def test_whatever_is_changed_on_the_way_is_noticed(which: int, at: int, by: int) -> None:
    def change(number: int, message: bytes) -> bytes:
        changed = bytearray(message)
        if number == which:
            changed[at % len(message)] ^= by
        return bytes(changed)

    with pytest.raises(Stranger):
        talk(KEY, KEY, change)


@pytest.mark.parametrize(
    "other",
    [
        Membership("another secret of these tests", 1).key(FORTH, 0),
        Membership(MEMBERSHIP.token, 2).key(FORTH, 0),
        MEMBERSHIP.key(FORTH, 1),
        MEMBERSHIP.key(BACK, 0),
    ],
    ids=["token", "generation", "replica", "edge"],
)
def test_who_is_of_another_is_a_stranger(other: bytes) -> None:
    for keys in ((KEY, other), (other, KEY)):
        with pytest.raises(Stranger):
            talk(*keys)


def test_an_end_that_hears_itself_is_not_deceived() -> None:
    source = proving(KEY, sends=True)
    next(source)
    answer, count = source.send(os.urandom(32))
    with pytest.raises(Stranger):
        source.send(answer[-count:])


def test_a_recorded_proof_is_of_no_use() -> None:
    _, answer, last = talk(KEY, KEY)
    target = proving(KEY, sends=False)
    next(target)
    with pytest.raises(Stranger):
        target.send(answer)
    source = proving(KEY, sends=True)
    next(source)
    source.send(os.urandom(32))
    with pytest.raises(Stranger):
        source.send(last)


def test_a_short_token_is_no_secret_and_no_token_is_shown() -> None:
    with pytest.raises(UsageError, match="too short"):
        Membership("short", 1).key(FORTH, 0)
    assert MEMBERSHIP.token not in repr(MEMBERSHIP)


# Over every kind of link.


OTHERS = [Membership("another secret of these tests", 1), Membership(MEMBERSHIP.token, 2)]


def join(rank: int, meeting: Meeting, backend: str, member: Membership = MEMBERSHIP) -> Link:
    two, store = Placement.identity(2), meeting.store()
    network = Network(ENDPOINT, backend)
    return connect([FORTH], rank, two, store, network, member)[FORTH]


@pytest.mark.parametrize("backends", [["auto", "gloo"], ["tls"]], ids=["near", "far"])
def test_workers_of_another_job_or_generation_are_not_connected(
    backends: list[str],
    hurried: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if backends == ["tls"]:
        monkeypatch.setattr(shared, "host_identity", lambda: os.urandom(8).hex())
    with ThreadPoolExecutor(8) as pool:
        made = [
            (rank, pool.submit(join, rank, meeting, backend, member))
            for backend in backends
            for other in OTHERS
            for meeting in [Meeting()]
            for rank, member in enumerate((MEMBERSHIP, other))
        ]
    for rank, future in made:
        words = f"the worker of stage {1 - rank} .rank {1 - rank}.( on .*, from .*)?: "
        with pytest.raises(PeerLost, match=f"the channel 0>1/activation .* {words}"):
            future.result(0)
    assert capfd.readouterr().err.count(TURNED_AWAY) >= 2 * len(backends)


def test_who_does_not_come_is_named(hurried: None) -> None:
    with ThreadPoolExecutor(6) as pool:
        made = []
        for backend in ("auto", "gloo", "tls"):
            for rank in (0, 1):
                meeting = Meeting()
                host = "another" if backend == "tls" else shared.host_identity()
                meeting.store().set(f"host/{1 - rank}", host)
                made.append((rank, pool.submit(join, rank, meeting, backend)))
    for rank, future in made:
        name = f"stage {1 - rank} .rank {1 - rank}."
        with pytest.raises(PeerLost, match=rf"0>1/activation .* {name}: it did not come within 1"):
            future.result(0)


# Gloo.


@pytest.mark.parametrize(
    "strangers",
    [
        Strangers(),
        Strangers(b"GET / HTTP/1.1\r\n\r\n"),
        Strangers(b"\xa5" * 500),
        Strangers(leave=True),
    ],
    ids=["silent", "speaks", "speaks a lot", "leaves"],
)
def test_a_stranger_in_a_stages_place_is_turned_away(
    strangers: Strangers,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It is in every place of both ends before the pair meets, and is turned out of it."""
    real, lock = gloo._device, threading.Lock()
    made: list[Any] = []

    def device(network: Network) -> Any:
        with lock:
            before = listening()
            made.append(real(network))
            (port,) = listening() - before
            if len(made) <= 2:
                strangers.strike(port)
        return made[-1]

    monkeypatch.setattr(gloo, "_device", device)
    source, target = (links[FORTH] for links in connect_all((FORTH,), 2, "gloo"))
    assert carries(source, target)
    assert len(made) >= 4  # each end has left the port where the stranger was
    heard = strangers.heard()
    strangers.close()
    assert len(heard) <= 1
    err = capfd.readouterr().err
    assert err.count(TURNED_AWAY) >= 2
    assert heard or strangers._leave or "Connection" in err  # it was one of the group


def test_a_network_that_fails_is_not_taken_for_a_stranger(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def group(self: object, prefix: str, rank: int, deadline: float) -> Any:
        tried.append(prefix)
        raise RuntimeError("no route to host")

    monkeypatch.setattr(gloo.Gloo, "_group", group)
    with pytest.raises(PeerLost, match="no route to host"):
        connect_all((FORTH,), 2, "gloo")
    assert len(tried) == 2 * 3


# Sockets of our own.


class Door:
    """A target that waits for its source, and the socket at which it does."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self._kind, self._stack = kind, stack
        self._meeting, self._hosts = Meeting(), iter("ab")
        self._pool = stack.enter_context(ThreadPoolExecutor(2))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if kind == "tls":
            patch.setattr(shared, "host_identity", lambda: next(self._hosts))
        self._meeting.store().set("host/0", "" if kind == "tls" else shared.host_identity())
        self.target: Future[Link] = self._join(1)
        names = {"auto": "shared", "tls": "tls"}
        key = f"{names[kind]}/replica-0/{FORTH}"
        self.address = self._meeting.store().get(key).decode()

    def _join(self, rank: int) -> Future[Link]:
        return self._pool.submit(join, rank, self._meeting, self._kind)

    def knock(self) -> socket.socket:
        """A stranger's connection."""
        if self._kind == "tls":
            host, _, port = self.address.rpartition(" ")
            stranger = socket.create_connection((host, int(port)), timeout=20)
        else:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(f"\0{self.address}")
            stranger.settimeout(20)
        self._stack.callback(stranger.close)
        return stranger

    def prove(self, secret: bytes, certificate: Credentials) -> None:
        """What a source would do, with another secret or certificate."""
        part = proving(secret, sends=True)
        stranger = self.knock()
        if self._kind == "tls":
            steps = certificate.steps(stranger, part, connects=True)
        else:
            steps = proof.over(stranger, part)
        with pytest.raises((Stranger, OSError)):
            self._stack.callback(proof.finish(steps, stranger, time.monotonic() + 20).close)

    def let_in(self) -> bool:
        """Whether the right source gets in, and the link carries something."""
        source, target = self._join(0).result(20), self.target.result(20)
        try:
            return carries(source, target)
        finally:
            source.close()
            target.close()


@pytest.fixture(params=["auto", "tls"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    patience = changed(monkeypatch, "connect=21")  # a test that fails does not wait for long
    next(patience)
    with ExitStack() as stack:
        yield Door(request.param, stack)
    next(patience, None)


def test_strangers_at_the_door_keep_nobody_waiting(
    door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(8):
        door.knock()  # and say nothing
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(200)):
        door.knock().sendall(garbage)
    door.knock().close()
    ours = Credentials.of(MEMBERSHIP.token)
    door.prove(Membership(MEMBERSHIP.token, 2).key(FORTH, 0), ours)
    door.prove(MEMBERSHIP.key(BACK, 0), ours)
    if door._kind == "tls":
        door.prove(KEY, Credentials.of("another secret of these tests"))
    assert door.let_in()
    err = capfd.readouterr().err
    assert err.count(TURNED_AWAY) >= 4
    assert "proved nothing" not in err  # the silent ones had not been waited for


def test_a_silent_stranger_is_shown_the_door(
    door: Door, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = [door.knock() for _ in range(proof.GUESTS + 2)]
    for stranger in crowd[:2]:
        while stranger.recv(1 << 16):  # the first question of the proof, perhaps
            pass
    assert f"proved nothing before {proof.GUESTS} others came" in capfd.readouterr().err
    for stranger in crowd:
        stranger.close()
    assert door.let_in()


@pytest.mark.parametrize("door", ["tls"], indirect=True)
def test_who_has_said_something_is_not_cut_off_for_those_that_have_not(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = iter([0.5])

    def too_early(connection: socket.socket) -> bool:
        select.select([connection], [], [], next(patience, 0))  # it speaks while one looks away
        return False

    monkeypatch.setattr(proof, "_speaks", too_early)
    client = Credentials.of(MEMBERSHIP.token).client
    with client.wrap_socket(door.knock(), do_handshake_on_connect=False) as source:
        source.setblocking(False)
        with suppress(ssl.SSLWantReadError):
            source.do_handshake()
        crowd = [door.knock() for _ in range(proof.GUESTS + 2)]
        for stranger in crowd[:2]:
            assert stranger.recv(100) == b""
        source.settimeout(20)
        source.do_handshake()
        part = proving(KEY, sends=True)
        _, count = next(part)
        with suppress(StopIteration):
            while True:
                message, count = part.send(source.recv(count))
                source.sendall(message)
        door.target.result(20).close()


def test_the_log_does_not_grow_with_every_stranger(
    door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(100):
        door.knock().close()
    assert door.let_in()
    assert capfd.readouterr().err.count(TURNED_AWAY) == 20


def test_a_source_that_is_cut_off_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it was heard, or in the middle: a crowd of strangers may be the reason."""
    with ExitStack() as stack:
        meeting, hosts = Meeting(), iter("a")
        monkeypatch.setattr(shared, "host_identity", lambda: next(hosts))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(20)
        meeting.store().set("host/1", "b")
        address = f"127.0.0.1 {listener.getsockname()[1]}"
        meeting.store().set(f"tls/replica-0/{FORTH}", address)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        source = pool.submit(join, 0, meeting, "tls")
        for heard in (0, 1):
            connection, _ = listener.accept()
            if heard:
                connection.recv(heard)
            connection.close()
        connection, _ = listener.accept()
        steps = Credentials.of(MEMBERSHIP.token).steps(
            connection, proving(KEY, sends=False), connects=False
        )
        stack.callback(proof.finish(steps, connection, time.monotonic() + 20).close)
        source.result(20).close()


def test_silence_has_its_time(impatient: None, capfd: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        door = Door("auto", stack)
        stranger = door.knock()
        while stranger.recv(100):
            pass
        assert f"{TURNED_AWAY} and was turned away: it proved nothing within 0.25 s" in (
            capfd.readouterr().err
        )
        assert door.let_in()


def test_a_listener_in_the_peers_place_learns_nothing_and_is_not_believed(
    hurried: None,
) -> None:
    """The name is known; who listens there does not know the secret."""
    for reply in (b"", os.urandom(32)):
        with ExitStack() as stack:
            meeting, name = Meeting(), f"pipeworker-test-{os.urandom(8).hex()}"
            meeting.store().set("host/1", shared.host_identity())
            meeting.store().set(f"shared/replica-0/{FORTH}", name)
            impostor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(impostor.close)
            impostor.bind(f"\0{name}")
            impostor.listen()
            pool = stack.enter_context(ThreadPoolExecutor(1))
            source = pool.submit(join, 0, meeting, "auto")
            connection, _ = impostor.accept()
            stack.callback(connection.close)
            if reply:
                connection.send(reply)  # a question
                assert len(connection.recv(100)) == 64
                connection.send(reply)
            with pytest.raises(PeerLost, match="its proof is wrong" if reply else "it is silent"):
                source.result(20)


def test_another_users_connection_is_refused_unasked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        door = Door("auto", stack)
        monkeypatch.setattr("os.getuid", lambda: -1)
        assert door.knock().recv(100) == b""
        monkeypatch.undo()
        assert door.let_in()
    assert "it is another user's" in capfd.readouterr().err


def test_the_door_is_closed_behind_the_peer() -> None:
    with ExitStack() as stack:
        before = listening()
        door = Door("tls", stack)
        assert len(listening() - before) == 1
        assert door.let_in()
        assert listening() == before


# What TLS adds.


def test_every_host_makes_the_same_certificate_and_each_job_its_own() -> None:
    one, again = (Credentials.of(MEMBERSHIP.token) for _ in range(2))
    assert one.certificate == again.certificate
    assert one.certificate != Credentials.of("another secret of these tests").certificate
    with pytest.raises(UsageError, match="too short"):
        Credentials.of("short")


def test_an_older_tls_is_refused() -> None:
    with ExitStack() as stack:
        door = Door("tls", stack)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            old.wrap_socket(door.knock())
        assert door.let_in()


def test_the_key_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where there is memory without a name nor where a file must do."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for platform in ("linux", "darwin"):
        monkeypatch.setattr("sys.platform", platform)
        seen: list[tuple[int, bytes]] = []
        with credentials._readable(b"a key") as path:
            seen.append((Path(path).stat().st_mode & 0o077, Path(path).read_bytes()))
        assert seen == [(0, b"a key")] if platform == "darwin" else seen[0][1] == b"a key"
        assert not list(tmp_path.iterdir())


def test_the_interface_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the option for all hosts, else by the environment of this one, else it is the route's."""
    elsewhere = "tcp://192.0.2.1:1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert Network(elsewhere).own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    assert Network(elsewhere, interface="lo").own_address() == "127.0.0.1"
    words = f"GLOO_SOCKET_IFNAME no-such-one: that is none on {socket.gethostname()}, which has lo"
    with pytest.raises(UsageError, match=re.escape(words)):
        Network(ENDPOINT).own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert Network(ENDPOINT).own_address() == "127.0.0.1"
