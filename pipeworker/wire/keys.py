"""CURVE keys, and whatever else is secret, from the job's token.

Whoever holds the token can be, and can recognise, either side; nobody else gets past the
handshake. The token is 32 random bytes, written as hexadecimal.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from pipeworker.errors import UsageError

TOKEN_VARIABLE = "PIPEWORKER_TOKEN"


def new_token() -> str:
    """A fresh job token."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes

    def __repr__(self) -> str:  # a secret never reaches a log by accident
        return f"KeyPair(public={self.public!r})"


def secret_of(token: str, role: bytes) -> bytes:
    """32 bytes for one use, which is named in 16 bytes at most; they tell nothing of the others.

    Raises:
        UsageError: the token is no secret.
    """
    if len(token) < 16:
        raise UsageError(f"{TOKEN_VARIABLE} is too short to be a secret: use 16 characters or more")
    return hashlib.blake2b(token.encode(), digest_size=32, person=role).digest()


def _derive(token: str, role: bytes) -> KeyPair:
    secret = z85.encode(secret_of(token, role))
    return KeyPair(zmq.curve_public(secret), secret)


def server_keys(token: str) -> KeyPair:
    """The coordinator's key pair."""
    return _derive(token, b"pipeworker-coord")


def client_keys(token: str) -> KeyPair:
    """The key pair every worker of the job shares."""
    return _derive(token, b"pipeworker-peer")
