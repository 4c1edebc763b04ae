"""What the workers of a job show each other over TLS.

All have the same key and certificate, made from the job's token: either end shows it and takes
nothing else. No key is kept in a file, and nothing has to be handed out or expires.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import selectors
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeworker.wire.keys import secret_of
from pipeworker.worker.transport.proof import Proving, Steps, Stranger, converse


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the workers of a job show each other, and the only thing they accept."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    certificate: bytes

    @staticmethod
    def of(token: str) -> Credentials:
        """They are the same on every host, whatever its clock says.

        Raises:
            UsageError: the token is no secret.
        """
        key, certificate = _made_from(secret_of(token, b"pipeworker-tls"))
        der = ssl.PEM_cert_to_DER_cert(certificate)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.num_tickets = 0  # a source only writes: what it does not read would reset the link
        client.check_hostname = False
        with _readable(key + certificate.encode()) as path:
            for context in (client, server):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(cadata=der)
                context.load_cert_chain(path)
        return Credentials(client, server, der)

    def steps(self, connection: socket.socket, edge_proof: Proving, *, connects: bool) -> Steps:
        """From a TCP connection to one that is encrypted and proven."""
        context = self.client if connects else self.server
        with contextlib.ExitStack() as unless_proven:
            unless_proven.callback(connection.close)
            secure = context.wrap_socket(
                connection, server_side=not connects, do_handshake_on_connect=False
            )
            unless_proven.callback(secure.close)
            if not connects:
                yield selectors.EVENT_READ  # by which `admit` knows who has said something
            while True:
                try:
                    secure.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    yield selectors.EVENT_READ
                except ssl.SSLWantWriteError:
                    yield selectors.EVENT_WRITE
            if secure.getpeercert(binary_form=True) != self.certificate:
                raise Stranger("its certificate is not the job's")
            yield from converse(secure, edge_proof)
            unless_proven.pop_all()
        return secure


def _made_from(seed: bytes) -> tuple[bytes, str]:
    """An Ed25519 key and a certificate it signs, as PEM: its signatures are always the same."""
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
    form = serialization.Encoding.PEM
    private = key.private_bytes(
        form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(form).decode()


@contextlib.contextmanager
def _readable(data: bytes) -> Iterator[str]:
    """A path to read it from, which is what ssl wants: on Linux of memory that has no name."""
    if sys.platform == "linux":
        handle = os.memfd_create("pipeworker", os.MFD_CLOEXEC)
        path = f"/proc/self/fd/{handle}"
    else:
        handle, path = tempfile.mkstemp()  # its owner's alone
    with os.fdopen(handle, "wb") as file:
        try:
            file.write(data)
            file.flush()
            yield path
        finally:
            if sys.platform != "linux":
                Path(path).unlink()
