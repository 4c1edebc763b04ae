"""CURVE keys and other secrets, derived from the job's token.

A process with the token can authenticate itself as either side and recognize the other; no other
process completes the handshake. The token is 32 random bytes in hexadecimal.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from pipeworker.errors import UsageError

TOKEN_VARIABLE = "PIPEWORKER_TOKEN"
TOKEN_FILE_VARIABLE = "PIPEWORKER_TOKEN_FILE"
_MIN_CHARACTERS = 16


def new_token() -> str:
    """Return a new job token."""
    return secrets.token_hex(32)


def given_token() -> str:
    """Return the token that the environment gives, or that is in a file it names; "" for none."""
    token, path = os.environ.get(TOKEN_VARIABLE, ""), os.environ.get(TOKEN_FILE_VARIABLE)
    if token or not path:
        return token
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{TOKEN_FILE_VARIABLE}: {path}: {reason}") from None


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret one."""

    public: bytes
    secret: bytes = field(repr=False)  # it never reaches a log by accident


def derive_secret(token: str, purpose: bytes) -> bytes:
    """Return 32 bytes for one purpose, named by at most 16 bytes, independent of all others."""
    if len(token) < _MIN_CHARACTERS:
        raise UsageError(
            f"{TOKEN_VARIABLE}: the token is too short to be a secret; use {_MIN_CHARACTERS} "
            "characters or more"
        )
    return hashlib.blake2b(token.encode(), digest_size=32, person=purpose).digest()


def _key_pair(token: str, purpose: bytes) -> KeyPair:
    secret = z85.encode(derive_secret(token, purpose))
    return KeyPair(zmq.curve_public(secret), secret)


def server_keys(token: str) -> KeyPair:
    """Return the coordinator's key pair."""
    return _key_pair(token, b"pipeworker-coord")


def client_keys(token: str) -> KeyPair:
    """Return the key pair that all workers of the job share."""
    return _key_pair(token, b"pipeworker-peer")
