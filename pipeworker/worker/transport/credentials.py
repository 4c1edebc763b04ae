"""The TLS credentials of a job's workers.

All workers have the same key and certificate, derived from the job's token; either end shows the
certificate and accepts no other. No key is kept in a file, distributed, or ever expires.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipeworker.environment import timings
from pipeworker.wire.keys import derive_secret
from pipeworker.worker.transport import handshake
from pipeworker.worker.transport.handshake import AuthenticationError, HandshakeSteps, PeerLeft

_KEEPALIVE_IDLE = 30  # seconds until the kernel probes a silent peer
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""The errors of TLS where the peer has closed: without and with its announcement of that."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A job's certificate, and the TLS contexts that show it and accept no other."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    certificate: bytes

    @staticmethod
    def of(token: str) -> Credentials:
        """Derive the credentials from a job's token; they are equal on every host."""
        key, certificate = _derive(derive_secret(token, b"pipeworker-tls"))
        der = ssl.PEM_cert_to_DER_cert(certificate)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.num_tickets = 0  # a source never reads: unread tickets would reset the connection
        client.check_hostname = False
        with readable_path(key + certificate.encode()) as path:
            for context in (client, server):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(cadata=der)
                context.load_cert_chain(path)
        return Credentials(client, server, der)

    def steps(self, connection: socket.socket, key: bytes, *, connects: bool) -> HandshakeSteps:
        """Encrypt a TCP connection, then perform this end's part of the authentication over it.

        Raises:
            AuthenticationError: the other end is not the peer.
            OSError: the connection failed.
        """
        context = self.client if connects else self.server
        with contextlib.ExitStack() as unless_authenticated:
            unless_authenticated.callback(connection.close)
            secure = context.wrap_socket(
                connection, server_side=not connects, do_handshake_on_connect=False
            )
            unless_authenticated.callback(secure.close)
            if not connects:
                yield selectors.EVENT_READ  # so that `accept` knows which peers have sent data
            while True:
                try:
                    secure.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    yield selectors.EVENT_READ
                except ssl.SSLWantWriteError:
                    yield selectors.EVENT_WRITE
                except OSError as error:
                    if error.errno == errno.ENOTCONN:  # reset before the handshake
                        raise PeerLeft("it left") from error
                    raise
            if secure.getpeercert(binary_form=True) != self.certificate:
                raise AuthenticationError("its certificate is not the job's")
            yield from handshake.exchange_proofs(secure, key, sends=connects)
            unless_authenticated.pop_all()
        return secure


@dataclass(frozen=True, slots=True)
class Login:
    """The authentication of TCP connections by a key, encrypted if there are credentials."""

    key: bytes = field(repr=False)
    credentials: Credentials | None

    def steps(self, connection: socket.socket, *, connects: bool = False) -> HandshakeSteps:
        """Return the handshake of a connection, which this process has accepted or made.

        The sizes of its buffers are left to the kernel, which may choose larger ones than a
        program.
        """
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
        if self.credentials is None:
            return handshake.plain_steps(connection, self.key, sends=connects)
        return self.credentials.steps(connection, self.key, connects=connects)

    def connect(
        self, address: tuple[str, int], deadline: float, closed: Callable[[], bool] = lambda: False
    ) -> socket.socket:
        """Return an authenticated connection to a listener at (host, port).

        A listener that is full of unauthenticated connections may close this one: retry until
        `deadline` (monotonic), or until `closed` returns True. The kernel reports a host that is
        off the network for a moment sooner than it would give up the connection.

        Raises:
            OSError: the listener cannot be reached; TimeoutError if there is no way to its host.
            AuthenticationError: the process that listens there is not the peer.
        """
        limit = min(max(0.001, deadline - time.monotonic()), timings().reach)
        reached_by = time.monotonic() + limit
        while True:
            try:
                connection = socket.create_connection(address, timeout=limit)
            except OSError as error:
                if error.errno not in _UNREACHABLE:
                    raise
                if closed() or time.monotonic() > reached_by:
                    raise TimeoutError(error.strerror) from error
                time.sleep(timings().poll)
                continue
            steps = self.steps(connection, connects=True)
            try:
                return handshake.complete(steps, connection, deadline)
            except (PeerLeft, ConnectionError, *CLOSED):
                if closed() or time.monotonic() > deadline:
                    raise
            time.sleep(timings().poll)


def _derive(seed: bytes) -> tuple[bytes, str]:
    """Return an Ed25519 key and a certificate signed by it, as PEM.

    Ed25519 signatures are deterministic, so the certificate is the same on every host.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pipeworker")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), serial_number=1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(encoding).decode()


@contextlib.contextmanager
def readable_path(data: bytes) -> Iterator[str]:
    """Yield a path from which `data` can be read, as :mod:`ssl` requires; no file has the data."""
    with os.fdopen(os.memfd_create("pipeworker", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
