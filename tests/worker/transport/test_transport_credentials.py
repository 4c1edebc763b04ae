"""The certificate of a job, and the TLS contexts that accept no other."""

from __future__ import annotations

import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from pipeworker.errors import UsageError
from pipeworker.worker.transport import credentials
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.handshake import AuthenticationError, complete
from support.faults.authentication import Listener
from support.in_process.transport import MEMBERSHIP


def test_all_hosts_of_a_job_derive_the_same_certificate() -> None:
    one, other = (Credentials.of(MEMBERSHIP.token) for _ in range(2))
    assert one.certificate == other.certificate
    assert one.certificate != Credentials.of("another secret of these tests").certificate
    with pytest.raises(UsageError, match="too short"):
        Credentials.of("short")


def test_an_older_tls_is_refused() -> None:
    with ExitStack() as stack:
        listener = Listener("tls", stack)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            old.wrap_socket(listener.connect())
        assert listener.accepts_peer()


def test_another_certificate_of_the_jobs_key_is_refused() -> None:
    own = Credentials.of(MEMBERSHIP.token)
    other = replace(own, certificate=Credentials.of("another secret of these tests").certificate)
    ends = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, ends[0], ends[1]:
        until = time.monotonic() + 20
        pool.submit(complete, own.steps(ends[0], bytes(32), connects=True), ends[0], until)
        steps = other.steps(ends[1], bytes(32), connects=False)
        with pytest.raises(AuthenticationError, match="its certificate is not the job's"):
            complete(steps, ends[1], until)


def test_the_key_stays_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with credentials.readable_path(b"a key") as path:
        assert Path(path).read_bytes() == b"a key"
        assert not list(tmp_path.iterdir())
