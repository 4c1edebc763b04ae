"""Keys are derived from the token, and never show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import UsageError
from pipeworker.wire.keys import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    client_keys,
    given_token,
    new_token,
    server_keys,
)

tokens = st.text(st.characters(codec="utf-8"), min_size=16, max_size=80)


@given(tokens)
def test_the_same_token_gives_the_same_valid_pair(token: str) -> None:
    for make in (server_keys, client_keys):
        keys = make(token)
        assert keys == make(token)
        assert zmq.curve_public(keys.secret) == keys.public
        assert len(keys.public) == 40


@given(one=tokens, other=tokens)
def test_another_token_or_role_gives_other_keys(one: str, other: str) -> None:
    assert server_keys(one).secret != client_keys(one).secret
    if one != other:
        assert server_keys(one).secret != server_keys(other).secret
        assert client_keys(one).public != client_keys(other).public


def test_tokens_are_fresh_and_long() -> None:
    made = {new_token() for _ in range(50)}
    assert len(made) == 50
    assert all(len(bytes.fromhex(token)) == 32 for token in made)


@pytest.mark.parametrize("token", ["", "secret", "x" * 15])
def test_a_short_token_is_rejected_and_not_shown(token: str) -> None:
    with pytest.raises(UsageError, match=r"^PIPEWORKER_TOKEN: the token is too short") as caught:
        server_keys(token)
    assert not token or token not in str(caught.value).replace("too short to be a secret", "")


@pytest.mark.parametrize("show", [repr, str, "{}".format], ids=["repr", "str", "format"])
def test_a_pair_never_shows_its_secret(show: object) -> None:
    keys = server_keys(new_token())
    assert callable(show)
    shown = show(keys)
    assert keys.public.decode() in shown
    assert keys.secret.decode() not in shown


def test_a_token_is_given_by_a_variable_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert given_token() == ""
    path = tmp_path / "token"
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
    with pytest.raises(UsageError, match=r"PIPEWORKER_TOKEN_FILE: .*token: No such file"):
        given_token()
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"PIPEWORKER_TOKEN_FILE: .*token: not a text file"):
        given_token()
    path.write_text("of a file\n")
    assert given_token() == "of a file"
    monkeypatch.setenv(TOKEN_VARIABLE, "of a variable")
    assert given_token() == "of a variable"
